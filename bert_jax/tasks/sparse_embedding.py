"""Sparse vectors of texts: the masked-LM head weighs each entry of the vocabulary.

SPLADE (Formal et al. 2021, https://arxiv.org/abs/2107.05720; max pooling as in version 2,
https://arxiv.org/abs/2109.10086). The model is an encoder with its masked-LM head:
training starts from any masked LM, and the result exports as a masked LM.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config_fields import Field, at_least
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokens import Tokens
from bert_jax.labelled import packed_examples
from bert_jax.model import architectures, heads
from bert_jax.objectives import losses
from bert_jax.tasks import sentence_embedding, task_kind

# Limits the memory of predictions, [texts, V] float32.
_TEXTS_AT_ONCE = 256


class BertForSparseEmbedding(heads.BertForPreTraining):
  """Takes log(1 + relu(logit)) of each entry, at the token with the largest logit.

  `pooling` and `activation` have the values of `interop.sparse_layout.SparseLayout`:
  pooling 'sum' adds the weights of all tokens, and activation 'log1p_relu' takes the
  logarithm twice.
  """

  pooling: str = 'max'
  activation: str = 'relu'

  def _weight(self, logits: jax.Array) -> jax.Array:
    weights = jnp.log1p(jax.nn.relu(logits))
    return jnp.log1p(weights) if self.activation == 'log1p_relu' else weights

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 starts of the texts -> [B, P, padded V] float32."""
    hidden = self.bert.encode(tokens, deterministic=deterministic)
    everywhere = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])
    logits = self.mlm_logits(hidden, everywhere)  # [B, L, padded V]
    texts = jnp.arange(1, starts.shape[1] + 1)
    if self.pooling == 'sum':
      member = (tokens.text_ids[:, :, None] == texts).astype(logits.dtype)  # [B, L, P]
      return jnp.einsum('blp,blv->bpv', member, self._weight(logits))

    def best_token(text):
      is_member = (tokens.text_ids == text)[:, :, None]
      return jnp.argmax(jnp.where(is_member, logits, -jnp.inf), axis=1)

    # argmax and a gather, because the gradient of max keeps [P, L, padded V] masks.
    at = jnp.moveaxis(jax.lax.map(best_token, texts), 0, 1)  # [B, P, padded V]
    exists = (tokens.text_ids[:, None] == texts[:, None]).any(-1)  # [B, P]
    largest = jnp.where(exists[:, :, None], jnp.take_along_axis(logits, at, axis=1), 0)
    return self._weight(largest)


def flops(vectors: jax.Array, exists: jax.Array) -> jax.Array:
  """Sums the squared mean weights of all entries of the vocabulary: a scalar.

  The FLOPS regularizer (Paria et al. 2020, https://arxiv.org/abs/2004.05665) estimates
  the products that a search in an inverted index needs, and makes vectors sparse.

  Args:
    vectors: [..., V] float32, not negative.
    exists: [...] bool, False for texts that are padding.
  """
  total = jnp.sum(jnp.where(exists[..., None], vectors, 0), axis=range(exists.ndim))
  return jnp.sum(jnp.square(total / jnp.maximum(exists.sum(), 1)))


@dataclasses.dataclass(frozen=True)
class SparseEmbedding(sentence_embedding.SentenceEmbedding):
  """Trains each text to have its largest dot product with its partner.

  The total loss also has the FLOPS regularizers of the first texts (queries) and of the
  other texts (documents).
  """

  temperature: float = 1.0  # the divisor of the dot products
  query_flops: float = 5e-5  # weight in the total loss
  document_flops: float = 3e-5  # weight in the total loss

  @property
  def loss_weights(self) -> dict[str, float]:
    return {'loss': 1.0, 'query_flops': self.query_flops,
            'document_flops': self.document_flops}

  def flops_per_token(self, length: int) -> float:
    """Returns the model FLOPs of the encoder, with the masked-LM head at every token."""
    return self.model.config.flops_per_token(length, 1)

  def logits(self, apply: Callable[..., jax.Array],
             batch: packed_examples.Batch) -> jax.Array:
    """Returns the vectors of the texts of each example: [E, C, padded V] float32."""
    return batch.by_example(apply(batch.tokens, batch.starts))

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns the contrastive 'loss', both FLOPS, and the mean count of 'entries' > 0."""
    exists = batch.members >= 0  # [E, C]

    def weighted_flops(texts: slice) -> tuple[jax.Array, jax.Array]:
      # The metric is (sum, count), so the value of a microbatch is weighted by its texts.
      count = jnp.sum(exists[:, texts]).astype(jnp.float32)
      return flops(logits[:, texts], exists[:, texts]) * count, count

    entries = jnp.sum(logits > 0, axis=-1).astype(jnp.float32)
    return {**super().metrics(logits, batch),
            'query_flops': weighted_flops(slice(0, 1)),
            'document_flops': weighted_flops(slice(1, None)),
            'entries': losses.weighted(entries, exists.astype(jnp.float32))}


@dataclasses.dataclass(frozen=True)
class SparseFiles(sentence_embedding.EmbeddingFiles):
  """The files of `sentence_embedding`, with the config fields of sparse vectors."""

  config_fields = {
      **sentence_embedding.EmbeddingFiles.config_fields,
      'data.pooling': None,
      'data.matryoshka': None,
      'data.matryoshka_weights': None,
      'data.cached_parts': None,
      'data.temperature': Field(1.0),  # the divisor of the products
      # Weight of the FLOPS regularizer of queries in the loss: larger is sparser.
      'data.query_flops': Field(5e-5, at_least(0)),
      'data.document_flops': Field(3e-5, at_least(0)),  # the same weight for documents
      # Examples in a batch; few, because each token has a logit for each entry of the
      # vocabulary.
      'batch_size': 16,
  }

  check = staticmethod(sentence_embedding.check_texts)

  @classmethod
  def make(cls, config, examples, _):
    data = config.data
    head = BertForSparseEmbedding(architectures.make_config(config.model))
    return cls(SparseEmbedding(head, temperature=data.temperature,
                               query_flops=data.query_flops,
                               document_flops=data.document_flops))


class SparseKind(task_kind.TaskKind):
  """The weights of the entries of the vocabulary."""

  name = 'sparse_embedding'
  files = SparseFiles
  parameter_groups = ('mlm',)
  starts_from = ('mlm',)
  fields = ('text',)

  @classmethod
  def head_of(cls, bert):
    bert.require_head('mlm', 'masked-LM head')
    return BertForSparseEmbedding(bert.config, bert.sparse.pooling, bert.sparse.activation)

  @staticmethod
  def answer(bert, examples, options):
    answers = []
    for first in range(0, len(examples), _TEXTS_AT_ONCE):
      texts = [e['text'] for e in examples[first:first + _TEXTS_AT_ONCE]]
      for row in vectors(bert, texts, options.prompt):
        largest = np.argsort(-row, kind='stable')[:np.count_nonzero(row)]
        tokens = bert.tokenizer.tokens(largest)
        answers.append({'entries': dict(zip(tokens, row[largest].tolist()))})
    return answers


def vectors(bert: task_kind.TrainedModel, texts: Sequence[str],
            prompt: str | None = None) -> np.ndarray:
  """Weighs the entries of the vocabulary for some texts: [texts, V] float32.

  The folder of a SparseEncoder has its own pooling, prompts and longest input. `prompt`
  names a prompt: None = the default prompt, '' = no prompt. A text that is too long loses
  its end.

  Raises:
    UserError: a model without a masked-LM head, or an unknown prompt.
  """
  # Both checks come before the early return, to report mistakes even without texts.
  head = SparseKind.head_of(bert)
  prepared = bert.sparse.prepared([(text,) for text in texts], bert.sparse.prompt(prompt))
  if not texts:
    return np.zeros((0, bert.config.vocab_size), np.float32)
  inputs, _ = inputs_lib.text_inputs(prepared, bert.tokenizer,
                                     bert.sparse.max_len or bert.trained_length)
  weights = bert.per_text(inputs, functools.partial(task_kind.apply_head, head))
  # The token table is padded to a multiple of 128 rows.
  return bert.sparse.finished(weights[:, :bert.config.vocab_size])
