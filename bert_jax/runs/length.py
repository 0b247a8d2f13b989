"""The length of a run: what the command line gives of it, and what has to follow."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import phases as phases_lib
from bert_jax.data.phases import Phase


def planned_steps(config: ConfigDict, given: Mapping[str, Any]) -> int:
  """`train_steps` of the config file, before `fit`; 0 = its length is another.

  `given` has the fields of the command line, with their values in the config file.
  """
  return given.get('train_steps', config.train_steps)


def fit(config: ConfigDict, given: Mapping[str, Any]) -> list[str]:
  """Fits a config, in place, to the length that the command line gives; returns notes for the user.

  So --config.train_steps alone shortens any config. A given length replaces that of the config
  file, phases scale to it, and the warmup of a shorter run scales too. `given` is that of
  `planned_steps`.

  Raises:
    UserError: malformed phases.
  """
  phases_lib.check(config.phases)
  planned = planned_steps(config, given)
  notes = [*_one_length(config, given), *_fit_rows(config, given)]
  steps, in_phases = config.train_steps, sum(phase[0] for phase in config.phases)
  if in_phases and steps > 0 and steps != in_phases:
    left_out = max(len(config.phases) - steps, 0)
    config.phases = phases_lib.scaled(config.phases, steps)
    notes.append(f'phases of {in_phases:,} steps scaled to {steps:,}'
                 + f', without the {left_out} shortest' * bool(left_out))
  return notes + fit_warmup(config, given, planned, steps)


def _one_length(config: ConfigDict, given: Mapping[str, Any]) -> list[str]:
  """The length on the command line, if there is one, replaces that of the config file."""
  named = [name for name in config_lib.LENGTHS if name in given and config[name] > 0]
  of_file = [name for name in config_lib.LENGTHS if name not in given and config[name] > 0]
  if named:  # two of them are refused later
    notes = [f'{named[0]}={config[named[0]]:,} instead of {name}={config[name]:,}'
             for name in of_file]
    config.update({name: type(config[name])() for name in of_file})
    return notes
  steps = sum(phase[0] for phase in config.phases)
  if ('phases' not in given or of_file != ['train_steps']
      or steps in (0, config.train_steps)):
    return []
  before, config.train_steps = config.train_steps, steps
  return [f'train_steps={steps:,}, the steps of phases, instead of {before:,}']


def _fit_rows(config: ConfigDict, given: Mapping[str, Any]) -> list[str]:
  """A given max_len or batch_size replaces the one that all phases of the config file share."""
  notes = []
  for name in ('max_len', 'batch_size') if 'phases' not in given else ():
    place = Phase._fields.index(name)
    before = {phase[place] for phase in config.phases}
    if name in given and len(before) == 1 and before != {config[name]}:
      config.phases = tuple(tuple(Phase(*phase)._replace(**{name: config[name]}))
                            for phase in config.phases)
      notes.append(f'{name}={config[name]:,} instead of {before.pop():,} in all phases')
  return notes


def fit_warmup(config: ConfigDict, given: Mapping[str, Any], planned: int,
               steps: int) -> list[str]:
  """Scales the warmup, in place, of a run of fewer steps than planned; returns notes.

  Args:
    config: of the run.
    given: that of `planned_steps`; a warmup in it stays.
    planned: the steps of the config file; 0 = unknown.
    steps: of the run; 0 = unknown yet.
  """
  warmup = config.optimizer.warmup_steps
  if not warmup or not 0 < steps < planned or 'optimizer.warmup_steps' in given:
    return []
  config.optimizer.warmup_steps = min(round(warmup * steps / planned), steps - 1)
  return [f'warmup of {warmup:,} of {planned:,} steps scaled to '
          f'{config.optimizer.warmup_steps:,} of {steps:,}']
