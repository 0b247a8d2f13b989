"""What the pretraining task asks of an objective."""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple
from typing import Protocol

from flax import linen as nn
import jax

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.masking import Masked


class Example(NamedTuple):
  """Masked rows: what is read, what is to be predicted, what is asked of the pairs."""

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


class Objective(Protocol):
  """What is learned from masked rows. A small frozen dataclass in a file of its own."""

  @property
  def model(self) -> nn.Module:
    """With `config`, of what is trained."""

  @property
  def loss_weights(self) -> Mapping[str, float]:
    """Of each metric that is a loss, in the total."""

  def with_config(self, config: BertConfig) -> 'Objective':
    """The same with a model of other sizes."""

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> Metrics:
    """The losses and what else is known, pure."""

  def exported(self, params: Any) -> Any:
    """What is kept of trained parameters as a model."""

  def parameters(self) -> int:
    """How many are trained, without the padding of the vocabulary."""

  def flops_per_token(self, length: int, predictions: float) -> float:
    """As `BertConfig.flops_per_token`."""
