"""Vectors of texts whose cosine says how near they are in meaning, by contrast within a batch.

From pairs, with a third text that contradicts where there is one, or from single texts, each of
which is read twice, under other dropout.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.labelled import table
from bert_jax.labelled import texts
from bert_jax.labelled.packed_examples import Batch
from bert_jax.labelled.packed_examples import Features
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.pooling import POOLINGS
from bert_jax.model.task_heads import BertForSentenceEmbedding
from bert_jax.objectives.contrastive import contrast
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import weighted
from bert_jax.tasks import metrics as scores_lib
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Output
from bert_jax.tasks.finetuning import Split
from bert_jax.tasks.finetuning import Splits
from bert_jax.tasks.finetuning import by_example
from bert_jax.tasks.finetuning import eval_files
from bert_jax.tasks.finetuning import not_empty


class Texts(NamedTuple):
  """What is read of a line."""

  texts: tuple[str, ...]  # a text, one near it, perhaps one that is not
  score: float | None  # how near the two are, in held-out files


def features(examples: Sequence[Texts], tokenizer: Tokenizer, max_len: int) -> Features:
  """[CLS] text [SEP] for each text of an example; the targets are the scores, if there are any."""
  ids = iter(tokenizer.encode_batch([text for e in examples for text in e.texts]))
  found, owners = [], []
  for i, example in enumerate(examples):
    found += [inputs_lib.join(tokenizer, next(ids)[:max_len - 2]) for _ in example.texts]
    owners += [i] * len(example.texts)
  scores = [e.score for e in examples]
  return Features(found, np.array(owners, np.int64),
                  None if None in scores else np.array(scores, np.float32))


@dataclasses.dataclass(frozen=True)
class SentenceEmbedding(FineTuning):
  """Each text is to be nearer to its own partner than to all others of the batch.

  With microbatches (`optimizer.accumulation`) the others are those of the microbatch.
  """

  temperature: float = 0.05  # cosines are divided by it

  score_names = ('pearson', 'spearman')

  def call_arguments(self, cls_positions: jax.Array) -> tuple[jax.Array, ...]:
    """Where texts begin."""
    return (cls_positions,)

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """Vectors of length 1 of the texts of each example: [E, C, D] float32."""
    vectors = apply(batch.inputs, batch.starts)  # [R, P, D]
    # Empty slots are zeros, where a norm has no gradient.
    squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
    vectors = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
    return vectors.reshape(-1, vectors.shape[-1])[jnp.maximum(batch.members, 0)]

  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """Cross-entropy over the other texts of the batch, and whether the partner is the nearest."""
    there = batch.members >= 0  # [E, C]
    losses, right = contrast(logits, there, self.temperature)
    weights = there[:, 0].astype(jnp.float32)
    return {'loss': weighted(losses, weights), 'accuracy': weighted(right, weights)}

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The cosine of the first two texts, [E]."""
    return jnp.sum(logits[:, 0] * logits[:, 1], axis=-1)

  def scores(self, split: Split, outputs: list[Output]) -> dict[str, float]:
    """The correlations of the cosines with the scores of the file, as for STS-B."""
    found = scores_lib.regression(split.batches.features.targets, by_example(outputs))
    return {name: found[name] for name in self.score_names}


def create(config: ConfigDict, model: BertConfig, tokenizer: Tokenizer,
           splits: Splits) -> SentenceEmbedding:
  """The task that a config describes.

  Raises:
    UserError: something is wrong with the config or the data.
  """
  data = config.data
  if data.pooling not in POOLINGS[:-1]:
    raise UserError(f'data.pooling={data.pooling!r} is unknown: use {", ".join(POOLINGS[:-1])}')
  if not data.temperature > 0:
    raise UserError(f'data.temperature={data.temperature} must be positive')
  if data.negative_column and not data.text_pair_column:
    raise UserError(f'data.negative_column={data.negative_column} needs data.text_pair_column too: '
                    'the text that is near')
  if not data.text_pair_column and not config.model.dropout:
    raise UserError('a text is compared with itself under other dropout: give '
                    'data.text_pair_column, or a model.dropout above 0')
  if data.test:
    raise UserError(f'data.test={data.test}: this task predicts no file; predict --task=embed '
                    'gives the vectors of one')
  if len(data.eval_columns) != 3:
    raise UserError(f'data.eval_columns={tuple(data.eval_columns)} must name two texts and a score')
  columns = [name for name in (data.text_column, data.text_pair_column, data.negative_column)
             if name]

  def training(row):
    found = tuple(texts.text_of(row, name) for name in columns)
    return Texts(found * 2 if len(found) == 1 else found, None)

  def held_out(row):
    first, second, score = map(str, data.eval_columns)
    return Texts((texts.text_of(row, first), texts.text_of(row, second)),
                 texts.number_of(row, score))

  def read(path, split, of):
    return not_empty(map(of, table.read(path, data.format, split)), path)

  def made(examples):
    return examples, features(examples, tokenizer, config.max_len)

  train = read(data.train, 'train', training)
  if len(train) < 2:
    raise UserError(f'{data.train} holds one example: there is nothing to tell it from')
  evals = ((name, read(path, 'validation', held_out)) for name, path in eval_files(config))
  return SentenceEmbedding(
      BertForSentenceEmbedding(model, data.pooling), (),
      splits.train(*made(train)),
      tuple(splits.evaluation(name, *made(examples)) for name, examples in evals), notes=(),
      feed=splits.feed, temperature=data.temperature)
