"""A tag for each word: named entities and the like (Devlin et al. 2019, section 5.3)."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled import conll
from bert_jax.labelled import texts
from bert_jax.labelled.conll import TaggedWords
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Features
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.task_heads import BertForTokenClassification
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.tasks import metrics as scores_lib
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Output
from bert_jax.tasks.finetuning import Split
from bert_jax.tasks.finetuning import Splits
from bert_jax.tasks.finetuning import by_input
from bert_jax.tasks.finetuning import eval_files
from bert_jax.tasks.finetuning import not_empty

# As BERT's own tokeniser splits a text, whatever the vocabulary: at spaces, around punctuation and
# around the characters of Chinese.
_WORDS = pre_tokenizers.Sequence([
    pre_tokenizers.BertPreTokenizer(),
    pre_tokenizers.Split(tokenizers.Regex(r'\p{Han}'), 'isolated')])


def find_words(text: str) -> list[tuple[int, int]]:
  """Where the words of a text stand that nobody has split: characters [start, end)."""
  return [place for _, place in _WORDS.pre_tokenize_str(text)]


def word_pieces(sentences: Sequence[Sequence[str]],
                tokenizer: Tokenizer) -> list[list[list[int]]]:
  """The pieces of every word as after a space, punctuation too, in training and in use.

  A word that the tokeniser sees nothing in becomes [UNK].
  """
  space = ' ' if tokenizer.kind == 'bpe' else ''  # the others put it there themselves
  pieces = iter(tokenizer.encode_batch([space + word for words in sentences for word in words]))
  return [[next(pieces) or [tokenizer.unk_id] for _ in words] for words in sentences]


def windows(words: Sequence[Sequence[int]], room: int) -> list[list[int]]:
  """The words of a sentence in as few inputs as hold them, cut between words: their numbers."""
  found, used = [[]], 0
  for i, pieces in enumerate(words):
    size = min(len(pieces), room)
    if used + size > room:
      found.append([])
      used = 0
    found[-1].append(i)
    used += size
  return found


def features(sentences: Sequence[Sequence[Sequence[int]]], tokenizer: Tokenizer, max_len: int,
             tags: Sequence[Sequence[int]] | None = None) -> Features:
  """The inputs of sentences of pieces of words.

  Token targets are 1 + the tag on the first piece of each word (1 where no tags are given) and 0
  on all else.
  """
  found, owners, targets = [], [], []
  for i, words in enumerate(sentences):
    for window in windows(words, max_len - 2):
      ids, marks = [], [0]
      for word in window:
        pieces = words[word][:max_len - 2]
        ids += pieces
        marks += [1 + (tags[i][word] if tags is not None else 0)] + [0] * (len(pieces) - 1)
      found.append(inputs_lib.join(tokenizer, ids))
      owners.append(i)
      targets.append(np.array([*marks, 0], np.int32))
  return Features(found, np.array(owners, np.int64), token_targets=targets)


def tags_of(f: Features, per_token: Sequence[np.ndarray]) -> list[np.ndarray]:
  """What is known of the first pieces, word by word of each sentence: [words, ...].

  Args:
    f: the features of the sentences.
    per_token: for each input [tokens, ...].
  """
  found = [[] for _ in range(f.count)]
  for owner, marks, values in zip(f.owners, f.token_targets, per_token):
    found[owner].append(values[marks > 0])
  return [np.concatenate(parts) for parts in found]


@dataclasses.dataclass(frozen=True)
class TokenClassification(FineTuning):
  """A tag for the first piece of each word."""

  score_names = ('precision', 'recall', 'f1', 'accuracy')

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """[R, L, tags]."""
    return apply(batch.inputs)

  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """Cross-entropy and accuracy over the words."""
    losses, right = cross_entropy(logits, jnp.maximum(batch.token_targets - 1, 0))
    words = (batch.token_targets > 0).astype(jnp.float32)
    return {'loss': weighted(losses, words), 'accuracy': weighted(right, words)}

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The likeliest tag of each token, [R, L]."""
    return logits.argmax(-1)

  def predicted(self, split: Split, outputs: list[Output]) -> list[list[str]]:
    """The tags of every sentence."""
    f = split.batches.features
    return [[self.labels[i] for i in tags]
            for tags in tags_of(f, by_input(outputs, len(f.inputs)))]

  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """Those of whole entities, as conlleval has them."""
    gold = [sentence.tags for sentence in split.examples]
    return scores_lib.entities(gold, self.predicted(split, outputs))


def create(config: ConfigDict, model: BertConfig, tokenizer: Tokenizer,
           splits: Splits) -> TokenClassification:
  """The task that a config describes.

  Raises:
    UserError: something is wrong with the data.
  """
  data = config.data

  def read(path):
    return not_empty(conll.read(path, data), path)

  train = read(data.train)
  labels = texts.given_labels(data.labels) or tuple(sorted(
      conll.with_partners({tag for s in train for tag in s.tags})))
  number = {label: i for i, label in enumerate(labels)}
  if len(labels) == 1:
    raise UserError(f'{data.train} has the tag {labels[0]!r} only: there is nothing to learn from '
                    'one class')

  def make(examples: Sequence[TaggedWords]):
    for sentence in examples:
      unknown = sorted(set(sentence.tags) - number.keys())
      if unknown:
        raise UserError(f'{sentence.where}: the tag {unknown[0]!r} is none of the {len(labels)} '
                        f'tags: {", ".join(labels[:20])}')
    return features(word_pieces([s.words for s in examples], tokenizer), tokenizer, config.max_len,
                    [[number[tag] for tag in s.tags] for s in examples])

  evals = ((name, read(path)) for name, path in eval_files(config))
  return TokenClassification(
      BertForTokenClassification(model, len(labels)), labels, splits.train(train, make(train)),
      tuple(splits.evaluation(name, examples, make(examples)) for name, examples in evals),
      notes=(), feed=splits.feed)
