"""The base of all objectives, and the records that their losses read."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining, count_parameters
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.masking import Masked


class Example(NamedTuple):
  """Masked rows with their targets."""

  inputs: Batch  # [B, L] each; `ids` are the corrupted ones
  masked: Masked  # [B, M] each
  row: jax.Array  # [B] int32, number of each row in the global batch
  cls_positions: jax.Array  # [B, P] int32
  labels: jax.Array  # [B, P] int32, 0 where B follows A, 1 where it is from elsewhere or before A
  pair_weights: jax.Array  # [B, P] float32, 1 for a pair, 0 where there is none


class Keys(NamedTuple):
  """Randomness of a step; the loss of a row must depend on its number, not on where it lies."""

  dropout: jax.Array | None  # None = no dropout
  sampling: jax.Array


def with_dropout(key: jax.Array | None) -> dict[str, Any]:
  """Returns the arguments with which a module applies dropout; None = none."""
  return {'deterministic': key is None, 'rngs': {} if key is None else {'dropout': key}}


def init_masked_lm(model: BertForPreTraining, key: jax.Array, with_pairs: bool) -> Any:
  """Makes the variables of encoder and masked-LM head, and with pairs of pooler and pair head."""
  tokens = jnp.zeros((1, 8), jnp.int32)
  position = tokens[:, :1]
  return model.init(key, Batch(*[tokens] * 4), position, position if with_pairs else None)


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
    return init_masked_lm(self.model, key, with_pairs=False)

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> Metrics:
    """Computes the losses and other metrics.

    Args:
      params: the variables that are trained.
      frozen: those that are not, such as a teacher's.
      example: [B, ...].
      keys: of the step.
    """
    raise NotImplementedError

  def exported(self, params: Any) -> Any:
    """Returns the part of the trained variables that becomes the model."""
    return params

  def parameters(self) -> int:
    """Number of trained parameters, without the padding of the vocabulary."""
    boxed = jax.eval_shape(self.init, jax.random.key(0))
    return count_parameters(boxed, self.model.config)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of a training step, as `BertConfig.flops_per_token`."""
    return self.model.config.flops_per_token(length, predictions)
