"""From a config as it was asked for to the config and the job of a run.

Every change of a config stands here, in order: other modules say which fields change, and nothing
changes the frozen config that comes out.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.data import phases as phases_lib
from bert_jax.interop.pretrained import Pretrained
from bert_jax.reporting import profiler, trackers
from bert_jax.runs import finetune, frozen_base, initial, length, no_effect, pretrain, time_budget
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.job import Job


class Asked(NamedTuple):
  """A config that is sound as far as one can see without the devices and the data."""

  config: FrozenConfigDict  # fitted to the given length
  given: Mapping[str, Any]  # the fields of the command line, with their values in the config file
  planned_steps: int  # of the config file; 0 = its length is another
  notes: Sequence[str]  # for the user


def fitted(config: ConfigDict, given: Mapping[str, Any]) -> tuple[FrozenConfigDict, list[str]]:
  """(the config, fitted to the length that the command line gives; notes for the user).

  So --config.train_steps alone shortens any config. A given length replaces the one in the config
  file, phases scale to it, and the warmup of a shorter run scales too.

  Args:
    config: it stays as it is.
    given: the fields of the command line, with their values in the config file.

  Raises:
    UserError: malformed phases.
  """
  phases_lib.check(config.phases)
  planned, notes = given.get('train_steps', config.train_steps), []
  for fit in (length.one_length, length.rows_of_phases, length.steps_of_phases):
    fields, said = fit(config, given)
    config, notes = changed(config, fields), notes + said
  fields, said = length.warmup(config, given, planned, config.train_steps)
  return changed(config, fields), notes + said


def checked(config: ConfigDict, given: Mapping[str, Any]) -> Asked:
  """Checks what needs neither the devices nor the data of a run.

  Args:
    config: it stays as it is.
    given: the fields of the command line, with their values in the config file.

  Raises:
    UserError: a value that no run can have, or a field without an effect.
  """
  planned = given.get('train_steps', config.train_steps)
  config, notes = fitted(config, given)
  config_lib.check(config)
  no_effect.check(config, given)
  if config.train_steps:
    optimizer_lib.check_steps(optimizer_lib.OptimizerConfig(**config.optimizer), config.train_steps)
  profiler.check(config.profile_steps)
  trackers.check(config.trackers, given='trackers' in given)
  return Asked(config, given, planned, notes)


def with_model(config: ConfigDict, mesh: Mesh, run_json: Mapping[str, Any] = {},
               has_started: bool = False) -> tuple[FrozenConfigDict, Pretrained | None]:
  """(the config, complete but for what the data decides; the model that the run starts from).

  Args:
    config: it stays as it is.
    mesh: of the run.
    run_json: of the run before in the workdir; {} = there is none.
    has_started: True if the workdir has a checkpoint. Then the sizes are in `run_json`, and no
      model is loaded.

  Raises:
    UserError: the config needs a model and names none, or does not fit the model or the mesh.
  """
  config = changed(config, config_lib.dtype_on(mesh, config))
  sizes = run_json['config']['model'] if run_json else {}
  config = changed(config, initial.unset_sizes(config, sizes))
  model = initial.load(config) if config.init_from and not has_started else None
  config = changed(config, initial.unset_sizes(config, vars(model.config) if model else {}))
  config = changed(config, initial.unset_pooling(config, run_json, model))
  initial.check_named(config, has_started)
  config_lib.check_sizes(config, mesh)
  return config, model


def _make_job(config: FrozenConfigDict, *, model: Pretrained | None, mesh: Mesh, path: epath.Path,
              workdir: epath.Path, has_started: bool) -> Job:
  """The job of a config; that of a run that `has_started` needs no parameters to start from."""
  kind = pretrain if config.task == 'pretrain' else finetune
  job = kind.make_job(config, model, mesh, workdir)
  if has_started:  # its own checkpoint has the parameters, whatever the teacher has
    job = dataclasses.replace(job, start=None)
  return frozen_base.adapt(job, config, path)


def resolve(asked: Asked, mesh: Mesh, path: epath.Path, workdir: epath.Path,
            run_json: Mapping[str, Any],
            has_started: bool) -> tuple[FrozenConfigDict, Job, list[str]]:
  """(the whole config, the job, notes for the user); all processes do this together.

  The devices, the model and the data complete the config.

  Args:
    asked: the config.
    mesh: of the run.
    path: the folder of the run's checkpoints.
    workdir: the local folder of everything else; the same unless `path` is remote.
    run_json: of the run before in the workdir; {} = there is none.
    has_started: True if the workdir has a checkpoint.

  Raises:
    UserError: a mistake in the config, the model or the data.
  """
  config, model = with_model(asked.config, mesh, run_json, has_started)
  make_job = functools.partial(
      _make_job, model=model, mesh=mesh, path=path, workdir=workdir, has_started=has_started)
  notes = list(asked.notes)
  if config.train_minutes:
    fields, said = time_budget.fixed_steps(config, run_json, make_job, mesh)
    config, notes = changed(config, fields), notes + said

  # The data decides the size of the vocabulary, or the steps of an epoch.
  job = make_job(config)
  config = changed(config, job.fields)
  if not config.train_steps or config.train_minutes:  # the steps are known only now
    fields, said = length.warmup(config, asked.given, asked.planned_steps, job.train_steps)
    config, notes = changed(config, fields), notes + said

  optimizer = optimizer_lib.OptimizerConfig(**config.optimizer)
  optimizer_lib.check_steps(optimizer, job.train_steps)
  no_effect.check(config, asked.given, job)
  return config, job, notes
