"""The training loop of every task."""

import collections
from collections.abc import Callable
import contextlib
import functools
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax.data import loader
from bert_jax.errors import Preempted, require
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.reporting import metrics_log
from bert_jax.reporting import reporter as reporter_lib
from bert_jax.runtime import console, host, preemption, storage
from bert_jax.tasks.task import TaskData
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.job import Job

# Steps sent to an accelerator before the current step is ready. Two hide the work of the
# host. SIGTERM waits for them, so more steps would delay the last checkpoint. A CPU is
# both host and device: there, steps sent ahead save no time and cost memory.
_STEPS_AHEAD = 2


def train(job: Job, config: FrozenConfigDict, mesh: Mesh, workdir: storage.Folder,
          checkpoints: Checkpoints, initial: Callable[[Any], Any]):
  """Trains `job.task` on `job.data`, from the newest checkpoint if there is one.

  Args:
    job: the task, its data and the length of the whole run.
    config: the resolved config of the run.
    mesh: the devices of the run.
    workdir: takes metrics.jsonl, curves.png and the files of trackers.
    checkpoints: the checkpoints of the workdir; closed at the end.
    initial: changes fresh parameters if the workdir has no checkpoint.

  Raises:
    Preempted: SIGTERM came; everything is saved.
    UserError: the checkpoint is of another model, or no position counts for `keep_best`.
    Failed: the loss was not finite for several steps, or a checkpoint cannot be written.
    OSError: the disk is full.
  """
  task, data, train_steps = job.task, job.data, job.train_steps
  # ---- Programs and state --------------------------------------------------------------
  init, abstract, train_step = state_lib.make_programs(task, config, mesh, train_steps)
  state, first_step, owes_evaluation = _start(
      job, config, workdir, checkpoints, init, abstract, initial)
  if state is None:  # the workdir holds the whole run
    return

  # ---- Resources, closed in reverse order ----------------------------------------------
  with contextlib.ExitStack() as stack:
    stack.callback(workdir.push)
    stack.push(checkpoints.settle)
    notice = stack.enter_context(contextlib.closing(preemption.Notice()))
    batches = stack.enter_context(contextlib.closing(loader.batches(
        data.rows, first_step, train_steps, config.data.loader_workers)))
    reporter = stack.enter_context(contextlib.closing(reporter_lib.Reporter(
        task, data, config, mesh, workdir, first_step=first_step, train_steps=train_steps,
        learning_rate=optimizer_lib.learning_rate(
            optimizer_lib.OptimizerConfig(**config.optimizer), train_steps))))
    evaluate = functools.partial(
        _evaluate, data=data, mesh=mesh, keep_best=config.keep_best, notice=notice,
        eval_step=state_lib.make_eval_step(
            task, mesh, config.sharding, state_lib.eval_microbatches(config)),
        checkpoints=checkpoints, reporter=reporter)
    steps_ahead = 0 if jax.default_backend() == 'cpu' else _STEPS_AHEAD
    in_flight = collections.deque(maxlen=1 + steps_ahead)  # metrics of the steps sent
    freed_memory = host.FreedMemory()

    if owes_evaluation and not evaluate(state, first_step):
      _stop(checkpoints, first_step, train_steps)

    for step in range(first_step + 1, train_steps + 1):
      # ---- Rows: built in the background; masks are drawn on the device ----------------
      with reporter.waiting_for_rows():
        batch = next(batches)
      reporter.before_step(step, batch)
      batch = mesh_lib.put_batch(batch, mesh)

      # ---- The step: sent to the device, which is a few steps behind -------------------
      with jax.transfer_guard('disallow'):  # a hidden transfer would stall the device
        state, metrics = train_step(state, batch)
      in_flight.append(metrics)
      if len(in_flight) == in_flight.maxlen:
        jax.block_until_ready(in_flight[0])
      freed_memory.after_step()
      reporter.after_step(step, metrics)

      # ---- A line of metrics, every log_every steps and before every pause -------------
      stopping = notice.reached()
      evaluates = _evaluates_after(step, job, config)
      saves = step % config.checkpoint_every == 0 or step == train_steps
      pauses = saves or evaluates or stopping
      if step % config.log_every == 0 or pauses:
        checkpoints.check()
        # Metrics precede their checkpoint: a kill loses neither. On a CPU they are ready.
        reporter.end_line(step, write_now=pauses or not steps_ahead)

      # ---- A pause: evaluation, then checkpoint ----------------------------------------
      if pauses:
        if evaluates and not stopping:
          stopping = not evaluate(state, step)
        workdir.push()
        if saves or stopping:
          checkpoints.save(state, step)
        if stopping:
          _stop(checkpoints, step, train_steps)
        reporter.restart_clock()
    checkpoints.close()


def _start(job: Job, config: FrozenConfigDict, workdir: storage.Folder,
           checkpoints: Checkpoints, init: Callable[[jax.Array], state_lib.TrainState],
           abstract: state_lib.TrainState, initial: Callable[[Any], Any]
           ) -> tuple[state_lib.TrainState | None, int, bool]:
  """Returns the first state, the steps done, and whether the run owes an evaluation.

  The state is the newest checkpoint, or random parameters that `initial` changes. A run
  owes an evaluation if it was stopped between the training of a step and its evaluation.
  If the workdir holds the whole run, the state is None and the checkpoints are closed.
  """
  newest = checkpoints.latest()
  if newest is None:
    state, step = init(state_lib.root_key(config.seed)), 0
    state = state._replace(params=initial(state.params))
  else:
    state, step = checkpoints.restore(abstract)  # an older step if the newest is damaged
  # metrics.jsonl decides, because an evaluation has no checkpoint.
  owes_evaluation = (_evaluates_after(step, job, config)
                     and not metrics_log.is_evaluated(workdir.local, step))
  if (step == job.train_steps and not owes_evaluation
      and metrics_log.is_recorded(workdir.local, config.trackers)):
    checkpoints.close()
    console.print_summary([('finished', f'{workdir} holds the whole run of {step} steps')])
    return None, step, False
  if newest is not None:
    repeated = f', {newest - step} steps are repeated' if step < newest else ''
    console.print_summary([('resumed', f'from step {step}{repeated}')])
  # No checkpoint has the frozen arrays: the task brings them in every run.
  state = state._replace(
      frozen=state_lib.shard_like(nn.unbox(job.task.frozen), abstract.frozen))
  return state, step, owes_evaluation


def _evaluates_after(step: int, job: Job, config: FrozenConfigDict) -> bool:
  return step > 0 and job.data.has_held_out and (
      step == job.train_steps or step % config.eval_every == 0)


def _evaluate(state: state_lib.TrainState, step: int, *, data: TaskData,
              eval_step: Callable[[state_lib.TrainState, Any], Any], mesh: Mesh,
              notice: preemption.Notice, keep_best: str, checkpoints: Checkpoints,
              reporter: reporter_lib.Reporter) -> bool:
  """Evaluates the state, keeps it if it is the best, and reports its scores.

  Returns False if SIGTERM interrupted the evaluation: the resumed run evaluates again.
  Raises UserError if no position counts for the score that `keep_best` names.
  """

  def measure(batch):
    if notice.reached():
      raise preemption.Stopped
    return eval_step(state, mesh_lib.put_batch(batch, mesh))

  try:
    scores = data.evaluate(measure, step)
  except preemption.Stopped:
    return False
  require(not keep_best or scores[keep_best] is not None,
          f'keep_best={keep_best}: no position of the evaluation counts for it: hold out '
          'more text, evaluate more of it (eval_batches), or use another score')
  checkpoints.offer(state.params, step, scores, data.judged_on(step))
  # The report comes last: an evaluation counts as done once metrics.jsonl has its line.
  reporter.evaluation(step, scores)
  return True


def _stop(checkpoints: Checkpoints, step: int, train_steps: int):
  """Raises Preempted after SIGTERM, once the last checkpoint is complete."""
  checkpoints.wait()
  raise Preempted(f'stopped by SIGTERM after step {step} of {train_steps}, everything is '
                  'saved: run the same command to resume')
