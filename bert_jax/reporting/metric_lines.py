"""Lines of training metrics: sums over the steps since the last line, and their time."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import time
from typing import Any

import jax

from bert_jax.objectives import losses
from bert_jax.objectives.losses import Metrics


@dataclasses.dataclass
class Line:
  """The metrics of a few steps."""

  step: int = 0  # the last of the steps
  metrics: list[Metrics] = dataclasses.field(default_factory=list)  # of each step
  digests: list[int] = dataclasses.field(default_factory=list)  # of each batch, if logged
  timed_steps: int = 0  # how many of the last steps are timed
  waited: float = 0.0  # seconds in which the device waited for rows
  began: futures.Future[float] | None = None
  ended: futures.Future[float] | None = None

  @property
  def skipped(self) -> list[bool]:
    """True for each skipped step."""
    return [bool(metrics['skipped'][0]) for metrics in self.metrics]

  @property
  def tokens(self) -> float:
    """Real tokens in the timed steps."""
    timed = self.metrics[len(self.metrics) - self.timed_steps:]
    return sum(float(metrics['tokens'][0]) for metrics in timed)

  def values(self, *, loss_weights: Mapping[str, float], learning_rate: float,
             flops: float, peak_flops: float | None) -> dict[str, Any]:
    """The content of the line in metrics.jsonl; only for lines from `MetricLines.fetch`.

    Args:
      loss_weights: weight in the total loss of each metric that is a loss.
      learning_rate: the rate of the last step.
      flops: model FLOPs of the timed steps.
      peak_flops: FLOP/s of all devices together; None = not known.
    """
    applied = [metrics for metrics, skipped in zip(self.metrics, self.skipped)
               if not skipped]
    # Sums before means: the steps count different numbers of positions.
    sums = {name: tuple(sum(float(metrics[name][i]) for metrics in applied) for i in (0, 1))
            for name in self.metrics[0] if name not in ('skipped', 'tokens')}
    seconds = self.ended.result() - self.began.result() if self.timed_steps else None
    return {
        'loss': losses.mean_loss(sums, loss_weights), **losses.means(sums),
        'learning_rate': learning_rate,
        'tokens_per_second': self.tokens / seconds if seconds else None,
        'mfu': flops / seconds / peak_flops if seconds and peak_flops else None,
        'data_wait': self.waited / seconds if seconds else None,
        'skipped_steps': sum(self.skipped)}


class MetricLines:
  """Collects the metrics of steps into lines.

  The time of a line ends when the device has finished its last step, even if the host
  fetches the line later. Time counts from the first call of `start_clock`.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._watcher = futures.ThreadPoolExecutor(1)
    self._newest: Metrics | None = None
    self._line = Line()
    self.pending: Line | None = None  # the line that ended last, until it is fetched

  def start_clock(self):
    """Restarts the clock: the line times only the steps from now on."""
    self._line.began = self._time_now()
    self._line.timed_steps = 0
    self._line.waited = 0.0

  @contextlib.contextmanager
  def waiting_for_rows(self) -> Iterator[None]:
    """Counts the time of the block as waiting if the device is idle at its end."""
    began = self._clock()
    yield
    if self.is_idle():
      self._line.waited += self._clock() - began

  def add(self, metrics: Metrics, digest: int | None = None):
    """Adds a step, which the device may still compute, and the digest of its batch."""
    self._newest = metrics
    self._line.metrics.append(metrics)
    self._line.timed_steps += 1
    if digest is not None:
      self._line.digests.append(digest)

  def is_idle(self) -> bool:
    """True if the device has no step left to run; also True before the first step."""
    return all(x.is_ready() for x in jax.tree.leaves(self._newest))

  def _time_now(self) -> futures.Future[float]:
    now = futures.Future()
    now.set_result(self._clock())
    return now

  def _time_when_ready(self, metrics: Metrics) -> float:
    jax.block_until_ready(metrics)
    return self._clock()

  def end(self, step: int):
    """Makes a line of the steps up to `step`."""
    self.pending = self._line
    self.pending.step = step
    # A thread records the time a little late: use it only if the device is behind.
    self.pending.ended = (
        self._time_now() if self.is_idle()
        else self._watcher.submit(self._time_when_ready, self._newest))
    self._line = Line(began=self.pending.ended)

  def fetch(self) -> Line:
    """Returns the pending line with its metrics on the host; waits for its last step."""
    line, self.pending = self.pending, None
    line.metrics = jax.device_get(line.metrics)
    return line
