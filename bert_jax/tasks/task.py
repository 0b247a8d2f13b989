"""The two halves of a task, as the training loop sees them.

The device half has pure functions: parameters, losses and measurements of a batch. The
host half makes the batches and scores the model. Planning and most tests use only the
device half, so they need no data.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from flax import linen as nn
import jax

from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives.losses import Metrics


class Task(Protocol):
  """The device half of a task."""

  model: nn.Module
  loss_weights: Mapping[str, float]  # names and weights of the metrics in the total loss
  frozen: Any  # arrays that are not trained, boxed with their logical axes; {} = none

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""

  def with_config(self, config: BertConfig) -> 'Task':
    """This task for a model with another config."""

  def loss(self, params: Any, frozen: Any, batch: Any, key: jax.Array | None) -> Metrics:
    """Metrics of a batch as (sum, count); without dropout if `key` is None.

    Counts must not depend on `params`. The metric 'tokens' counts the real tokens.
    """

  def measure(self, params: Any, frozen: Any, batch: Any) -> Any:
    """Evaluates a batch without dropout: metrics, or (metrics, logits)."""

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs of a training step for each token of a row of `length` tokens."""


class TaskData(Protocol):
  """The host half of a task."""

  has_held_out: bool  # False = `evaluate` has nothing to evaluate
  lower_is_better: Collection[str]  # the scores of `evaluate` for which lower is better

  def rows(self, step: int) -> Any:
    """The rows of a batch that this process feeds: a tree of host arrays [rows, ...]."""

  def evaluate(self, measure: Callable[[Any], Any],
               step: int) -> dict[str, float | None]:
    """Held-out metrics after `step` steps; None for a metric whose count is 0.

    Args:
      measure: runs `Task.measure` on this process's share of a host batch.
      step: number of steps trained.
    """

  def judged_on(self, step: int) -> str:
    """Names the data of `evaluate`; scores with different names are not comparable."""

  def flops(self, step: int, tokens: float) -> float:
    """Model FLOPs of training on `tokens` real tokens in rows of the length of `step`."""

  def describe(self) -> Iterator[tuple[str, str]]:
    """Yields (name, value) lines for the summary before a run."""
