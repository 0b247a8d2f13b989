"""Chooses model.scan_unroll, the layers in each iteration of the scan, if it is 0.

On a GPU, a scan copies every activation that it saves into a stacked array and back. This
takes a quarter of a training step. A step without a scan makes no such copies, but takes
about a minute to compile.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any

from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.data.phases import Phase
from bert_jax.model import architectures
from bert_jax.parallel import chip_figures
from bert_jax.runtime import platforms
from bert_jax.tasks.task import Task
from bert_jax.training.job import Job

# BERT-base compiles in 45 to 55 seconds without a loop, BERT-large in 75 to 85.
_LONG = 5 * 60.0  # seconds; a shorter run keeps the scan
_SHARE_OF_PEAK = 0.4  # of the chip's FLOP/s, in a training step
# Layers in an iteration on a CPU or TPU: steps are faster, the compilation takes longer.
_OF_FINE_TUNING = 12


def seconds(task: Task, phases: Iterable[Phase], mesh: Mesh) -> float:
  """The approximate duration of a run on known chips; infinite on others."""
  devices = list(mesh.devices.flat)
  chip = chip_figures.chip_of(devices)
  if chip is None:
    return float('inf')
  flops = sum(phase.steps * phase.batch_size * phase.max_len
              * task.flops_per_token(phase.max_len) for phase in phases)
  return flops / (_SHARE_OF_PEAK * chip.flops * len(devices))


def fields(config: FrozenConfigDict, mesh: Mesh, duration: float) -> dict[str, Any]:
  """The resolved model.scan_unroll of a run of `duration` seconds; {} if it is given."""
  if config.model.scan_unroll:
    return {}
  if mesh.devices.flat[0].platform not in platforms.GPU:
    layers = 1 if config.task == 'pretrain' else _OF_FINE_TUNING
  else:
    layers = config.model.num_layers if duration > _LONG else 1
  return {'model.scan_unroll': layers}


def of_job(config: FrozenConfigDict, job: Job, mesh: Mesh) -> tuple[dict[str, Any], Job]:
  """Returns (`fields` for the known number of steps, the job with these fields)."""
  phases = [Phase(job.train_steps, config.max_len, config.batch_size)]
  if config.task == 'pretrain':
    phases = config_lib.phases_of(config, job.train_steps)
  changes = fields(config, mesh, seconds(job.task, phases, mesh))
  if not changes:
    return changes, job
  model = architectures.make_config(changed(config, changes).model)
  return changes, dataclasses.replace(job, task=job.task.with_config(model))
