"""Computes the number of steps that fit into the time budget `train_minutes`."""

from collections.abc import Callable, Mapping
import contextlib
import time
from typing import Any

from flax import linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data import loader
from bert_jax.data import phases as phases_lib
from bert_jax.errors import require
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import processes
from bert_jax.training import state as state_lib
from bert_jax.training.job import Job

_WARM = 2  # untimed steps: the first one compiles
_LEAST, _MOST, _SECONDS = 3, 200, 10.0  # timed steps of each phase, and their target time
# Steps of the schedule during the measurement: enough to time the shortest phase.
_PROVISIONAL_STEPS = 1_000_000


def fixed_steps(config: FrozenConfigDict, earlier: Mapping[str, Any],
                make_job: Callable[[FrozenConfigDict], Job],
                mesh: Mesh) -> tuple[dict[str, Any], list[str]]:
  """Fixes the steps and phases of a run whose length is given in minutes.

  A resumed run with the same minutes and rows keeps the steps of `earlier`. All
  processes call this together.

  Args:
    config: the config of the run.
    earlier: the config of an earlier run in the workdir; {} = no such run.
    make_job: makes the job of a config.
    mesh: the devices of the run.

  Returns:
    (changed fields by full name, notes for the user).

  Raises:
    UserError: the minutes allow fewer steps than the run has phases.
  """
  if earlier and _budget(earlier) == _budget(config):
    steps, speed = earlier['train_steps'], 'as measured when the run began'
  else:
    seconds = _seconds_per_step(config, make_job, mesh)
    steps, speed = int(60 * config.train_minutes / seconds), f'{seconds:.3g} s each'
    require(steps >= max(len(config.phases), 1),
            f'train_minutes={config.train_minutes} is too short: a step takes '
            f'{seconds:.3g} s')
  return _fields(config, steps), [
      f'train_minutes={config.train_minutes:g} are {steps:,} steps, {speed}']


def _budget(config: Mapping[str, Any]) -> tuple:
  """The minutes, and the fields that determine the time of a step."""
  return (config.get('train_minutes'), config['batch_size'], config['max_len'],
          [tuple(phase[1:]) for phase in config['phases']])


def _fields(config: FrozenConfigDict, steps: int) -> dict[str, Any]:
  """The fields of a run with `steps` steps."""
  phases = phases_lib.scaled(config.phases, steps) if config.phases else ()
  return {'train_steps': steps, 'phases': phases}


def _seconds_per_step(config: FrozenConfigDict,
                      make_job: Callable[[FrozenConfigDict], Job], mesh: Mesh) -> float:
  """The mean seconds of a step over the phases of the run."""
  steps = _PROVISIONAL_STEPS
  # A given warmup may be longer than the run, whose length is not known yet.
  provisional = config_fields.changed(config, {
      **_fields(config, steps), 'optimizer.warmup_steps': 0,
      'optimizer.warmup_ratio': 0.5})
  job = make_job(provisional)
  init, abstract, train_step = state_lib.make_programs(job.task, provisional, mesh, steps)
  # Random parameters suffice: their values do not change the time of a step.
  state = init(state_lib.root_key(config.seed))
  state = state._replace(
      frozen=state_lib.shard_like(nn.unbox(job.task.frozen), abstract.frozen))
  seconds = first_step = 0
  for phase in config_lib.phases_of(provisional):
    end_step = first_step + _WARM + 1 + _MOST
    if config.task != 'pretrain':  # its rows have several shapes: compile for each
      warm = _one_of_each_shape(job.data.rows, range(first_step, end_step))
      state = _run(train_step, state, iter(warm), len(warm), mesh)[0]
    workers = config.data.loader_workers
    with contextlib.closing(
        loader.batches(job.data.rows, first_step, end_step, workers)) as batches:
      state = _run(train_step, state, batches, _WARM, mesh)[0]
      # One step sets the number of timed steps, for about `_SECONDS` on any hardware.
      state, probe = _run(train_step, state, batches, 1, mesh)
      count = min(max(_LEAST, int(_SECONDS / probe)), _MOST)
      state, timed = _run(train_step, state, batches, count, mesh)
    seconds += timed / count * phase.steps / steps
    first_step += phase.steps
  return seconds


def _one_of_each_shape(rows: Callable[[int], Any], steps: range) -> list[Any]:
  """Returns the first batch of each shape."""
  batches: dict[tuple, Any] = {}
  for batch in map(rows, steps):
    batches.setdefault(tuple(x.shape for x in jax.tree.leaves(batch)), batch)
  return list(batches.values())


def _run(train_step, state: state_lib.TrainState, batches, count: int,
         mesh: Mesh) -> tuple[state_lib.TrainState, float]:
  """Runs `count` steps; returns (state, their seconds in the slowest process)."""
  began = time.monotonic()
  for _ in range(count):
    state, metrics = train_step(state, mesh_lib.put_batch(next(batches), mesh))
    # On a CPU the host is the device: the training loop also waits for each step.
    if jax.default_backend() == 'cpu':
      jax.block_until_ready(metrics)
  jax.block_until_ready(metrics)
  return state, max(processes.gathered(time.monotonic() - began))
