"""Plans a run for local devices, or for TPU slices and GPUs that need not exist here."""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
import os
import tempfile
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.errors import require
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures, attention_kernels
from bert_jax.parallel import chip_figures, sharding, topology
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import children, programs, tables
from bert_jax.planning import estimate as estimate_lib
from bert_jax.runs import finetune, resolve, unrolling
from bert_jax.runtime import platforms, storage

LOCAL = 'local'


def _mesh(config: ConfigDict, name: str) -> Mesh:
  devices = jax.devices() if name == LOCAL else topology.get(name)
  return mesh_lib.make_mesh(**config.mesh, devices=devices)


def _phases(config: FrozenConfigDict, model: Pretrained | None,
            mesh: Mesh) -> Iterator[programs.Work]:
  """Yields the work of each phase of a run that starts from `model`."""
  if config.task == 'pretrain':
    for phase in config_lib.phases_of(config):
      yield programs.pretraining(config, phase)
    return
  with tempfile.TemporaryDirectory() as folder:
    job = finetune.make_job(config, model, mesh, epath.Path(folder))
  yield programs.finetuning(config, job.data, job.train_steps)


def _works(config: ConfigDict, mesh: Mesh
           ) -> tuple[FrozenConfigDict, list[programs.Work]]:
  """(the config for these devices, the work of each phase)."""
  # For each slice, because dtype=auto and scan_unroll=0 depend on the devices.
  config, model = resolve.with_model(config, mesh)
  works = list(_phases(config, model, mesh))
  duration = unrolling.seconds(works[0].task, [work.phase for work in works], mesh)
  fields = unrolling.fields(config, mesh, duration)
  if fields:
    config = changed(config, fields)
    model_config = architectures.make_config(config.model)
    works = [work._replace(task=work.task.with_config(model_config)) for work in works]
  return config, works


def _in_child(config: ConfigDict, name: str, phase: int,
              program: programs.Program) -> programs.Figures:
  """Compiles a program of a phase in a child process, which inherits no state."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # As in the parent: a run on this host may hold the accelerator.
  jax.config.update('jax_platforms', 'cpu')
  mesh = _mesh(config, name)
  config, works = _works(config, mesh)
  return programs.compile_program(config, works[phase], mesh, program)


def _plan(config: ConfigDict, name: str, price: float, search: bool,
          explain: bool) -> tuple[list[estimate_lib.Estimate], list]:
  """Prints and returns the estimates of all phases on one slice, and search results."""
  mesh = _mesh(config, name)
  devices = list(mesh.devices.flat)
  require(math.isfinite(price), f'--price={price} must be a number')
  require(not price or chip_figures.chip_of(devices),
          f'--price has no effect here: the speed of {devices[0].device_kind} is unknown')
  config, works = _works(config, mesh)
  axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  print(f'\n{name}: {chip_figures.num_chips(devices)} {devices[0].device_kind} '
        f'(mesh {axes}; sharding {config.sharding}; remat {config.model.remat}; '
        f'{config.model.dtype})')
  lengths = [work.phase.max_len for work in works]
  # The mesh in context decides which kernels are available.
  with sharding.in_context(mesh, config.sharding):
    paths = attention_kernels.describe(
        works[0].task.model.config, lengths,
        special=config_lib.special_rows(config))
  print(f'  attention: {paths}')
  estimates, searches = [], []
  for i, work in enumerate(works):
    phase = work.phase

    def compile_all(steps, i=i):
      return children.run([(_in_child, (config, name, i, step)) for step in steps])

    print(f'\n  {phase.steps:,} steps of {phase.batch_size} rows of {phase.max_len}',
          flush=True)
    # A child process could not share the local devices with this one.
    estimate = estimate_lib.estimate(config, work, mesh,
                                     None if name == LOCAL else compile_all)
    for label, value in tables.lines(estimate, price):
      print(f'    {label:14}  {value}')
    if estimate.weak_scaling:
      print('\n' + tables.weak_scaling(estimate))
    if explain and estimate.traffic:
      print('\n' + tables.operations(estimate))
    if search:
      largest = list(estimate_lib.search(config, phase, mesh))
      searches.append([x._asdict() for x in largest])
      print('\n' + tables.largest(largest))
    estimates.append(estimate)
  return estimates, searches


def plan(config: ConfigDict, topologies: Sequence[str], *, price: float = 0.0,
         search: bool = False, explain: bool = False, out: str = '',
         given: Mapping[str, Any] = {}):
  """Compiles the steps of a run for each slice and prints what the run would take.

  Args:
    config: the config of the run.
    topologies: names of TPU slices or GPUs, such as v5e:4x4 or h100:8, or 'local'.
    price: price of a chip-hour, in any currency; 0 = show no costs.
    search: also find the largest batches.
    explain: show which operations move the most memory.
    out: a file for the figures as JSON; '' = none.
    given: the fields of the command line, with their values in the config file.

  Raises:
    UserError: an unknown topology, or one that the config does not fit.
  """
  require(topologies, 'give --topology=local, or a slice such as v5e:4x4')
  require(not search or config.task == 'pretrain',
          f'--search is for pretraining; task={config.task}')
  if out:
    storage.make_parent('--out', epath.Path(out))
  # The same checks as a run, except the checks that need its data.
  config = resolve.checked(config, given).config
  require(not config.train_minutes,
          f'train_minutes={config.train_minutes}: only a run measures its steps: give '
          'train_steps')
  require(config.task != 'pretrain' or config.train_steps,
          f'train_epochs={config.train_epochs}: a plan has no corpus to count: give '
          'train_steps')
  if LOCAL in topologies:
    platforms.select_platform(config.platform)
  else:
    require('platform' not in given, '--config.platform has no effect here: '
            f'--topology={",".join(topologies)} names the devices')
    # The programs only compile: a run on this host keeps its accelerator.
    jax.config.update('jax_platforms', 'cpu')
  plans = {name: _plan(config, name, price, search, explain) for name in topologies}
  if len(plans) > 1:
    print('\n' + tables.compared(
        {name: phases for name, (phases, _) in plans.items()}, price))
  if out:
    content = {name: {'phases': [phase.as_json() for phase in phases], 'search': searches}
               for name, (phases, searches) in plans.items()}
    storage.write_whole(epath.Path(out), json.dumps(content, indent=2) + '\n')
