"""Late interaction: one vector per token; queries match documents token by token.

ColBERT (Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832). The score of a
document is MaxSim: the sum, over the tokens of the query, of the largest product with a
token of the document. Training contrasts the documents of a batch, or follows the
scores of a cross-encoder (ColBERTv2, https://arxiv.org/abs/2112.01488).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.config_fields import Field, at_least, one_of
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.late_inputs import (
  DOCUMENT,
  EXPANSIONS,
  HIDING,
  PUNCTUATION,
  QUERY,
  LateInputs,
)
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.labelled import packed_examples
from bert_jax.model import architectures, bert_config, layers
from bert_jax.objectives import losses
from bert_jax.tasks import sentence_embedding, task_kind

_AUTO = 'auto'  # the field has the value of `init_from`, or the value of ColBERT


class BertForLateInteraction(nn.Module):
  """Projects the hidden state of each token to a vector."""

  config: bert_config.BertConfig
  width: int  # of the vectors, D'
  normalizes: bool = True  # to length 1

  def setup(self):
    self.bert = architectures.make_encoder(self.config)
    self.projection = layers.dense(self.config, self.width, ('embed', 'labels'),
                                   dtype=jnp.float32, use_bias=False)

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> [B, L, D'] float32."""
    del starts
    vectors = self.projection(self.bert.encode(tokens, deterministic=deterministic))
    return sentence_embedding.unit(vectors) if self.normalizes else vectors


def max_sim(queries: jax.Array, counts: jax.Array, document: jax.Array,
            document_counts: jax.Array) -> jax.Array:
  """Computes the MaxSim of each query with one document: [Q].

  Args:
    queries: [Q, T, D'].
    counts: [Q, T] bool, the tokens that count.
    document: [S, D'].
    document_counts: [S] bool; without a token that counts the score is -1e9.
  """
  products = jnp.einsum('qtd,sd->qts', queries, document,
                        preferred_element_type=jnp.float32)
  best = jnp.where(document_counts, products, -jnp.inf).max(-1)  # [Q, T]
  score = jnp.sum(jnp.where(counts, best, 0), axis=-1)
  return jnp.where(document_counts.any(), score, layers.MASKED)


@dataclasses.dataclass(frozen=True)
class LateInteraction(sentence_embedding.SentenceEmbedding):
  """Trains each query to score its own document above all others in the batch."""

  temperature: float = 1.0  # the divisor of MaxSim
  query_length: int = 32  # upper bound on the tokens of a query
  distills: bool = False  # the targets are scores of a teacher

  def _tokens(self, vectors: jax.Array, batch: packed_examples.Batch, members: jax.Array,
              length: int) -> tuple[jax.Array, jax.Array]:
    """Gathers tokens of inputs: vectors [n, length, D'], counts [n, length] bool."""
    row, slot = jnp.divmod(jnp.maximum(members, 0), batch.starts.shape[1])
    row, slot = row[:, None], slot[:, None]
    at = batch.starts[row, slot] + jnp.arange(length)
    in_row = at < vectors.shape[1]
    at = jnp.where(in_row, at, 0)
    is_own = in_row & (batch.tokens.text_ids[row, at] == slot + 1)
    counts = is_own & (batch.token_targets[row, at] > 0) & (members >= 0)[:, None]
    return vectors[row, at], counts

  def logits(self, apply: Callable[..., jax.Array],
             batch: packed_examples.Batch) -> jax.Array:
    """Returns the MaxSim of each query with each document: [E, (C - 1) * E].

    The documents are in the order of `sentence_embedding.contrast`.
    """
    vectors = apply(batch.tokens, batch.starts)  # [R, L, D']
    length = vectors.shape[1]
    queries = self._tokens(vectors, batch, batch.members[:, 0],
                           min(self.query_length, length))
    documents = self._tokens(vectors, batch, batch.members[:, 1:].T.reshape(-1), length)
    # One document at a time: the products of all would be the largest array of the step.
    score = jax.checkpoint(lambda document: max_sim(*queries, *document), prevent_cse=False)
    return jax.lax.map(score, documents).T

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns the 'loss', and 'accuracy': how often the own document scores highest.

    With a teacher the loss is KL(teacher || student) * temperature^2. Both distributions
    are the softmax of scores / temperature over the documents of an example.
    """
    exists = batch.members >= 0  # [E, C]
    of_examples, right = sentence_embedding.contrast_scores(
        logits / self.temperature, exists)
    # A file of data.eval has a score for each pair instead, and needs no loss.
    if self.distills and batch.targets.ndim == 2:
      own = logits.reshape(len(logits), -1, len(logits))  # [E, C - 1, E]
      own = jnp.moveaxis(jnp.diagonal(own, axis1=0, axis2=2), -1, 0)  # [E, C - 1]
      student, teacher = (jnp.where(exists[:, 1:], x, layers.MASKED)
                          for x in (own, batch.targets))
      of_examples = losses.soft_divergence(student, teacher, self.temperature)
    return {'loss': losses.weighted(of_examples, batch.is_real),
            'accuracy': losses.weighted(right, batch.is_real)}

  def reduced(self, logits: jax.Array) -> jax.Array:
    """Returns the score of each query and its first document: [E, 1]."""
    return jnp.diagonal(logits)[:, None]


def inputs_of(data: Mapping[str, Any]) -> LateInputs:
  """Returns how a run with these fields of `data` makes its inputs."""
  length, expands = data['query_length'], data['query_expansion'] != 'none'
  return LateInputs(expansion=data['query_expansion'], expanded=length if expands else 0,
                    query_length=None if expands else length,
                    skipped=tuple(data['skipped_words']))


def fields_if_unset(data: ConfigDict, earlier: Mapping[str, Any],
                    texts: LateInputs | None, prompts: Mapping[str, str], width: int,
                    max_len: int, can_hide: bool) -> dict[str, Any]:
  """Returns the values of `init_from` for fields of `data` that the user left unset.

  Args:
    data: the config group.
    earlier: `data` of an earlier run in the workdir, whose values win; {} = no such run.
    texts: how the model makes its inputs; None = another kind of model.
    prompts: its prompts by role.
    width: the width of its vectors; 0 = it has none.
    max_len: the most tokens of an input.
    can_hide: `can_hide` of the model's config.
  """
  expansion = 'fixed' if can_hide else 'fixed_visible'
  texts = texts or LateInputs(expansion=expansion, expanded=min(32, max_len),
                              skipped=PUNCTUATION)
  values = {'width': width or 128,
            'query_prompt': prompts.get(QUERY, ''),
            'document_prompt': prompts.get(DOCUMENT, ''),
            'query_expansion': texts.expansion,
            'query_length': texts.expanded or texts.query_length or max_len,
            'skipped_words': texts.skipped}
  return {f'data.{name}': earlier.get(name, value) for name, value in values.items()
          if data[name] in (0, _AUTO, (_AUTO,))}


@dataclasses.dataclass(frozen=True)
class LateFiles(sentence_embedding.EmbeddingFiles):
  """The files of `sentence_embedding`, with the config fields of late interaction."""

  shows_labels = False  # labels only number the entries of a vector

  config_fields = {
      **sentence_embedding.EmbeddingFiles.config_fields,
      'data.pooling': None,
      'data.matryoshka': None,
      'data.matryoshka_weights': None,
      'data.cached_parts': None,
      'data.text_pair_column': 'text_pair',  # the column of the document
      'data.temperature': Field(1.0),  # the divisor of MaxSim
      # A field of each line: a list with a teacher's score of the positive and of each
      # negative, as `mine --teacher` writes it. The loss then follows these scores.
      'data.scores_column': Field(''),
      # Numbers in a vector; 0 = as in init_from if it is a ColBERT, else 128.
      'data.width': Field(0, at_least(0)),
      # Text before each query; auto = as in init_from if it is a ColBERT, else none.
      'data.query_prompt': Field(_AUTO),
      # Text before each document; auto = as in init_from if it is a ColBERT, else none.
      'data.document_prompt': Field(_AUTO),
      # none, or how [MASK] fills a short query: fixed = to query_length exactly, min = at
      # least; with _visible the other tokens see these [MASK]. auto = as in init_from if
      # it is a ColBERT, else fixed, for DeBERTa fixed_visible.
      'data.query_expansion': Field(_AUTO, one_of((_AUTO, *EXPANSIONS))),
      # Tokens of a query; 0 = as in init_from if it is a ColBERT, else 32, or max_len if it
      # is smaller.
      'data.query_length': Field(0, at_least(0)),
      # Tokens of documents that do not count; () = none, auto = as in init_from if it is
      # a ColBERT, else punctuation.
      'data.skipped_words': Field((_AUTO,)),
      'batch_size': 32,
      'max_len': 180,
  }

  @staticmethod
  def check(config):
    sentence_embedding.check_texts(config)
    words = tuple(config.data.skipped_words)
    require(all(isinstance(word, str) for word in words),
            f'data.skipped_words={words} must be words')
    require(bool(config.data.text_pair_column),
            'data.text_pair_column is not set: a query needs a document')
    require(not config.data.scores_column or config.data.negative_column,
            f'data.scores_column={config.data.scores_column} compares the documents of a '
            'query, and without data.negative_column each query has one: give both')

  @classmethod
  def make(cls, config, examples, _):
    data = config.data
    require(data.query_length <= config.max_len,
            f'data.query_length={data.query_length} is above max_len={config.max_len}')
    model = architectures.make_config(config.model)
    require(model.can_hide or data.query_expansion not in HIDING,
            f'data.query_expansion={data.query_expansion} hides the added [MASK], and the '
            'DeBERTa of transformers computes other vectors for hidden tokens: give '
            f'{data.query_expansion}_visible or none')
    head = BertForLateInteraction(model, data.width)
    # With the expansion min, data.query_length does not limit a query.
    is_bounded = not data.query_expansion.startswith('min')
    task = LateInteraction(head, temperature=data.temperature,
                           query_length=data.query_length if is_bounded else config.max_len,
                           distills=bool(data.scores_column))
    return cls(task, labels=entries(data.width))

  def features(self, examples, tokenizer, config, **_):
    """Makes the inputs of queries and documents; token targets mark tokens that count."""
    of_role = {QUERY: [text for e in examples for text in e.texts[:1]],
               DOCUMENT: [text for e in examples for text in e.texts[1:]]}
    special = inputs_lib.count_special(tokenizer, 1)
    require(config.data.query_length > special,
            f'data.query_length={config.data.query_length} leaves no token for the text of '
            f'a query: it has {special} special tokens')
    queries, documents = (
        zip(*inputs_of(config.data).make(
            [(config.data[f'{role}_prompt'] + text,) for text in texts], tokenizer, role,
            config.max_len))
        for role, texts in of_role.items())
    inputs, counts = zip(*(x for e in examples for x in (
        next(queries), *(next(documents) for _ in e.texts[1:]))))
    owners = np.repeat(np.arange(len(examples)), [len(e.texts) for e in examples])
    scores = [e.score for e in examples]
    targets = None if None in scores else np.array(scores, np.float32)
    return packed_examples.Features(inputs, owners, targets,
                                    [x.astype(np.int32) for x in counts])


def entries(width: int) -> tuple[str, ...]:
  """Names the entries of a vector, the outputs of the head."""
  return tuple(map(str, range(width)))


class LateKind(task_kind.TaskKind):
  """The vectors of a text's tokens, or the ranking of documents by MaxSim."""

  name = 'late_interaction'
  files = LateFiles
  parameter_groups = ('projection',)
  head = BertForLateInteraction
  outputs = ('token_embeddings',)
  scores_tokens = True
  fields = ('text',)
  optional = ('documents',)
  aliases = {'query': 'text'}  # a line of `reranking` is ranked too

  @classmethod
  def head_of(cls, bert):
    return dataclasses.replace(super().head_of(bert), normalizes=bert.late.normalizes)

  @staticmethod
  def answer(bert, examples, options):
    """Answers with vectors, or ranks the 'documents' of a text, which is then a query.

    A text without 'documents' is a query if `options.prompt` is 'query', else a document.
    """
    texts = {QUERY: [], DOCUMENT: []}
    for example in examples:
      documents = example.get('documents')
      require(documents is None or isinstance(documents, list)
              and all(isinstance(x, str) for x in documents),
              "'documents' must be a list of texts")
      is_query = options.prompt == QUERY or documents is not None
      texts[QUERY if is_query else DOCUMENT].append(example['text'])
      texts[DOCUMENT] += documents or []
    # The texts of all examples share batches.
    of_role = {role: iter(vectors(bert, some, role)) for role, some in texts.items()}
    answers = []
    for example in examples:
      documents = example.get('documents')
      if documents is None:
        role = QUERY if options.prompt == QUERY else DOCUMENT
        answers.append({'vectors': next(of_role[role]).tolist()})
      else:
        query, own = next(of_role[QUERY]), [next(of_role[DOCUMENT]) for _ in documents]
        scores = max_sims([query], own)[0]
        answers.append({'ranking': [{'document': int(i), 'score': float(scores[i])}
                                    for i in np.argsort(-scores, kind='stable')]})
    return answers


def vectors(bert: task_kind.TrainedModel, texts: Sequence[str],
            role: str) -> list[np.ndarray]:
  """Computes the vectors of the tokens that count: [tokens, D'] float32 of each text.

  Args:
    bert: a model of late interaction.
    texts: queries or documents; a text that is too long loses its end.
    role: `late_inputs.QUERY` or `DOCUMENT`.

  Raises:
    UserError: the model is for another task.
  """
  head = LateKind.head_of(bert)
  inputs, counts = bert.late.inputs(texts, bert.tokenizer, role, bert.trained_length)
  of_texts = bert.per_token(inputs, functools.partial(task_kind.apply_head, head))
  return [x[keep] for x, keep in zip(of_texts, counts)]


def _padded(texts: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads the vectors of texts; returns ([count, T, D'], [count, T] bool real tokens)."""
  length = max(len(x) for x in texts)
  length = -(-max(length, 1) // 32) * 32  # few shapes, few compilations
  padded = np.zeros((count, length, texts[0].shape[1]), np.float32)
  is_real = np.zeros((count, length), bool)
  for i, x in enumerate(texts):
    padded[i, :len(x)], is_real[i, :len(x)] = x, True
  return padded, is_real


@jax.jit
def _max_sims(queries, counts, documents, document_counts):
  # The default on a TPU, bfloat16, would reorder documents with similar scores.
  with jax.default_matmul_precision('highest'):
    return jax.lax.map(lambda document: max_sim(queries, counts, *document),
                       (documents, document_counts)).T


def max_sims(queries: Sequence[np.ndarray],
             documents: Sequence[np.ndarray]) -> np.ndarray:
  """Computes the MaxSim of all pairs from the results of `vectors`: [Q, N] float32."""
  scores = np.zeros((len(queries), len(documents)), np.float32)
  if not scores.size:
    return scores
  order = np.argsort([len(x) for x in documents])  # blocks of similar lengths
  size = 256

  def rows(n):
    return min(size, 1 << (n - 1).bit_length())  # few shapes, few compilations

  for first in range(0, len(queries), size):
    some = _padded(queries[first:first + size], rows(len(queries)))
    for at in np.split(order, range(size, len(order), size)):
      block = _padded([documents[i] for i in at], rows(len(documents)))
      of_block = np.asarray(_max_sims(*some, *block))
      scores[first:first + size, at] = of_block[:len(queries) - first, :len(at)]
  return scores
