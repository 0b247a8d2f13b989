"""The device half of pretraining: masks rows, and computes the losses of an objective."""

import dataclasses
import operator
from typing import Any

import jax

from bert_jax.data.rows import Rows
from bert_jax.model import dropout_bits
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import causal_rows, losses, masking
from bert_jax.objectives.objective import Keys, Objective

EVAL_SEED = 0  # held-out rows and masks are the same in every evaluation of every run


@dataclasses.dataclass(frozen=True)
class Pretraining:
  """A `Task` that masks rows and computes the losses of an objective."""

  objective: Objective
  masking: masking.MaskingConfig
  vocabulary: masking.Vocabulary
  frozen: Any = dataclasses.field(default_factory=dict)  # a teacher's variables, or {}

  model = property(operator.attrgetter('objective.model'))
  loss_weights = property(operator.attrgetter('objective.loss_weights'))

  def with_config(self, config: BertConfig) -> 'Pretraining':
    return dataclasses.replace(self, objective=self.objective.with_config(config))

  def init(self, key: jax.Array) -> Any:
    return self.objective.init(key)

  def mask(self, key: jax.Array, rows: Rows) -> masking.Masked:
    """Masks the rows of a batch; `key` is the masking key of the step."""
    return masking.mask(
        key, rows.tokens.ids, rows.tokens.text_ids, rows.row, self.masking, self.vocabulary,
        pairs=rows.starts.shape[1], word_start=rows.word_start, rate=rows.mask_rate)

  def loss(self, params: Any, frozen: Any, rows: Rows,
           key: jax.Array | None) -> losses.Metrics:
    """Computes the metrics; without a key, with evaluation masks and no dropout."""
    if key is None:
      mask_key, dropout_key = jax.random.key(EVAL_SEED, impl='threefry2x32'), None
    else:
      mask_key, dropout_key = jax.random.split(key)
      dropout_key = dropout_bits.microbatch_key(dropout_key, rows.row)
    masked = self.mask(mask_key, rows)
    if rows.tokens.causal is not None:
      masked = causal_rows.predict_next(rows.tokens, masked)
    rows = rows._replace(tokens=rows.tokens._replace(ids=masked.ids))
    # Masking folds row numbers into its key, and no row has the number 2**32 - 1.
    keys = Keys(dropout_key, jax.random.fold_in(mask_key, 2**32 - 1))
    metrics = self.objective.loss(params, frozen, rows, masked, keys)
    return {**metrics, 'tokens': losses.token_count(rows.tokens.text_ids)}

  def measure(self, params: Any, frozen: Any, rows: Rows) -> losses.Metrics:
    return self.loss(params, frozen, rows, None)

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs per token at the highest masking rate of the run."""
    return self.objective.flops_per_token(
        length, max(self.masking.rate, self.masking.final_rate))
