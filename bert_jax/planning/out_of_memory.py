"""Explains that a pretraining step does not fit into the memory of its devices."""

from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.parallel import chip_figures, sharding
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import estimate, programs
from bert_jax.runs import resolve, unrolling
from bert_jax.runtime import ending

_GIB = 2**30


def describes(error: BaseException) -> bool:
  """True if a device ran out of memory."""
  return (isinstance(error, jax.errors.JaxRuntimeError)
          and 'RESOURCE_EXHAUSTED' in str(error) and not ending.storage_trouble(error))


def explain(config: ConfigDict, given: Mapping[str, Any] = {}) -> str:
  """Says what the largest step needs, what a device has, and which batch fits.

  Args:
    config: the config of a pretraining run that starts from random parameters.
    given: the fields of the command line, with their values in the config file.
  """
  mesh = mesh_lib.make_mesh(**config.mesh)
  config, _ = resolve.fitted(config, given)
  config = config_fields.changed(config, config_lib.dtype_on(config, mesh))
  phase = max(config_lib.phases_of(config),
              key=lambda phase: phase.batch_size * phase.max_len)
  # As in the run, which unrolls its layers on a GPU if it takes long. Epochs usually do,
  # and their number of steps is not known here.
  duration = float('inf') if config.train_epochs else 60 * config.train_minutes
  duration = duration or unrolling.seconds(
      programs.pretraining(config, phase).task, config_lib.phases_of(config), mesh)
  config = config_fields.changed(config, unrolling.fields(config, mesh, duration))
  limit = chip_figures.memory_limit(mesh.devices.flat[0])
  figures = programs.train_step(programs.pretraining(config, phase), config, mesh)
  # The TPU compiler rejects a program that does not fit, and says by how much.
  need = (f'{sum(figures.memory.values()) / _GIB:.1f} GiB of each device, which has '
          f'{limit / _GIB:.1f}' if figures.memory
          else f'{figures.missing / _GIB:.1f} GiB more than each device has')
  rows, _ = estimate.largest_rows(config, phase, mesh)
  largest = rows * sharding.batch_divisor(mesh) * config.optimizer.accumulation
  fits = 'not even one row fits'
  # Phases of different batch sizes reject batch_size, and the remedy must always work.
  if rows:
    fits = (f'{largest} rows of {phase.max_len} fit (give them in phases)'
            if config.phases else f'batch_size={largest} fits')
  return (f'out of memory: a step of {phase.batch_size} rows of {phase.max_len} needs '
          f'{need}. According to the compiler {fits}; bert_jax.plan --topology=local '
          '--search tries remat and sharding')
