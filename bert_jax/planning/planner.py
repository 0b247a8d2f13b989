"""Plans a run: for slices that need not be here, or for the devices that are."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
import os
import tempfile
from typing import Any
from typing import NamedTuple

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.model import attention
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.parallel import topology
from bert_jax.planning import children
from bert_jax.planning import programs
from bert_jax.planning import search as search_lib
from bert_jax.planning import tables
from bert_jax.planning.estimate import Estimate
from bert_jax.planning.estimate import Figures
from bert_jax.planning.estimate import Program
from bert_jax.planning.estimate import estimate
from bert_jax.planning.estimate import figures
from bert_jax.planning.programs import Work
from bert_jax.runs import initial
from bert_jax.runs import no_effect

LOCAL = 'local'


class Options(NamedTuple):
  """What is asked for.

  Attributes:
    topologies: names of TPU slices, or 'local'.
    price: of a chip for an hour, in any currency; 0 = costs are not shown.
    search: find the largest batches too.
    out: where to write the figures as JSON; '' = nowhere.
  """

  topologies: Sequence[str]
  price: float
  search: bool
  out: str


def _devices(name: str) -> list[jax.Device]:
  return jax.devices() if name == LOCAL else topology.get(name)


def _phases(config: ConfigDict, mesh: Mesh) -> Iterator[Work]:
  """What each phase of the run does."""
  if config.task == 'pretrain':
    for phase in config_lib.phases_of(config):
      yield programs.pretraining(config, phase)
    return
  from bert_jax.runs import finetune
  model = initial.load(config)
  initial.adopt_sizes(config, model)
  with tempfile.TemporaryDirectory() as nowhere:
    job = finetune.make_job(config, model, mesh, epath.Path(nowhere))
  yield programs.finetuning(job.data, job.train_steps)


def _in_child(config: ConfigDict, name: str, phase: int, program: Program) -> Figures:
  """The figures of a program of a phase, in a process that knows nothing yet."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  mesh = mesh_lib.make_mesh(**config.mesh, devices=_devices(name))
  works = _phases(config, mesh)
  return figures(config, next(itertools.islice(works, phase, None)), mesh, program)


def _check(config: ConfigDict, mesh: Mesh):
  config_lib.check_sizes(config)
  for phase in config_lib.phases_of(config):
    mesh_lib.check_fits(mesh, phase.batch_size, config.optimizer.accumulation,
                        config.model.num_heads)


def _plan(config: ConfigDict, name: str, options: Options) -> tuple[list[Estimate], list]:
  """The estimates of all phases on one slice, and what a search found; prints them."""
  devices = _devices(name)
  mesh = mesh_lib.make_mesh(**config.mesh, devices=devices)
  config = config.copy_and_resolve_references()  # each slice has a dtype of its own
  config_lib.set_dtype(config, mesh)
  works = list(_phases(config, mesh))
  _check(config, mesh)
  bert, lengths = works[0].task.model.config, [work.phase.max_len for work in works]
  axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())
  print(f'\n{name}: {topology.num_chips(devices)} {devices[0].device_kind} '
        f'(mesh {axes}; sharding {config.sharding}; remat {config.model.remat}; '
        f'{config.model.dtype})')
  with sharding.in_context(mesh, config.sharding):
    print(f'  attention: {attention.describe(bert, lengths)}')
  estimates, found = [], []
  for i, work in enumerate(works):
    phase = work.phase

    def compiled(wanted, i=i):
      return children.run([(_in_child, (config, name, i, program)) for program in wanted])

    print(f'\n  {phase.steps:,} steps of {phase.batch_size} rows of {phase.max_len}', flush=True)
    estimates.append(estimate(config, work, mesh, None if name == LOCAL else compiled))
    for what, value in tables.lines(estimates[-1], options.price):
      print(f'    {what:14}  {value}')
    if estimates[-1].weak_scaling:
      print('\n' + tables.weak_scaling(estimates[-1]))
    if options.search:
      limit = topology.memory_limit(devices[0])
      largest = list(search_lib.search(config, phase, mesh, limit))
      found.append([x._asdict() for x in largest])
      print('\n' + tables.largest(largest))
  return estimates, found


def plan(config: ConfigDict, options: Options, given: Mapping[str, Any] = {}):
  """Compiles a run's steps for each slice and prints what it would take.

  Args:
    config: of the run.
    options: what is asked for.
    given: the fields of the command line, with the values of the config file.

  Raises:
    UserError: an unknown slice, or one that the config does not fit.
  """
  if options.search and config.task != 'pretrain':
    raise UserError(f'--search is for pretraining; task={config.task}')
  config_lib.fit_phases(config, given)
  config_lib.check(config)
  no_effect.check(config, given)
  if LOCAL not in options.topologies:
    jax.config.update('jax_platforms', 'cpu')  # nothing runs, and nothing is taken from a run
  found = {name: _plan(config, name, options) for name in options.topologies}
  if len(found) > 1:
    print('\n' + tables.compared({name: e for name, (e, _) in found.items()}, options.price))
  if options.out:
    content = {name: {'phases': [e.as_json() for e in estimates], 'search': largest}
               for name, (estimates, largest) in found.items()}
    epath.Path(options.out).write_text(json.dumps(content, indent=2) + '\n')
