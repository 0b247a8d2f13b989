"""Lines of training metrics, each of the steps since the one before."""

from collections.abc import Callable
from concurrent import futures
import time
from typing import Any
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from bert_jax.data import loader
from bert_jax.objectives import losses
from bert_jax.objectives.losses import Metrics
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import topology
from bert_jax.runtime import processes
from bert_jax.tasks.task import Task
from bert_jax.tasks.task import TaskData
from bert_jax.training import health as health_lib
from bert_jax.training import metrics_log as report_lib
from bert_jax.training.digest import batch_digest
from bert_jax.training.digest import global_digests


class _Line(NamedTuple):
  """The steps of a line that is not written yet."""

  step: int  # the last of them
  metrics: list[Metrics]  # of each step
  digests: list[Any]  # of each batch, where the config asks for them
  timed: int  # its last steps whose time counts: all but the first of a run, which compiles
  began: Callable[[], float] | None  # when the first of these could start
  ended: Callable[[], float]  # when the last one was ready; waits for it
  waited: float  # seconds without rows


def _is_ready(metrics: Metrics) -> bool:
  return all(x.is_ready() for x in jax.tree.leaves(metrics))


def _fetch(metrics: list[Metrics]) -> tuple[dict[str, tuple[float, float]], list[float],
                                            list[bool]]:
  """Waits for the last of several steps to end.

  Returns:
    (sum, count) of each metric over the steps that were not skipped, the real tokens of each step,
    and whether each was skipped.
  """
  fetched = jax.device_get(metrics)
  skipped = [bool(m.pop('skipped')[0]) for m in fetched]
  tokens = [float(m.pop('tokens')[0]) for m in fetched]
  kept = [m for m, was_skipped in zip(fetched, skipped) if not was_skipped]
  sums = {name: tuple(sum(float(m[name][i]) for m in kept) for i in (0, 1)) for name in fetched[0]}
  return sums, tokens, skipped


class Lines:
  """Collects the metrics of steps; the loop writes a line a step late, so that no device waits.

  The time of a line ends when its last step is ready, whenever the line is written.
  """

  def __init__(self, task: Task, data: TaskData, rate: Callable, mesh: Mesh,
               report: report_lib.Report,
               health: health_lib.Health, batches: loader.Watched,
               clock: Callable[[], float] = time.monotonic):
    self._task, self._data, self._rate, self._mesh = task, data, rate, mesh
    self._report, self._health, self._batches = report, health, batches
    self._chip, self._first_feeder = topology.chip_of(mesh.devices.flat), mesh_lib.feed(mesh).first
    self._clock, self._waiter = clock, futures.ThreadPoolExecutor(1)
    self._metrics: list[Metrics] = []
    self._digests: list[Any] = []
    self._newest: Metrics | None = None
    self._began: Callable[[], float] | None = None  # the clock starts after the first step
    self._timed_from = 0
    self.due: _Line | None = None

  def start_clock(self, done: int):
    """From now on time counts as that of the steps after `done`."""
    now = self._clock()
    self._began, self._timed_from, self._batches.waited = (lambda: now), done, 0.0

  def digest(self, batch: Any):
    """Keeps the digest of a host batch for the line."""
    self._digests.append(batch_digest(batch))

  def add(self, metrics: Metrics):
    """Adds a step, which the device may not have made yet."""
    self._metrics.append(metrics)
    self._newest = metrics

  def idle(self) -> bool:
    """Whether the device has made all steps."""
    return self._newest is None or _is_ready(self._newest)

  def _ready(self) -> Callable[[], float]:
    """When the newest step is ready: now, or when a thread sees it."""
    newest, clock = self._newest, self._clock
    if _is_ready(newest):
      now = clock()
      return lambda: now

    def wait() -> float:
      jax.block_until_ready(newest)
      return clock()

    return self._waiter.submit(wait).result

  def end(self, step: int):
    """The steps up to this one make a line."""
    ended = self._ready()
    timed = step - self._timed_from if self._began else 0
    self.due = _Line(step, self._metrics, self._digests, timed, self._began, ended,
                     self._batches.waited)
    self._metrics, self._digests, self._batches.waited = [], [], 0.0
    if self._began:
      self._began, self._timed_from = ended, step

  def write(self):
    """Writes the line that is due.

    Raises:
      Failed: the loss was not finite for several steps in a row.
    """
    line, self.due = self.due, None
    task, step = self._task, line.step
    sums, tokens, skipped = _fetch(line.metrics)
    seconds, real = None, 0.0
    if line.timed:
      seconds, real = line.ended() - line.began(), sum(tokens[-line.timed:])
    values = {
        'loss': losses.mean_loss(sums, task.loss_weights), **losses.means(sums),
        'learning_rate': float(self._rate(step - 1)),
        'tokens_per_second': real / seconds if seconds else None,
        'mfu': self._data.flops(step - 1, real) / seconds / (self._chip.flops * self._mesh.size)
               if seconds and self._chip else None,
        'data_wait': line.waited / seconds if seconds else None,
        'skipped_steps': sum(skipped),
        **({'batch_digests': global_digests(line.digests, self._first_feeder)}
           if line.digests else {})}
    self._report.train(step, values)
    self._report.warn(step, self._health.line(values,
                                              processes.gathered(values['data_wait'] or 0.0)))
    last = self._health.steps(step - len(skipped) + 1, skipped)
    if last:
      health_lib.give_up(
          last, *global_digests([batch_digest(self._data.rows(last - 1))], self._first_feeder))
