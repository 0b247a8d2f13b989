"""The training loop: one for every task, read from top to bottom."""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data import loader
from bert_jax.errors import Preempted
from bert_jax.errors import UserError
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import console
from bert_jax.runtime import host
from bert_jax.runtime import preemption
from bert_jax.runtime import storage
from bert_jax.tasks.task import Task
from bert_jax.tasks.task import TaskData
from bert_jax.training import checkpoint
from bert_jax.training import health as health_lib
from bert_jax.training import metric_lines as lines_lib
from bert_jax.training import metrics_log as report_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import profiler
from bert_jax.training import state as state_lib

_AHEAD = 2  # steps that an accelerator is given before the one that it makes is ready


def _start(config: ConfigDict, checkpoints: checkpoint.Checkpoints, init: Any,
           initial: Sequence[Callable[[Any], Any]],
           abstract: state_lib.TrainState) -> tuple[state_lib.TrainState, int]:
  """The state that a run begins with, restored or fresh and then changed; and its step."""
  if checkpoints.latest() is not None:
    return checkpoints.restore(abstract)
  state = init(state_lib.root_key(config.seed))
  for change in initial:
    state = state._replace(params=change(state.params))
  return state, 0


class _Evaluations:
  """Held-out scores every so many steps, and at the end."""

  def __init__(self, task: Task, data: TaskData, config: ConfigDict, train_steps: int,
               mesh: Mesh, notice: preemption.Notice, report: report_lib.Report,
               health: health_lib.Health, checkpoints: checkpoint.Checkpoints):
    self._data, self._every, self._last = data, config.eval_every, train_steps
    self._best = config.keep_best
    self._step = state_lib.make_eval_step(task, mesh, config.sharding)
    self._mesh, self._notice = mesh, notice
    self._report, self._health, self._checkpoints = report, health, checkpoints

  def due(self, done: int) -> bool:
    """Whether there is one after so many steps."""
    return self._data.has_held_out and (done == self._last or done % self._every == 0)

  def run(self, state: state_lib.TrainState, done: int) -> bool:
    """False if SIGTERM broke it off: then it is made when the run goes on.

    Raises:
      UserError: no position counts for the score of `keep_best`.
    """
    def measure(batch):
      if self._notice.reached():
        raise preemption.Stopped
      return self._step(state, mesh_lib.put_batch(batch, self._mesh))

    try:
      scores = self._data.evaluate(measure, done)
    except preemption.Stopped:
      return False
    if self._best and scores[self._best] is None:
      raise UserError(f'keep_best={self._best}: no position of the evaluation counts for it: hold '
                      'out more text, evaluate more of it (eval_batches), or use another score')
    self._checkpoints.offer(state.params, done, scores)
    # Comes last: with its line in the metrics the evaluation counts as made.
    self._report.evaluation(done, scores)
    self._report.warn(done, self._health.evaluation(done, scores))
    return True


class _Run:
  """From the first step to the last: what goes on beside the steps, and when."""

  def __init__(self, task: Task, data: TaskData, config: ConfigDict, train_steps: int,
               mesh: Mesh, workdir: storage.Folder, checkpoints: checkpoint.Checkpoints,
               rate: Callable, first_step: int, clock: Callable[[], float] = time.monotonic):
    self._config, self._mesh, self._workdir = config, mesh, workdir
    self._first, self._last, self._checkpoints = first_step, train_steps, checkpoints
    self._notice = preemption.Notice()  # SIGTERM: the step that runs is finished and saved
    self._report = report_lib.Report(workdir.local, first_step=first_step, last_step=train_steps,
                                     active=jax.process_index() == 0)
    health = health_lib.Health(train_steps)
    self._freed_memory = host.FreedMemory()
    # A CPU is host and device: a step that is sent ahead gains no time, and takes memory. On others
    # a few are enough, and SIGTERM, which comes behind them all, is answered in time.
    self._sent = collections.deque(
        maxlen=1 + (0 if jax.default_backend() == 'cpu' else _AHEAD))
    self._profiler = profiler.Profiler(config.profile_steps, workdir.local / 'tensorboard')
    self._batches = loader.Watched(
        loader.batches(data.rows, first_step, train_steps, config.data.loader_workers),
        idle=lambda: self._lines.idle(), clock=clock)
    self._lines = lines_lib.Lines(task, data, rate, mesh, self._report, health, self._batches,
                                  clock)
    self._evaluations = _Evaluations(task, data, config, train_steps, mesh, self._notice,
                                     self._report, health, checkpoints)

  def _stop(self, done: int):
    self._checkpoints.wait()
    raise Preempted(f'stopped by SIGTERM after step {done} of {self._last}, everything is '
                    'saved: run the same command to go on')

  def make_up_for_evaluation(self, state: state_lib.TrainState):
    """Makes the evaluation that the run before was to make after its last step, and did not.

    Raises:
      Preempted: SIGTERM came.
    """
    if (self._first and self._evaluations.due(self._first)
        and not report_lib.is_evaluated(self._workdir.local, self._first)
        and not self._evaluations.run(state, self._first)):
      self._stop(self._first)

  def steps(self, train_step: Callable, state: state_lib.TrainState):
    """Makes all steps.

    Raises:
      Preempted: SIGTERM came; everything is saved.
      Failed: the loss was not finite for several steps in a row.
    """
    config, lines, evaluations = self._config, self._lines, self._evaluations
    for step, batch in enumerate(self._batches, self._first):
      if config.log_batch_digest:
        lines.digest(batch)
      self._profiler.before(step + 1)
      batch = mesh_lib.put_batch(batch, self._mesh)
      with jax.transfer_guard('disallow'):  # nothing else may go to the device or come back
        state, metrics = train_step(state, batch)
      lines.add(metrics)
      self._sent.append(metrics)
      if len(self._sent) == self._sent.maxlen:
        jax.block_until_ready(self._sent[0])
      self._freed_memory.after_step()
      done = step + 1
      self._profiler.after(done, metrics)
      if lines.due:  # a step late, so that the device never waits for the host
        self._checkpoints.check()
        lines.write()
      if step == self._first:
        jax.block_until_ready(metrics)
        lines.start_clock(done)
      stopping = self._notice.reached()
      saves = done % config.checkpoint_every == 0 or done == self._last
      pauses = saves or evaluations.due(done) or stopping
      if done % config.log_every == 0 or pauses:
        lines.end(done)
      if pauses:  # a checkpoint comes after its metrics: a kill loses neither
        lines.write()
        if evaluations.due(done) and not stopping:
          stopping = not evaluations.run(state, done)
        self._report.flush()
        self._workdir.push()
        if saves or stopping:
          self._checkpoints.save(state, done)
        if stopping:
          self._stop(done)
        lines.start_clock(done)
    self._checkpoints.close()

  def close(self):
    """Closes files and gives signals back, however the steps ended."""
    self._profiler.close()
    self._report.close()
    self._batches.close()
    self._notice.close()
    self._workdir.push()


def train(task: Task, data: TaskData, config: ConfigDict, train_steps: int, mesh: Mesh,
          workdir: storage.Folder, checkpoints: checkpoint.Checkpoints,
          initial: Sequence[Callable[[Any], Any]] = ()):
  """Trains `task` until `train_steps`, from the newest of `checkpoints` if there is one.

  Without one `initial` says how fresh parameters are changed first, one after another.

  Raises:
    Preempted: SIGTERM came; everything is saved.
    UserError: the checkpoint is of another model.
    Failed: the loss was not finite for several steps in a row.
  """
  optimizer_config = optimizer_lib.OptimizerConfig(**config.optimizer)
  optimizer = optimizer_lib.make_optimizer(optimizer_config, train_steps)
  rate = optimizer_lib.learning_rate(optimizer_config, train_steps)
  init, abstract = state_lib.make_init(task, optimizer, mesh, config.sharding)
  train_step = state_lib.make_train_step(
      task, optimizer, mesh, config.sharding, abstract, seed=config.seed,
      accumulation=optimizer_config.accumulation)

  # An own checkpoint wins over init_from, which wins over a fresh start.
  latest = checkpoints.latest()
  state, first_step = _start(config, checkpoints, init, initial, abstract)
  # Says so only now, when the newest checkpoint was read and is sound.
  if first_step == train_steps and (
      not data.has_held_out or report_lib.is_evaluated(workdir.local, train_steps)):
    checkpoints.close()
    console.print_summary([
        ('finished', f'{workdir} holds the whole run of {train_steps} steps')])
    return
  if latest is not None:
    again = f', {latest - first_step} steps are made again' if first_step < latest else ''
    console.print_summary([('resumed', f'from step {first_step}{again}')])
  state = state._replace(frozen=state_lib.place(nn.unbox(task.frozen), abstract.frozen))

  run = _Run(task, data, config, train_steps, mesh, workdir, checkpoints, rate, first_step)
  try:
    run.make_up_for_evaluation(state)
    run.steps(train_step, state)
  finally:
    run.close()
