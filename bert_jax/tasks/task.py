"""What the training loop asks of a task."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import Protocol

from flax import linen as nn
import jax

from bert_jax.objectives.losses import Metrics


class Task(Protocol):
  """One thing to train. The loop never asks which."""

  model: nn.Module
  objectives: Mapping[str, float]  # weight of each metric that is a loss in the total
  frozen: Any  # what is used but not trained: host arrays, boxed with their logical axes; {} = none

  @property
  def has_held_out(self) -> bool:
    """Whether there is anything to evaluate."""

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""

  def loss(self, params: Any, frozen: Any, batch: Any, key: jax.Array | None) -> Metrics:
    """Metrics of a batch, pure. `frozen` is used but not trained; key None = no dropout.

    Counts must not depend on `params`. The metric 'tokens' counts the real tokens of the batch.
    """

  def measure(self, params: Any, frozen: Any, batch: Any) -> Any:
    """What `evaluate` needs of a batch, pure, without dropout: metrics, say, or logits too."""

  def rows(self, step: int) -> Any:
    """This process's share of a step's batch: a tree of host arrays [B / processes, ...]."""

  def evaluate(self, evaluate_batch: Callable[[Any], Any], step: int) -> dict[str, float | None]:
    """Held-out metrics after `step` steps; `evaluate_batch` measures this process's host batch.

    A metric for which no position counts is None.
    """

  def flops(self, step: int, tokens: float) -> float:
    """Model FLOPs that training on so many real tokens takes, at the row length of `step`."""

  def describe(self) -> Iterator[tuple[str, str]]:
    """(what, value) lines for the summary before a run."""
