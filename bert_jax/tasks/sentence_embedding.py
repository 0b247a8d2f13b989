"""Sentence embeddings, trained by a contrastive loss with in-batch negatives.

An example is a pair, a pair with hard negatives, or a single text, which is encoded twice
with different dropout.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.config_fields import HARMLESS, Field, at_least
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require, require_choice
from bert_jax.labelled import packed_examples, table, unused_fields
from bert_jax.model import architectures, bert_config, layers, pooling
from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.tasks import finetuning, finetuning_data, metrics, task_kind

_SCORES = ('pearson', 'spearman')


class BertForSentenceEmbedding(nn.Module):
  """Pools the hidden states of each text to a vector, without more parameters."""

  config: bert_config.BertConfig
  pooling: str  # one of `pooling.POOLINGS`

  def setup(self):
    self.bert = architectures.make_encoder(self.config)

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 starts of the texts -> [B, P, D] float32."""
    hidden = self.bert.encode(tokens, deterministic=deterministic)
    return pooling.pool(hidden, tokens.text_ids, tokens.positions, starts, self.pooling)


class Example(NamedTuple):
  """A line: a text, its partner and its negatives, or two held-out texts and a score."""

  texts: tuple[str, ...]
  score: float | tuple[float, ...] | None  # a tuple = a teacher's scores of texts[1:]


def contrast_scores(scores: jax.Array,
                    exists: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes the cross-entropy of the partner of each text among all other texts.

  Args:
    scores: [E, (C - 1) * E] float32, of each text with the others: first the partners of
      all examples, then the first negatives, and so on.
    exists: [E, C] bool, False for texts that an example lacks.

  Returns:
    (losses [E] in nats, is_right [E] bool: the partner has the highest score).
  """
  other_exists = jnp.moveaxis(exists[:, 1:], 1, 0).reshape(-1)
  logits = jnp.where(other_exists, scores, layers.MASKED)
  of_examples, _ = losses.cross_entropy(logits, jnp.arange(len(exists)))
  # >=, not >: a collapsed model, whose vectors are all equal, gets nothing right.
  is_right = jnp.sum(logits >= jnp.diagonal(logits)[:, None], axis=-1) == 1
  return of_examples, is_right


def contrast(vectors: jax.Array, exists: jax.Array,
             temperature: float) -> tuple[jax.Array, jax.Array]:
  """Computes the cross-entropy of each text's partner among the other texts of the batch.

  This is the loss of SimCSE (Gao et al. 2021, https://arxiv.org/abs/2104.08821) and the
  multiple-negatives loss of sentence-transformers. Negatives of any example are wrong
  choices for all examples.

  Args:
    vectors: [E, C, D] float32: a text, its partner and its negatives of each example.
      Their products are cosines if the vectors have length 1.
    exists: [E, C] bool, False for texts that an example lacks.
    temperature: the divisor of the cosines.

  Returns:
    (losses [E] in nats, is_right [E] bool: the partner is nearer than all others).
  """
  # Partners come first, then negatives: the partner of example e has the number e.
  others = jnp.moveaxis(vectors[:, 1:], 1, 0).reshape(-1, vectors.shape[-1])
  cosines = jnp.einsum('ed,od->eo', vectors[:, 0], others,
                       preferred_element_type=jnp.float32)
  return contrast_scores(cosines / temperature, exists)


def unit(vectors: jax.Array) -> jax.Array:
  """Scales vectors [..., D] to length 1; zeros stay zeros, and gradients are finite."""
  squares = jnp.sum(vectors * vectors, axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))


def check_texts(config: ConfigDict):
  """Raises UserError for bad values of the fields about texts and their loss."""
  data = config.data
  require(data.temperature > 0, f'data.temperature={data.temperature} must be positive')
  require(not data.negative_column or data.text_pair_column,
          f'data.negative_column={data.negative_column} needs data.text_pair_column, too: '
          'the column of the similar text')
  require(data.text_pair_column or config.model.dropout,
          'a text is compared with itself under different dropout: give '
          'data.text_pair_column, or a model.dropout above 0')
  require(config.batch_size >= 2 * config.optimizer.accumulation or data.negative_column,
          f'batch_size={config.batch_size} divided by optimizer.accumulation='
          f'{config.optimizer.accumulation} leaves one text in a microbatch, without '
          'another text to contrast it with')
  require(not data.test,
          f'data.test={data.test}: this task predicts no file; use bert_jax.predict for '
          'vectors')
  require(len(data.eval_columns) == 3,
          f'data.eval_columns={tuple(data.eval_columns)} must name two texts and a score')


@dataclasses.dataclass(frozen=True)
class SentenceEmbedding(finetuning.FineTuning):
  """Trains each text to be nearer to its partner than to all others of the batch.

  - `optimizer.accumulation` contrasts only the texts within each microbatch.
  - `cached_parts` encodes a batch part by part, but contrasts all of its texts.
  - `matryoshka` also contrasts the first `width` entries of the vectors, scaled to length
    1 again (Kusupati et al. 2022, https://arxiv.org/abs/2205.13147). The loss is the
    weighted sum.
  """

  temperature: float = 0.05  # the divisor of the cosines
  # (width, weight); () = only the whole vector.
  matryoshka: tuple[tuple[int, float], ...] = ()
  cached_parts: int = 1  # number of parts that the rows of a batch are split into

  def _forward(self, params, batch, key):
    """Encodes a batch; with `cached_parts`, one part at a time (GradCache).

    The forward pass keeps only the vectors. The backward pass encodes each part again
    (Gao et al. 2021, https://arxiv.org/abs/2101.06983).
    """
    if self.cached_parts == 1:
      return super()._forward(params, batch, key)

    def encode(part):
      inputs, starts, row = part
      return self._applied(params, row, key)(inputs, starts)

    parts = mesh_lib.split_rows((batch.tokens, batch.starts, batch.row), self.cached_parts)
    # [n, R / n, P, D]
    vectors = jax.lax.map(jax.checkpoint(encode, prevent_cse=False), parts)
    # `logits` expects the original order of the rows.
    vectors = jnp.moveaxis(vectors, 0, 1).reshape(-1, *vectors.shape[2:])
    return self.logits(lambda *_: vectors, batch)

  def logits(self, apply: Callable[..., jax.Array],
             batch: packed_examples.Batch) -> jax.Array:
    """Returns the unit vectors of each example: [E, C, D] float32."""
    return batch.by_example(unit(apply(batch.tokens, batch.starts)))

  def metrics(self, logits: jax.Array, batch: packed_examples.Batch) -> losses.Metrics:
    """Returns contrastive 'loss' and 'accuracy', how often the partner is nearest."""
    exists = batch.members >= 0  # [E, C]
    of_examples, right = contrast(logits, exists, self.temperature)
    if self.matryoshka:
      of_examples = sum(
          weight * contrast(unit(logits[..., :width]), exists, self.temperature)[0]
          for width, weight in self.matryoshka)
    return {'loss': losses.weighted(of_examples, batch.is_real),
            'accuracy': losses.weighted(right, batch.is_real)}

  def reduced(self, logits: jax.Array) -> jax.Array:
    """Returns the products of the first two vectors, whole and at each width: [E, 1 + n].

    The vectors of this task have length 1: their products are cosines.
    """
    cuts = [logits, *(unit(logits[..., :width]) for width, _ in self.matryoshka)]
    return jnp.stack([jnp.sum(x[:, 0] * x[:, 1], axis=-1) for x in cuts], axis=-1)


@dataclasses.dataclass(frozen=True)
class EmbeddingFiles(finetuning_data.ExampleFiles):
  """Pairs of similar texts, with or without negatives; held-out pairs with scores."""

  best_score = 'spearman'
  # A pair of data.eval has a score and may be a negative, so the loss is undefined.
  has_held_out_loss = False

  config_fields = {
      'data.format': 'auto',  # csv, tsv, jsonl
      'data.label_column': None,
      # With '' each text is its own partner, under different dropout (SimCSE).
      'data.text_pair_column': 'text_pair',
      # Columns of hard negatives, separated by commas, such as the contradiction in NLI
      # data.
      'data.negative_column': Field(''),
      # The columns of data.eval: two texts and a score.
      'data.eval_columns': Field(('sentence1', 'sentence2', 'score'), on_resume=HARMLESS,
                                 unused=(unused_fields.not_evaluated,)),
      # cls, mean, max, mean_sqrt_len_tokens, weightedmean, lasttoken; '' = the pooling of
      # init_from if it names one, else mean.
      'data.pooling': Field(''),
      'data.temperature': Field(0.05),  # the divisor of the cosines
      # (256, 128, 64) sums the losses of the first 256, 128 and 64 entries of a vector;
      # () = only the whole vector.
      'data.matryoshka': Field(()),
      'data.matryoshka_weights': Field(()),  # weights of these losses; () = 1 for each
      # Parts of a batch that are encoded one by one, for batches that exceed the memory.
      # A step takes a third longer.
      'data.cached_parts': Field(1, at_least(1)),
      'batch_size': 64,
      'max_len': 64,
      'train_epochs': 1.0,
  }

  @staticmethod
  def check(config):
    data = config.data
    if data.pooling:
      require_choice('data.pooling', data.pooling, pooling.POOLINGS)
    check_texts(config)
    widths, weights = tuple(data.matryoshka), tuple(data.matryoshka_weights)
    require(len(set(widths)) == len(widths)
            and all(isinstance(width, int) and width > 0 for width in widths),
            f'data.matryoshka={widths} must be whole numbers above 0, each once')
    require(not weights or len(weights) == len(widths),
            f'data.matryoshka_weights={weights} must have a weight for each of '
            f'data.matryoshka={widths}')
    try:
      are_positive = all(float(weight) > 0 for weight in weights)
    except (TypeError, ValueError):  # a tuple of words
      are_positive = False
    require(are_positive, f'data.matryoshka_weights={weights} must be numbers above 0')

  @staticmethod
  def read(path, data, split, _):
    columns = (data.text_column, data.text_pair_column, *data.negative_column.split(','))
    first, second, score = map(str, data.eval_columns)
    for row in table.read(path, data.format, split):
      if split == 'train':
        values = tuple(row.text(column) for column in columns if column)
        taught = data.get('scores_column')
        yield Example(values * 2 if len(values) == 1 else values,
                      row.numbers(taught, len(values) - 1) if taught else None)
      else:
        yield Example((row.text(first), row.text(second)), row.number(score))

  @staticmethod
  def check_training(config, examples):
    require(len(examples) >= 2,
            f'{config.data.train} holds one example: there is nothing to contrast it with')

  @classmethod
  def make(cls, config, examples, _):
    data = config.data
    head = BertForSentenceEmbedding(architectures.make_config(config.model),
                                    data.pooling or 'mean')
    widths = tuple(data.matryoshka)
    require(max(widths, default=0) <= head.config.hidden_size,
            f'data.matryoshka={widths}: the vectors of this model have '
            f'{head.config.hidden_size} entries')
    weights = map(float, data.matryoshka_weights or [1] * len(widths))
    return cls(SentenceEmbedding(
        head, temperature=data.temperature,
        matryoshka=tuple(zip(widths, weights)),
        cached_parts=data.cached_parts))

  @property
  def _ends(self) -> list[str]:
    """Suffixes of the names of the scores: whole vectors, then each width."""
    return ['', *(f'_{width}' for width, _ in self.task.matryoshka)]

  @property
  def score_names(self) -> tuple[str, ...]:
    return tuple(name + end for end in self._ends for name in _SCORES)

  def features(self, examples, tokenizer, config, **_):
    """Makes [CLS] text [SEP] of each text; the targets are the scores, if any."""
    texts = [[(text,) for text in e.texts] for e in examples]
    inputs, owners = finetuning_data.grouped_inputs(texts, tokenizer, config.max_len)
    scores = [e.score for e in examples]
    targets = None if None in scores else np.array(scores, np.float32)
    return packed_examples.Features(inputs, owners, targets)

  def scores(self, split, outputs):
    """Correlates the cosines of two vectors with the scores of the file, as for STS-B.

    With `matryoshka`, each width has its own scores, such as spearman_64.
    """
    results = {}
    for end, cosines in zip(self._ends, finetuning_data.by_example(outputs).T):
      scores = metrics.regression(split.features.targets, cosines)
      results |= {name + end: scores[name] for name in _SCORES}
    return results


class EmbeddingKind(task_kind.TaskKind):
  """The vector of a text; predict --task=embed works with any encoder, without a head."""

  name = 'sentence_embedding'
  files = EmbeddingFiles
