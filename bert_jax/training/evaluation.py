"""Evaluations on held-out data, every so many steps and after the last one."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from bert_jax.errors import UserError
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runtime import preemption
from bert_jax.tasks.task import Task, TaskData
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.health import Health
from bert_jax.training.metrics_log import MetricsLog
from bert_jax.training.state import TrainState


def make_eval_step(task: Task, mesh: Mesh, preset: str) -> Callable:
  """The jitted evaluation step: (state, batch) -> `Task.measure`, on every device."""
  return sharding.with_mesh(
      lambda state, batch: task.measure(state.params, state.frozen, batch), mesh, preset,
      out_shardings=mesh_lib.replicated(mesh))


def run(state: TrainState, step: int, *, data: TaskData,
        eval_step: Callable[[TrainState, Any], Any], mesh: Mesh, notice: preemption.Notice,
        keep_best: str, checkpoints: Checkpoints, log: MetricsLog, health: Health) -> bool:
  """Evaluates the state after `step` steps, keeps it if it is the best, and logs its scores.

  Returns:
    False if SIGTERM interrupted the evaluation: the run that goes on makes it up.

  Raises:
    UserError: no position counts for the score that `keep_best` names.
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
  checkpoints.offer(state.params, step, scores)
  # The log comes last: with its line in metrics.jsonl an evaluation counts as made.
  log.evaluation(step, scores)
  log.warn(step, health.evaluation(step, scores))
  return True
