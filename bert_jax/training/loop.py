"""The training loop of every task."""

import collections
from collections.abc import Callable, Sequence
import contextlib
import functools
import time
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh

from bert_jax.data import loader
from bert_jax.errors import Preempted, UserError
from bert_jax.parallel import chip_figures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import console, host, preemption, processes, storage
from bert_jax.tasks.task import Task, TaskData
from bert_jax.training import fingerprint, metric_lines, metrics_log, profiler, trackers
from bert_jax.training import health as health_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from bert_jax.training.checkpoint import Checkpoints

# Steps that we send to an accelerator before the current one is ready. A few hide the host's work,
# and SIGTERM, which is answered after them, is still answered in time. A CPU is both host and
# device: sending steps ahead saves no time there and costs memory.
_STEPS_AHEAD = 2


def train(task: Task, data: TaskData, *, mesh: Mesh, sharding: str, workdir: storage.Folder,
          checkpoints: Checkpoints, optimizer: optimizer_lib.OptimizerConfig, seed: int,
          train_steps: int, log_every: int, eval_every: int, checkpoint_every: int,
          keep_best: str = '', profile_steps: Sequence[int] = (), log_batch_digest: bool = False,
          loader_workers: int = 0,
          record: trackers.Record = trackers.Record(),
          initial: Callable[[Any], Any] = lambda params: params,
          clock: Callable[[], float] = time.monotonic):
  """Trains `task` on `data` for `train_steps` steps, from the newest checkpoint if there is one.

  Args (the others are fields of the config, see config.py):
    workdir: takes metrics.jsonl, curves.png and the files of trackers.
    train_steps: length of the whole run.
    record: of the trackers.
    initial: changes fresh parameters, if there is no checkpoint.
    clock: seconds, for the speed in the metrics.

  Raises:
    Preempted: SIGTERM came; everything is saved.
    UserError: the checkpoint is of another model, or `keep_best` has no position to be judged on.
    Failed: the loss was not finite for several steps in a row, or a checkpoint cannot be written.
    OSError: the disk is full.
  """
  # ---- Programs ----------------------------------------------------------------------------------
  transform = optimizer_lib.make_optimizer(optimizer, train_steps)
  init, abstract = state_lib.make_init(task, transform, mesh, sharding)
  train_step = state_lib.make_train_step(
      task, transform, mesh=mesh, preset=sharding, abstract=abstract, seed=seed,
      accumulation=optimizer.accumulation)

  # ---- State: a checkpoint of this run wins over `initial`, which wins over random parameters ----
  newest = checkpoints.latest()
  if newest is not None:
    state, first_step = checkpoints.restore(abstract)  # an older one if the newest is damaged
  else:
    first_step = 0
    state = init(state_lib.root_key(seed))
    state = state._replace(params=initial(state.params))

  def evaluates(step: int) -> bool:
    return data.has_held_out and (step == train_steps or step % eval_every == 0)

  # True if the run before was killed after it saved its last step and before it evaluated it.
  owes_evaluation = (first_step > 0 and evaluates(first_step)
                     and not metrics_log.is_evaluated(workdir.local, first_step))
  if (first_step == train_steps and not owes_evaluation
      and metrics_log.is_recorded(workdir.local, record)):
    checkpoints.close()
    console.print_summary([
        ('finished', f'{workdir} holds the whole run of {train_steps} steps')])
    return
  if newest is not None:
    again = f', {newest - first_step} steps are made again' if first_step < newest else ''
    console.print_summary([('resumed', f'from step {first_step}{again}')])
  state = state._replace(frozen=state_lib.place(nn.unbox(task.frozen), abstract.frozen))

  # ---- Beside the steps: SIGTERM, rows, metrics. They are closed in reverse order ----------------
  with contextlib.ExitStack() as stack:
    closed_at_end = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.callback(workdir.push)
    stack.push(checkpoints.settle)
    notice = closed_at_end(preemption.Notice())
    batches = closed_at_end(loader.batches(data.rows, first_step, train_steps, loader_workers))
    log = closed_at_end(metrics_log.MetricsLog(
        workdir.local, first_step=first_step, last_step=train_steps,
        active=jax.process_index() == 0, record=record))
    trace = closed_at_end(profiler.Profiler(
        profile_steps, workdir.local / 'tensorboard', first_step))
    lines = metric_lines.MetricLines(clock)
    health = health_lib.Health(train_steps)
    write_line = functools.partial(
        _write_line, task=task, data=data, mesh=mesh, log=log, health=health,
        learning_rate=optimizer_lib.learning_rate(optimizer, train_steps))
    evaluate = functools.partial(
        _evaluate, data=data, eval_step=state_lib.make_eval_step(task, mesh, sharding), mesh=mesh,
        notice=notice, keep_best=keep_best, checkpoints=checkpoints, log=log, health=health)
    steps_ahead = 0 if jax.default_backend() == 'cpu' else _STEPS_AHEAD
    in_flight = collections.deque(maxlen=1 + steps_ahead)
    freed_memory, compiled = host.FreedMemory(), set()

    if owes_evaluation and not evaluate(state, first_step):
      _stop(checkpoints, first_step, train_steps)

    # ---- Steps -----------------------------------------------------------------------------------
    for step in range(first_step + 1, train_steps + 1):
      with lines.waiting_for_rows():
        batch = next(batches)
      batch_digest = fingerprint.batch_digest(batch) if log_batch_digest else None
      trace.before(step)
      batch = mesh_lib.put_batch(batch, mesh)
      with jax.transfer_guard('disallow'):  # nothing else may go to the device or come back
        state, metrics = train_step(state, batch)
      lines.add(metrics, batch_digest)
      in_flight.append(metrics)
      if len(in_flight) == in_flight.maxlen:
        jax.block_until_ready(in_flight[0])
      freed_memory.after_step()
      trace.after(step, metrics)

      if lines.pending:  # fetched a step late, so that an accelerator never waits for the host
        write_line(lines.fetch())
      shapes = tuple(x.shape for x in jax.tree.leaves(batch))
      if shapes not in compiled:  # this step did: the clock starts after it
        compiled.add(shapes)
        jax.block_until_ready(metrics)
        lines.start_clock()

      stopping = notice.reached()
      saves = step % checkpoint_every == 0 or step == train_steps
      pauses = saves or evaluates(step) or stopping
      if step % log_every == 0 or pauses:
        checkpoints.check()
        lines.end(step)
        # A checkpoint comes after its metrics: a kill loses neither. A CPU has made the step now.
        if pauses or not steps_ahead:
          write_line(lines.fetch())
      if pauses:
        if evaluates(step) and not stopping:
          stopping = not evaluate(state, step)
        workdir.push()
        if saves or stopping:
          checkpoints.save(state, step)
        if stopping:
          _stop(checkpoints, step, train_steps)
        lines.start_clock()
    checkpoints.close()


def _write_line(line: metric_lines.Line, *, task: Task, data: TaskData, mesh: Mesh,
                log: metrics_log.MetricsLog, health: health_lib.Health,
                learning_rate: Callable[[int], Any]):
  """Logs a line of training metrics; raises Failed after too many skipped steps in a row."""
  chip = chip_figures.chip_of(mesh.devices.flat)
  values = line.values(
      loss_weights=task.loss_weights, learning_rate=float(learning_rate(line.step - 1)),
      flops=data.flops(line.step - 1, line.tokens),
      peak_flops=chip.flops * mesh.size if chip else None)
  global_digests = functools.partial(fingerprint.global_digests, first=mesh_lib.feed(mesh).first)
  if line.digests:
    values['batch_digests'] = global_digests(line.digests)
  waited = processes.gathered(values['data_wait'] or 0.0)
  log.train(line.step, values, health.line(values, waited))
  health.steps(line.step - len(line.skipped) + 1, line.skipped, lambda step: global_digests(
      [fingerprint.batch_digest(data.rows(step - 1))])[0])


def _evaluate(state: state_lib.TrainState, step: int, *, data: TaskData,
              eval_step: Callable[[state_lib.TrainState, Any], Any], mesh: Mesh,
              notice: preemption.Notice, keep_best: str, checkpoints: Checkpoints,
              log: metrics_log.MetricsLog, health: health_lib.Health) -> bool:
  """Evaluates the state after `step` steps, keeps it if it is the best, and logs its scores.

  Returns False if SIGTERM interrupted the evaluation: the run that goes on makes it up. Raises
  UserError if no position counts for the score that `keep_best` names.
  """

  def measure(batch):
    if notice.reached():
      raise preemption.Stopped
    return eval_step(state, mesh_lib.put_batch(batch, mesh))

  try:
    scores = data.evaluate(measure, step)
  except preemption.Stopped:
    return False
  if keep_best and scores[keep_best] is None:
    raise UserError(f'keep_best={keep_best}: no position of the evaluation counts for it: hold '
                    'out more text, evaluate more of it (eval_batches), or use another score')
  checkpoints.offer(state.params, step, scores, data.judged_on(step))
  # The log comes last: with its line in metrics.jsonl an evaluation counts as made.
  log.evaluation(step, scores, health.evaluation(step, scores))
  return True


def _stop(checkpoints: Checkpoints, step: int, train_steps: int):
  """Raises Preempted after SIGTERM, once the last checkpoint is complete."""
  checkpoints.wait()
  raise Preempted(f'stopped by SIGTERM after step {step} of {train_steps}, everything is '
                  'saved: run the same command to go on')
