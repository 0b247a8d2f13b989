"""Lines of training metrics: sums over the steps since the line before, and their time."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import time
from typing import Any, NamedTuple

import jax

from bert_jax.objectives import losses
from bert_jax.objectives.losses import Metrics


class Line(NamedTuple):
  """The metrics of a few steps, on the host."""

  step: int  # the last of the steps
  sums: dict[str, tuple[float, float]]  # (sum, count) of each metric, without skipped steps
  skipped: list[bool]  # for each step
  digests: list[int]  # of the batch of each step, if the run logs them
  seconds: float | None  # the time of the timed steps; None = no step is timed
  tokens: float  # real tokens in the timed steps
  waited: float  # seconds in which the device waited for rows


class _Pending(NamedTuple):
  """A line whose steps the device may not have made yet."""

  step: int
  metrics: list[Metrics]
  digests: list[int]
  timed_steps: int  # the last ones of the line
  began: futures.Future[float]
  ended: futures.Future[float]
  waited: float


def _is_ready(metrics: Metrics) -> bool:
  return all(x.is_ready() for x in jax.tree.leaves(metrics))


def _resolved(value: float) -> futures.Future[float]:
  future = futures.Future()
  future.set_result(value)
  return future


class MetricLines:
  """Collects the metrics of steps into lines.

  The time of a line ends when the device has made its last step, even if the host fetches the line
  later. Time counts from the first call of `start_clock`.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._watcher = futures.ThreadPoolExecutor(1)
    self._metrics: list[Metrics] = []
    self._digests: list[int] = []
    self._newest: Metrics | None = None
    self._timed_steps = 0
    self._waited = 0.0
    self.pending: _Pending | None = None  # the line that ended last, until it is fetched

  def start_clock(self):
    """Leaves the time until now out: only the steps after it are timed."""
    self._began = _resolved(self._clock())
    self._timed_steps = 0
    self._waited = 0.0

  @contextlib.contextmanager
  def waiting_for_rows(self) -> Iterator[None]:
    """Counts the time inside if the device is idle at its end; else the wait costs nothing."""
    began = self._clock()
    yield
    if self.is_idle():
      self._waited += self._clock() - began

  def add(self, metrics: Metrics, digest: int | None = None):
    """Adds a step, which the device may not have made yet, and the digest of its batch."""
    self._metrics.append(metrics)
    self._newest = metrics
    self._timed_steps += 1
    if digest is not None:
      self._digests.append(digest)

  def is_idle(self) -> bool:
    """True if the device has made all steps."""
    return self._newest is None or _is_ready(self._newest)

  def _time_when_ready(self, metrics: Metrics) -> futures.Future[float]:
    """The time now if `metrics` are ready; else a thread waits for them and takes the time."""
    if _is_ready(metrics):
      return _resolved(self._clock())

    def wait() -> float:
      jax.block_until_ready(metrics)
      return self._clock()

    return self._watcher.submit(wait)

  def end(self, step: int):
    """Makes a line of the steps up to `step`."""
    ended = self._time_when_ready(self._newest)
    self.pending = _Pending(
        step=step, metrics=self._metrics, digests=self._digests, timed_steps=self._timed_steps,
        began=self._began, ended=ended, waited=self._waited)
    self._metrics = []
    self._digests = []
    self._began = ended
    self._timed_steps = 0
    self._waited = 0.0

  def fetch(self) -> Line:
    """Returns the pending line; waits for its last step."""
    line, self.pending = self.pending, None
    fetched = jax.device_get(line.metrics)
    skipped = [bool(metrics.pop('skipped')[0]) for metrics in fetched]
    tokens = [float(metrics.pop('tokens')[0]) for metrics in fetched]
    real = [metrics for metrics, was_skipped in zip(fetched, skipped) if not was_skipped]
    sums = {name: tuple(sum(float(metrics[name][i]) for metrics in real) for i in (0, 1))
            for name in fetched[0]}
    timed = line.timed_steps
    return Line(step=line.step, sums=sums, skipped=skipped, digests=line.digests,
                seconds=line.ended.result() - line.began.result() if timed else None,
                tokens=sum(tokens[-timed:]) if timed else 0.0, waited=line.waited)


def values(line: Line, *, loss_weights: Mapping[str, float], learning_rate: float, flops: float,
           peak_flops: float | None) -> dict[str, Any]:
  """A line as metrics.jsonl has it.

  Args:
    line: the steps.
    loss_weights: weight in the total loss of each metric that is a loss.
    learning_rate: of the last step.
    flops: model FLOPs of the timed steps.
    peak_flops: FLOP/s of all devices together; None = not known.
  """
  seconds = line.seconds
  return {
      'loss': losses.mean_loss(line.sums, loss_weights), **losses.means(line.sums),
      'learning_rate': learning_rate,
      'tokens_per_second': line.tokens / seconds if seconds else None,
      'mfu': flops / seconds / peak_flops if seconds and peak_flops else None,
      'data_wait': line.waited / seconds if seconds else None,
      'skipped_steps': sum(line.skipped)}
