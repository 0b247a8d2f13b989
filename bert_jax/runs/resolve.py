"""Resolves a requested config into the config and the job of a run.

All changes of a config happen here, in order. Other modules return the fields that
change, and nothing changes the resulting frozen config.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.data import phases as phases_lib
from bert_jax.errors import require
from bert_jax.fields import run_fields
from bert_jax.interop.pretrained import Pretrained
from bert_jax.reporting import profiler, trackers
from bert_jax.runs import (
  finetune,
  frozen_base,
  initial,
  length,
  model_fields,
  pretrain,
  time_budget,
  unrolling,
)
from bert_jax.runtime import platforms, storage
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.job import Job


class Asked(NamedTuple):
  """A requested config that passed the checks that need neither devices nor data."""

  config: FrozenConfigDict  # fitted to the length on the command line
  given: Mapping[str, Any]  # fields of the command line, with their config file values
  planned_steps: int  # in the config file; 0 = the file gives epochs or minutes
  notes: Sequence[str]  # for the user


def fitted(config: ConfigDict,
           given: Mapping[str, Any]) -> tuple[FrozenConfigDict, list[str]]:
  """Fits a config to the length on the command line; returns (config, notes for users).

  So --config.train_steps alone shortens any config. The length replaces the length in the
  config file, phases scale to it, and the warmup of a shorter run scales, too.

  Args:
    config: the config, which is not modified.
    given: the fields of the command line, with their values in the config file.

  Raises:
    UserError: malformed phases.
  """
  phases_lib.check(config.phases)
  planned, notes = given.get('train_steps', config.train_steps), []
  # The length comes first, because phases scale to it.
  for fit in (length.one_length, length.rows_of_phases, length.steps_of_phases):
    fields, more = fit(config, given)
    config, notes = changed(config, fields), notes + more
  fields, more = length.warmup(config, given, planned, config.train_steps)
  return changed(config, fields), notes + more


def checked(config: ConfigDict, given: Mapping[str, Any]) -> Asked:
  """Runs all checks that need neither the devices nor the data of a run.

  Args:
    config: the config, which is not modified.
    given: the fields of the command line, with their values in the config file.

  Raises:
    UserError: an invalid value, or a field without an effect.
  """
  config_lib.check_names(config)  # first: the next lines read the fields
  unset = next((name for name, value in config_lib.flat(config).items()
                if value is None and not name.startswith('model.')), '')
  require(not unset, f'{unset} is None: give a value; 0, an empty text or () turns it off')
  planned = given.get('train_steps', config.train_steps)
  config, notes = fitted(config, given)
  config_lib.check(config, given)
  if config.train_steps:
    optimizer_lib.check_steps(optimizer_lib.OptimizerConfig(**config.optimizer),
                              config.train_steps)
  profiler.check(config.profile_steps)
  trackers.check(config.trackers, given='trackers' in given)
  return Asked(config, given, planned, notes)


def with_model(config: ConfigDict, mesh: Mesh, earlier: Mapping[str, Any] = {},
               has_started: bool = False) -> tuple[FrozenConfigDict, Pretrained | None]:
  """Completes a config, except for fields that depend on the data.

  Args:
    config: the config, which is not modified.
    mesh: the devices of the run.
    earlier: the config of an earlier run in the workdir; {} = no such run.
    has_started: True if the workdir has a checkpoint. Then the sizes come from
      `earlier`, and no model is loaded.

  Returns:
    (config, the model that the run starts from; None if it loads no model).

  Raises:
    UserError: the config needs a model but names none, or does not fit the model or the
      mesh.
  """
  # Without a checkpoint the run starts over, perhaps from another model.
  earlier = earlier if has_started else {}
  config = changed(config, config_lib.dtype_on(config, mesh))
  config = changed(config, model_fields.sizes_if_unset(config, earlier.get('model', {})))
  model = initial.load(config) if config.init_from and not has_started else None
  config = changed(
      config, model_fields.sizes_if_unset(config, vars(model.config) if model else {}))
  config = changed(config, model_fields.layout_if_unset(config, earlier, model))
  model_fields.check_named(config, has_started)
  config_lib.check_sizes(config, mesh)
  return config, model


def resolve(asked: Asked, mesh: Mesh, workdir: storage.Folder, earlier: Mapping[str, Any],
            has_started: bool) -> tuple[FrozenConfigDict, Job, list[str]]:
  """Completes a config with the devices, the model and the data.

  All processes call this together.

  Args:
    asked: the requested config.
    mesh: the devices of the run.
    workdir: of the run.
    earlier: the config of an earlier run in the workdir; {} = no such run.
    has_started: True if the workdir has a checkpoint.

  Returns:
    (the complete config, the job, notes for the user).

  Raises:
    UserError: a mistake in the config, the model or the data.
  """
  config, model = with_model(asked.config, mesh, earlier, has_started)
  kind = pretrain if config.task == 'pretrain' else finetune

  def make_job(config: FrozenConfigDict) -> Job:
    job = kind.make_job(config, model, mesh, workdir.local)
    # A resumed run takes its parameters from its checkpoint, not from the teacher.
    if has_started:
      job = dataclasses.replace(job, start=None)
    return frozen_base.with_lora(job, config, workdir.path)

  notes = list(asked.notes)
  if config.train_minutes:
    config = changed(config, unrolling.fields(config, mesh, 60 * config.train_minutes))
    fields, more = time_budget.fixed_steps(config, earlier, make_job, mesh)
    config, notes = changed(config, fields), notes + more

  # The data determines the size of the vocabulary, or the steps of an epoch.
  job = make_job(config)
  config = changed(config, job.fields)
  # The number of steps decides whether a GPU unrolls the layers.
  fields, job = unrolling.of_job(config, job, mesh)
  config = changed(config, fields)
  # With epochs or minutes the number of steps is known only now.
  if not config.train_steps or config.train_minutes:
    fields, more = length.warmup(config, asked.given, asked.planned_steps,
                                 job.train_steps)
    config, notes = changed(config, fields), notes + more

  capability = platforms.compute_capability()
  if asked.config.model.dtype == 'auto' and capability < platforms.OF_BFLOAT16:
    notes.append('model.dtype=auto is float32: a GPU of compute capability '
                 f'{capability} does not multiply bfloat16')
  optimizer_lib.check_steps(optimizer_lib.OptimizerConfig(**config.optimizer),
                            job.train_steps)
  run_fields.check_kept(config)  # again, because fine-tuning saves every epoch by default
  config_lib.check_effects(config, asked.given, job)
  return config, job, notes
