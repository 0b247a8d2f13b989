"""The base of all objectives, and masked LM."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Self

import jax

from bert_jax.data.rows import Rows
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import init_tokens
from bert_jax.model.heads import BertForPreTraining, count_parameters
from bert_jax.objectives import losses
from bert_jax.objectives.masking import Masked


class Keys(NamedTuple):
  """The random keys of a step; a draw for a row depends on its number, not on its device."""

  dropout: jax.Array | None  # None = no dropout
  sampling: jax.Array


def with_dropout(key: jax.Array | None) -> dict[str, Any]:
  """Returns the arguments with which a module applies dropout; None = none."""
  return {'deterministic': key is None, 'rngs': {} if key is None else {'dropout': key}}


def init_masked_lm(model: BertForPreTraining, key: jax.Array, with_pairs: bool = False) -> Any:
  """Makes the variables of encoder and masked-LM head, and with pairs of pooler and pair head."""
  tokens = init_tokens()
  position = tokens.ids[:, :1]
  return model.init(key, tokens, position, position if with_pairs else None)


@dataclasses.dataclass(frozen=True)
class Objective:
  """A pure objective of learning from masked rows. Each one is a subclass in its own file."""

  model: BertForPreTraining  # the model that is trained and exported

  loss_weights: ClassVar[dict[str, float]]  # weight of each loss in the total

  def with_config(self, config: BertConfig) -> Self:
    """Returns this objective for a model of other sizes."""
    return dataclasses.replace(self, model=BertForPreTraining(config))

  def init(self, key: jax.Array) -> Any:
    """Makes the variables, boxed with their logical axes."""
    return init_masked_lm(self.model, key)

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """Computes the losses and other metrics.

    Args:
      params: the trained variables.
      frozen: other variables, such as a teacher's.
      rows: the rows with the corrupted ids.
      masked: the predicted positions and their targets.
      keys: of the step.
    """
    raise NotImplementedError

  def exported(self, params: Any) -> Any:
    """Returns the part of the trained variables that becomes the model."""
    return params

  def parameters(self) -> int:
    """Number of trained parameters, without the padding of the vocabulary."""
    return count_parameters(abstract_variables(self), self.model.config)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of a training step, as `BertConfig.flops_per_token`."""
    return self.model.config.flops_per_token(length, predictions)


@functools.cache  # a run asks several times, and to trace a model takes a tenth of a second
def abstract_variables(objective: Objective) -> Any:
  """Returns what `objective.init` makes, as boxed ShapeDtypeStructs."""
  return jax.eval_shape(objective.init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
  """Masked LM, alone or with a question about sentence pairs.

  Devlin et al. 2019 (section 3.1) ask for the next sentence: does B follow A? Lan et al. 2020
  (ALBERT) ask for the order: does B come after A, or before it? Liu et al. 2019 (RoBERTa) train
  masked LM alone.
  """

  pair_objective: str | None = 'nsp'  # or sop; None = the pair head is left out

  @property
  def loss_weights(self) -> dict[str, float]:
    names = ('mlm', self.pair_objective) if self.pair_objective else ('mlm',)
    return {f'{name}_loss': 1.0 for name in names}

  def init(self, key: jax.Array) -> Any:
    return init_masked_lm(self.model, key, with_pairs=bool(self.pair_objective))

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """mlm_loss, mlm_accuracy, and the same of nsp or sop."""
    del frozen
    pairs = self.pair_objective
    mlm_logits, pair_logits = self.model.apply(
        params, rows.tokens, masked.positions, rows.cls_positions if pairs else None,
        **with_dropout(keys.dropout))
    metrics = losses.classification(mlm_logits, masked.targets, masked.weights, 'mlm_')
    if pairs:
      metrics |= losses.classification(pair_logits, rows.labels, rows.pair_weights,
                                       f'{pairs}_')
    return metrics
