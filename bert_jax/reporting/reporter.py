"""Reports a run, through one object that the training loop calls."""

from collections.abc import Callable
import contextlib
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax.objectives.losses import Metrics
from bert_jax.parallel import chip_figures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.reporting import (
  batch_digests,
  health,
  metric_lines,
  metrics_log,
  profiler,
  trackers,
)
from bert_jax.runtime import processes, storage
from bert_jax.tasks.task import Task, TaskData


class _Silent:
  """The log of every process except the first: it writes nothing."""

  train = evaluation = close = staticmethod(lambda *_: None)


class Reporter:
  """Reports the steps and the evaluations of a run.

  It collects the metrics of steps into lines, and writes lines, scores and warnings to
  the screen, metrics.jsonl and the trackers. It traces the steps of `profile_steps`. All
  processes call its methods together; the first one writes.

  Args of the constructor:
    task, data: the two halves of the task; they give FLOPs and, for digests, rows.
    config: log_batch_digest, profile_steps and trackers are read.
    mesh: the devices of the run, to compute their utilization.
    workdir: takes metrics.jsonl, curves.png, and the files of trackers and profiler.
    first_step, train_steps: the steps done before, and the steps of the whole run.
    learning_rate: the rate of each step, counted from 0.
  """

  def __init__(self, task: Task, data: TaskData, config: FrozenConfigDict, mesh: Mesh,
               workdir: storage.Folder, *, first_step: int, train_steps: int,
               learning_rate: Callable[[int], Any]):
    self._task, self._data, self._mesh = task, data, mesh
    self._learning_rate = learning_rate
    self._log_digests = config.log_batch_digest
    self._global_digests = functools.partial(
        batch_digests.global_digests, first=mesh_lib.feed(mesh).first)
    self._lines = metric_lines.MetricLines()
    self._health = health.Health(train_steps)
    self._profiler = profiler.Profiler(
        config.profile_steps, workdir.local / 'tensorboard', first_step)
    self._log = _Silent() if jax.process_index() else metrics_log.MetricsLog(
        workdir.local, first_step=first_step, last_step=train_steps,
        start_trackers=functools.partial(
            trackers.start, config.trackers, config.to_dict(), workdir.path.name))
    self._compiled: set[tuple] = set()  # the shapes of batches whose program is compiled
    self.waiting_for_rows = self._lines.waiting_for_rows  # a context manager
    # Call this after a pause between two steps, so that no line counts the pause.
    self.restart_clock = self._lines.start_clock

  def before_step(self, step: int, batch: Any):
    """Call this before each step, with this process's share of its batch, on the host."""
    self._digest = batch_digests.batch_digest(batch) if self._log_digests else None
    shapes = tuple(x.shape for x in jax.tree.leaves(batch))
    self._compiles = shapes not in self._compiled
    self._compiled.add(shapes)
    self._profiler.before(step)

  def after_step(self, step: int, metrics: Metrics):
    """Call this after each step; the device may still compute it."""
    self._lines.add(metrics, self._digest)
    self._profiler.after(step, metrics)
    # Fetched a step late, so that an accelerator never waits for the host.
    if self._lines.pending:
      self._write_line()
    # The clock starts after this step: no line counts compilation.
    if self._compiles:
      jax.block_until_ready(metrics)
      self._lines.start_clock()

  def end_line(self, step: int, write_now: bool):
    """Ends a line with `step`; unless it is written now, the next step writes it.

    Raises Failed after too many skipped steps in a row.
    """
    self._lines.end(step)
    if write_now:
      self._write_line()

  def evaluation(self, step: int, scores: dict[str, float | None]):
    """Reports held-out scores; an evaluation is done once metrics.jsonl has them."""
    self._log.evaluation(step, scores, self._health.evaluation(step, scores))

  def _write_line(self):
    """Writes the last line, and waits for its steps; raises like `end_line`."""
    line, chip = self._lines.fetch(), chip_figures.chip_of(self._mesh.devices.flat)
    values = line.values(
        loss_weights=self._task.loss_weights,
        learning_rate=float(self._learning_rate(line.step - 1)),
        flops=self._data.flops(line.step - 1, line.tokens),
        peak_flops=chip.flops * self._mesh.size if chip else None)
    if line.digests:
      values['batch_digests'] = self._global_digests(line.digests)
    waited = processes.gathered(values['data_wait'] or 0.0)
    self._log.train(line.step, values, self._health.line(values, waited))
    self._health.steps(line.step - len(line.skipped) + 1, line.skipped, self._digest_of)

  def _digest_of(self, step: int) -> str:
    return self._global_digests(
        [batch_digests.batch_digest(self._data.rows(step - 1))])[0]

  def close(self):
    """Ends a trace, draws the curves of the last scores, ends the records of trackers."""
    # The log closes even if the profiler fails.
    with contextlib.closing(self._log):
      self._profiler.close()
