"""Tags each word, as in named entity recognition (Devlin et al. 2019, section 5.3)."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special
import tokenizers
from tokenizers import pre_tokenizers

from bert_jax.config_fields import Field
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError, require
from bert_jax.labelled import conll, packed_examples, texts
from bert_jax.model import architectures
from bert_jax.objectives import losses
from bert_jax.tasks import (
  finetuning,
  finetuning_data,
  metrics,
  sequence_classification,
  task_kind,
)

# Splits a text as BERT's tokenizer does, whatever the vocabulary: at spaces, and around
# punctuation and Chinese characters.
_WORDS = pre_tokenizers.Sequence([
    pre_tokenizers.BertPreTokenizer(),
    pre_tokenizers.Split(tokenizers.Regex(r'\p{Han}'), 'isolated')])
# Scripts without spaces between words: how the Unicode names of their letters begin.
# Chinese is missing, because `_WORDS` splits it into characters.
_UNSPACED = ('THAI ', 'LAO ', 'KHMER ', 'MYANMAR ', 'TIBETAN ', 'HIRAGANA ', 'KATAKANA ',
             'HALFWIDTH KATAKANA ', 'KATAKANA-HIRAGANA ', 'NEW TAI LUE ', 'TAI LE ',
             'TAI THAM ', 'TAI VIET ', 'JAVANESE ', 'BALINESE ')
_TAGS_SHOWN = 20  # in messages


class BertForTokenClassification(sequence_classification.BertForSequenceClassification):
  """A dense layer on the hidden state of each token."""

  def __call__(self, tokens: Tokens, starts: jax.Array | None = None, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> logits [B, L, num_labels] float32."""
    hidden = self.bert.features(self.bert.encode(tokens, deterministic=deterministic))
    return self.classify(hidden, deterministic=deterministic)


def find_words(text: str) -> list[tuple[int, int]]:
  """Finds the words in running text: characters [start, end)."""
  return [place for _, place in _WORDS.pre_tokenize_str(text)]


def word_pieces(sentences: Sequence[Sequence[str]],
                tokenizer: Tokenizer) -> list[list[list[int]]]:
  """Returns the pieces of each word, encoded as if a space came before it.

  A word without pieces becomes [UNK].
  """
  before = tokenizer.before_word
  encoded = inputs_lib.encode([[before + word for word in words] for words in sentences],
                              tokenizer)
  return [[pieces or [tokenizer.unk_id] for pieces in words] for words in encoded]


def _windows(words: Sequence[Sequence[int]], room: int) -> list[tuple[int, int]]:
  """Splits a sentence into the fewest inputs; returns the words [first, end) of each."""
  firsts, used = [0], 0
  for i, pieces in enumerate(words):
    if used + len(pieces) > room:
      firsts.append(i)
      used = 0
    used += len(pieces)
  return list(zip(firsts, [*firsts[1:], len(words)]))


def _features(sentences: Sequence[Sequence[Sequence[int]]],
              tokenizer: Tokenizer,
              max_len: int,
              tags: Sequence[Sequence[int]] | None = None) -> packed_examples.Features:
  """Makes the inputs of sentences, whose words are lists of pieces.

  The token targets are 1 + tag on the first piece of each word (1 if `tags` is None), and
  0 on all other tokens.
  """
  inputs, owners, targets = [], [], []
  room = max_len - inputs_lib.count_special(tokenizer, 1)
  before, after = ([0] * len(special) for special in tokenizer.around.one)
  for i, pieces_of_words in enumerate(sentences):
    # A word longer than an input keeps its first pieces: the tag is on the first one.
    words = [pieces[:room] for pieces in pieces_of_words]
    marks = [1 + tag for tag in tags[i]] if tags is not None else [1] * len(words)
    for first, end in _windows(words, room):
      window, target = [], [*before]
      for pieces, mark in zip(words[first:end], marks[first:end]):
        window += pieces
        target += [mark] + [0] * (len(pieces) - 1)
      inputs.append(inputs_lib.join(tokenizer, window))
      owners.append(i)
      targets.append(np.array([*target, *after], np.int32))
  return packed_examples.Features(inputs, np.array(owners, np.int64),
                                  token_targets=targets)


def _of_words(f: packed_examples.Features,
              per_token: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Takes the values at the first piece of each word.

  Args:
    f: the inputs, from `_features`.
    per_token: [tokens, ...] of each input.

  Returns:
    [words, ...] of each sentence.
  """
  of_sentences = [[] for _ in range(f.count)]
  for owner, marks, values in zip(f.owners, f.token_targets, per_token):
    of_sentences[owner].append(values[marks > 0])
  return [np.concatenate(of_inputs) for of_inputs in of_sentences]


@dataclasses.dataclass(frozen=True)
class TokenClassification(finetuning.FineTuning):
  """Predicts the tag of each word at its first piece."""

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns cross-entropy 'loss' and 'accuracy' over the words; logits [R, L, tags]."""
    is_word = (batch.token_targets > 0).astype(jnp.float32)
    return losses.classification(logits, jnp.maximum(batch.token_targets - 1, 0), is_word)

  def reduced(self, logits: jax.Array) -> jax.Array:
    """Returns the most likely tag of each token: [R, L] int32."""
    return logits.argmax(-1)


@dataclasses.dataclass(frozen=True)
class TokenFiles(finetuning_data.ExampleFiles):
  """Sentences with a tag for each word."""

  best_score = 'f1'
  score_names = ('precision', 'recall', 'f1', 'accuracy')

  config_fields = {
      # conll (words and tags in columns, from 0, or from -1 at the end), or jsonl with
      # lists of words and tags.
      'data.format': 'auto',
      'data.text_pair_column': None,
      # The column of the words: a number in CoNLL, a name in JSON lines.
      'data.text_column': '0',
      # The column of the tags: a number in CoNLL, a name in JSON lines.
      'data.label_column': '-1',
      'data.labels': Field(()),  # tags in order; () = all tags of the training file
      'optimizer.learning_rate': 5e-5,
  }

  @staticmethod
  def read(path, data, split, notes):
    return conll.read(path, data, labelled=split != 'test', notes=notes)

  @classmethod
  def make(cls, config, examples, _):
    labels = texts.distinct('data.labels', config.data.labels)
    require(len(labels) != 1,
            f'data.labels={",".join(labels)} is one tag: name every tag of '
            f'{config.data.train}, or leave data.labels out')
    # A small training file may have only one of B-X and I-X; a held-out file needs both.
    tags = conll.with_partners({tag for s in examples for tag in s.tags})
    labels = labels or tuple(sorted(tags))
    require(len(labels) > 1,
            f'{config.data.train} has the tag {labels[0]!r} only: there is nothing to learn '
            'from one class')
    head = BertForTokenClassification(architectures.make_config(config.model),
                                      len(labels))
    return cls(TokenClassification(head), labels)

  def features(self, examples, tokenizer, config, **_):
    number = {label: i for i, label in enumerate(self.labels)}
    for s in examples:
      unknown = sorted(set(s.tags) - number.keys())
      if unknown:
        raise UserError(
            f'{s.where}: the tag {unknown[0]!r} is none of the {len(number)} tags: '
            f'{", ".join(self.labels[:_TAGS_SHOWN])}')
    pieces = word_pieces([s.words for s in examples], tokenizer)
    tags = [[number[tag] for tag in s.tags] for s in examples]
    return _features(pieces, tokenizer, config.max_len, tags)

  def predicted(self, split: finetuning_data.Split,
                outputs: list[finetuning_data.Output]) -> list[list[str]]:
    """Returns the tags of every sentence of a file."""
    f = split.features
    per_token = finetuning_data.by_input(outputs, len(f.inputs))
    return [[self.labels[i] for i in tags] for tags in _of_words(f, per_token)]

  def scores(self, split, outputs):
    return metrics.entities([s.tags for s in split.examples],
                            self.predicted(split, outputs))


class TokenKind(task_kind.TaskKind):
  """The tagged spans of running text, such as named entities."""

  name = 'token_classification'
  files = TokenFiles
  parameter_groups = ('classifier',)
  head = BertForTokenClassification
  scores_tokens = True
  transformers = 'ForTokenClassification'
  fields = ('text',)

  @staticmethod
  def answer(bert, examples, _):
    return tag(bert, [e['text'] for e in examples])

  @staticmethod
  def write_test(bert, _, sentences):
    lines, pieces = [], word_pieces([s.words for s in sentences], bert.tokenizer)
    for sentence, probabilities in zip(sentences, _tag_probabilities(bert, pieces)):
      lines += [f'{word} {bert.model.labels[i]}'
                for word, i in zip(sentence.words, probabilities.argmax(-1))] + ['']
    yield 'predictions.conll', '\n'.join(lines) + '\n'


def _tag_probabilities(bert: task_kind.TrainedModel,
                       sentences: Sequence[Sequence[Sequence[int]]]) -> list[np.ndarray]:
  """Returns [words, tags] probabilities of each sentence, given as pieces of words."""
  f = _features(sentences, bert.tokenizer, bert.trained_length)
  apply = functools.partial(task_kind.apply_head, TokenKind.head_of(bert))
  per_token = bert.per_token(f.inputs, apply)
  return [special.softmax(x.astype(np.float64), -1) for x in _of_words(f, per_token)]


class Unit(NamedTuple):
  """A part of a text that gets its own tag: a word, or a token of unspaced text."""

  pieces: list[int]
  start: int  # characters [start, end) of the text
  end: int
  continues: bool  # True for all tokens of an unspaced span except the first


def _is_unspaced(word: str) -> bool:
  """True if a word has letters of a script that writes no spaces between words."""
  return any(unicodedata.name(c, '').startswith(_UNSPACED) for c in word)


def _tokens_of(text: str, start: int, end: int, tokenizer: Tokenizer) -> list[Unit]:
  """Splits a span of unspaced text into its tokens."""
  before = tokenizer.before_word
  (ids, spans), = tokenizer.encode_with_offsets([before + text[start:end]])
  units, waiting = [], []
  for i, (first, last) in zip(ids, spans):
    waiting.append(i)
    # A token that holds only the space before the span joins the next token.
    if last > len(before):
      units.append(Unit(waiting, start + max(first - len(before), 0),
                        start + last - len(before), bool(units)))
      waiting = []
  return units


def find_units(running: Sequence[str], tokenizer: Tokenizer) -> list[list[Unit]]:
  """Splits each running text into words, and unspaced text (such as Thai) into tokens.

  Each token of unspaced text gets a tag, as in the pipeline of transformers.
  """
  places = [find_words(text) for text in running]
  pieces = word_pieces([[text[start:end] for start, end in words]
                        for text, words in zip(running, places)], tokenizer)
  units = []
  for text, words, of_text in zip(running, places, pieces):
    units.append([])
    for (start, end), of_word in zip(words, of_text):
      # An unspaced "word" may be a whole sentence, which needs more than one tag.
      tokens = _is_unspaced(text[start:end]) and _tokens_of(text, start, end, tokenizer)
      units[-1] += tokens or [Unit(of_word, start, end, False)]
  return units


def _joined(units: Sequence[Unit], tags: Sequence[str],
            plain_letters: bool = False) -> list[str]:
  """Returns the tags, with B- and I- added to equal plain tags in one unspaced span."""
  joined = list(tags)
  for i, (unit, tag) in enumerate(zip(units, tags)):
    # Only plain tags need this: B-PER already says where an entity begins.
    if conll.is_plain(tag, plain_letters) and unit.continues and tags[i - 1] == tag:
      joined[i] = f'I-{tag}'
      if joined[i - 1] == tag:
        joined[i - 1] = f'B-{tag}'
  return joined


def tag(bert: task_kind.TrainedModel, inputs: Sequence[str]) -> list[task_kind.Answer]:
  """Answers each text with its entities.

  An answer is {'entities': [{'start', 'end', 'text', 'label', 'probability'}]}. Start and
  end count characters; the probability is the mean over the tags of the entity.
  """
  units = find_units(inputs, bert.tokenizer)
  sentences = [[unit.pieces for unit in of_text] for of_text in units]
  plain_letters = conll.letters_are_plain(bert.model.labels)
  answers = []
  for text, words, probabilities in zip(inputs, units, _tag_probabilities(bert, sentences)):
    entities = []
    tags = [bert.model.labels[i] for i in probabilities.argmax(-1)]
    for e in conll.entities(_joined(words, tags, plain_letters), plain_letters):
      start, end = words[e.first].start, words[e.last].end
      entities.append({
          'start': start, 'end': end, 'text': text[start:end], 'label': e.label,
          'probability': float(probabilities[e.first:e.last + 1].max(-1).mean())})
    answers.append({'entities': entities})
  return answers
