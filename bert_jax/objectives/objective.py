"""The base class of all objectives, and masked LM."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Self

import jax

from bert_jax.data.rows import Rows
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import init_tokens
from bert_jax.model.heads import BertForPreTraining
from bert_jax.model.parameters import count_parameters
from bert_jax.objectives import losses
from bert_jax.objectives.masking import Masked


class Keys(NamedTuple):
  """The random keys of a step.

  The random draws of a row depend on the number of the row, not on its device.
  """

  dropout: jax.Array | None  # None = no dropout
  sampling: jax.Array  # for an objective that draws tokens, such as replaced tokens


def with_dropout(key: jax.Array | None) -> dict[str, Any]:
  """Returns the arguments of `Module.apply` for a dropout key; None = no dropout."""
  return {'deterministic': key is None, 'rngs': {} if key is None else {'dropout': key}}


def init_masked_lm(model: BertForPreTraining, key: jax.Array,
                   with_pairs: bool = False) -> Any:
  """Initializes encoder and MLM head; if `with_pairs`, also pooler and pair head."""
  tokens = init_tokens()
  position = tokens.ids[:, :1]
  return model.init(key, tokens, position, position if with_pairs else None)


@dataclasses.dataclass(frozen=True)
class Objective:
  """A pretraining objective on masked rows. Its methods are pure functions.

  Each objective is a subclass in its own file.
  """

  model: BertForPreTraining  # the model to train and export

  loss_weights: ClassVar[dict[str, float]]  # the weight of each loss in the total

  def with_config(self, config: BertConfig) -> Self:
    """Returns this objective for a model with another config."""
    return dataclasses.replace(self, model=BertForPreTraining(config))

  def init(self, key: jax.Array) -> Any:
    """Initializes the Flax variables, boxed with their logical axes."""
    return init_masked_lm(self.model, key)

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """Computes the losses and other metrics.

    Args:
      params: the trained variables.
      frozen: other variables, such as the teacher's.
      rows: the rows with the corrupted ids.
      masked: the predicted positions and their targets.
      keys: the random keys of the step.

    Returns:
      (sum, count) of each metric, by name.
    """
    raise NotImplementedError

  def exported(self, params: Any) -> Any:
    """Returns the variables of the exported model, a part of the trained ones."""
    return params

  def num_parameters(self) -> int:
    """Returns the number of trained parameters, without the padding of the vocabulary."""
    return count_parameters(abstract_variables(self), self.model.config)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs per token of a training step, see `BertConfig.flops_per_token`."""
    return self.model.config.flops_per_token(length, predictions)


# Cached: a run calls it several times, and tracing a model takes a tenth of a second.
@functools.cache
def abstract_variables(objective: Objective) -> Any:
  """Returns the result of `objective.init` as boxed ShapeDtypeStructs."""
  return jax.eval_shape(objective.init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
  """Masked LM, alone (RoBERTa, Liu et al. 2019) or with a loss on sentence pairs.

  - nsp, next sentence prediction (Devlin et al. 2019, section 3.1): does B follow A?
  - sop, sentence order prediction (ALBERT, Lan et al. 2020): is B after A, or before it?
  """

  pair_objective: str | None = 'nsp'  # nsp or sop; None = no pair head

  @property
  def loss_weights(self) -> dict[str, float]:
    names = ('mlm', self.pair_objective) if self.pair_objective else ('mlm',)
    return {f'{name}_loss': 1.0 for name in names}

  def init(self, key: jax.Array) -> Any:
    return init_masked_lm(self.model, key, with_pairs=bool(self.pair_objective))

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """Computes mlm_loss and mlm_accuracy, and both metrics of the pair objective."""
    pairs = self.pair_objective
    mlm_logits, pair_logits = self.model.apply(
        params, rows.tokens, masked.positions, rows.starts if pairs else None,
        **with_dropout(keys.dropout))
    metrics = losses.classification(mlm_logits, masked.targets, masked.weights, 'mlm_')
    if pairs:
      metrics |= losses.classification(pair_logits, rows.labels, rows.pair_weights,
                                       f'{pairs}_')
    return metrics
