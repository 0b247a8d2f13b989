"""Vectors of texts whose cosine says how near they are in meaning, by contrast within a batch.

From pairs, with a third text that contradicts where there is one, or from single texts, each of
which is read twice, under other dropout.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError
from bert_jax.labelled import packed_examples, table
from bert_jax.model import architectures, bert_config, encoder, pooling
from bert_jax.model.kernels import MASKED
from bert_jax.objectives import losses
from bert_jax.tasks import finetuning
from bert_jax.tasks import metrics as metrics_lib

_SCORES = ('pearson', 'spearman')
_POOLINGS = pooling.POOLINGS[:-1]  # but for 'none', a vector for each token


class BertForSentenceEmbedding(nn.Module):
  """A vector for each text, pooled from its hidden states; no parameters of its own."""

  config: bert_config.BertConfig
  pooling: str  # cls, mean, max

  def setup(self):
    self.bert = architectures.encoder(self.config)

  def __call__(self, batch: encoder.Batch, starts: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 starts of the texts -> [B, P, D] float32."""
    hidden = self.bert.encode(batch, deterministic=deterministic)
    return pooling.pool(hidden, batch.pair_index, starts, self.pooling)


class Example(NamedTuple):
  """A line: a text, a near one, perhaps a contrary one; in held-out files two and a score."""

  texts: tuple[str, ...]
  score: float | None


def contrast(vectors: jax.Array, exists: jax.Array,
             temperature: float) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of a text's partner among the other texts of the batch, by their cosines.

  The loss of SimCSE (Gao et al. 2021, https://arxiv.org/abs/2104.08821) and of
  sentence-transformers' multiple negatives. The third texts of examples are no text's partner.

  Args:
    vectors: [E, C, D] float32 of length 1: of each example a text, its partner, perhaps a third.
    exists: [E, C] bool, False for texts that an example lacks.
    temperature: the divisor of the cosines.

  Returns:
    (losses [E] in nat, is_right [E] bool: the partner is the nearest).
  """
  others = jnp.moveaxis(vectors[:, 1:], 1, 0).reshape(-1, vectors.shape[-1])  # partners, then third
  cosines = jnp.einsum('ed,od->eo', vectors[:, 0], others, preferred_element_type=jnp.float32)
  other_exists = jnp.moveaxis(exists[:, 1:], 1, 0).reshape(-1)
  logits = jnp.where(other_exists, cosines / temperature, MASKED)
  return losses.cross_entropy(logits, jnp.arange(len(exists)))


@dataclasses.dataclass(frozen=True)
class SentenceEmbedding(finetuning.FineTuning):
  """Each text is to be nearer to its own partner than to all others of the batch.

  With microbatches (`optimizer.accumulation`) the others are those of the microbatch.
  """

  temperature: float = 0.05  # cosines are divided by it

  name = 'sentence_embedding'
  best_score = 'spearman'
  score_names = _SCORES

  @staticmethod
  def set_fields(c):
    c.data.format = 'auto'  # csv, tsv, jsonl
    del c.data.label_column
    # With text_pair_column='' each text is its own partner, under other dropout (SimCSE).
    c.data.text_pair_column = 'text_pair'
    c.data.negative_column = ''  # a third text, which contradicts the first
    c.data.eval_columns = ('sentence1', 'sentence2', 'score')  # of data.eval
    c.data.pooling = ''  # cls, mean, max; '' = that of init_from where it says one, else mean
    c.data.temperature = 0.05  # the cosines are divided by it
    c.batch_size = 64
    c.max_len = 64
    c.train_epochs = 1.0

  @staticmethod
  def check(config):
    data = config.data
    if data.pooling not in ('', *_POOLINGS):
      raise UserError(f'data.pooling={data.pooling!r} is unknown: use {", ".join(_POOLINGS)}')
    if not data.temperature > 0:
      raise UserError(f'data.temperature={data.temperature} must be positive')
    if data.negative_column and not data.text_pair_column:
      raise UserError(f'data.negative_column={data.negative_column} needs data.text_pair_column '
                      'too: the text that is near')
    if not data.text_pair_column and not config.model.dropout:
      raise UserError('a text is compared with itself under other dropout: give '
                      'data.text_pair_column, or a model.dropout above 0')
    if data.test:
      raise UserError(f'data.test={data.test}: this task predicts no file; predict --task=embed '
                      'gives the vectors of one')
    if len(data.eval_columns) != 3:
      raise UserError(f'data.eval_columns={tuple(data.eval_columns)} must name two texts and a '
                      'score')

  @staticmethod
  def read(path, data, split, _):
    columns = (data.text_column, data.text_pair_column, data.negative_column)
    for row in table.read(path, data.format, split):
      if split == 'train':
        values = tuple(row.text(column) for column in columns if column)
        yield Example(values * 2 if len(values) == 1 else values, None)
      else:
        first, second, score = map(str, data.eval_columns)
        yield Example((row.text(first), row.text(second)),
                      row.number(score))

  @classmethod
  def make(cls, config, examples, _):
    data = config.data
    if len(examples) < 2:
      raise UserError(f'{data.train} holds one example: there is nothing to tell it from')
    head = BertForSentenceEmbedding(architectures.make_config(config.model), data.pooling)
    return cls(head, temperature=data.temperature)

  def logits(self, apply: Callable[..., jax.Array], batch: packed_examples.Batch) -> jax.Array:
    """Vectors of length 1 of the texts of each example: [E, C, D] float32."""
    vectors = apply(batch.inputs, batch.starts)  # [R, P, D]
    # Empty slots are zeros, where a norm has no gradient.
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    vectors = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
    return vectors.reshape(-1, vectors.shape[-1])[jnp.maximum(batch.members, 0)]

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Cross-entropy over the other texts of the batch; accuracy: the partner is the nearest."""
    exists = batch.members >= 0  # [E, C]
    of_examples, right = contrast(logits, exists, self.temperature)
    is_real = exists[:, 0].astype(jnp.float32)
    return {'loss': losses.weighted(of_examples, is_real),
            'accuracy': losses.weighted(right, is_real)}

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The cosine of the first two texts, [E]."""
    return jnp.sum(logits[:, 0] * logits[:, 1], axis=-1)

  def features(self, examples, tokenizer, config, **_):
    """[CLS] text [SEP] for each text; the targets are the scores, if there are any."""
    single = [(text,) for e in examples for text in e.texts]
    inputs, _ = finetuning.text_inputs(single, tokenizer, config.max_len)
    owners = np.repeat(np.arange(len(examples)), [len(e.texts) for e in examples])
    scores = [e.score for e in examples]
    targets = None if None in scores else np.array(scores, np.float32)
    return packed_examples.Features(inputs, owners, targets)

  def scores(self, split, outputs):
    """The correlations of the cosines with the scores of the file, as for STS-B."""
    scores = metrics_lib.regression(split.batches.features.targets, finetuning.by_example(outputs))
    return {name: scores[name] for name in _SCORES}
