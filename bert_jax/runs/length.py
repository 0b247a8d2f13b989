"""The length of a run from the command line, and the fields that must change with it.

Each function returns the changed fields, by full name, and notes for the user. Its
argument `given` has the fields of the command line, with their values in the config file.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import phases as phases_lib
from bert_jax.data.phases import Phase

Resolved = tuple[dict[str, Any], list[str]]  # ({full name: value}, notes for the user)


def one_length(config: ConfigDict, given: Mapping[str, Any]) -> Resolved:
  """Replaces the length in the config file with the length on the command line."""
  typed = [name for name in config_lib.LENGTHS if name in given and config[name] > 0]
  of_file = [name for name in config_lib.LENGTHS
             if name not in given and config[name] > 0]
  # A later check refuses two lengths on the command line.
  if typed:
    return {name: type(config[name])() for name in of_file}, [
        f'{typed[0]}={config[typed[0]]:,} instead of {name}={config[name]:,}'
        for name in of_file]
  # New phases define the steps. Otherwise they would be scaled to the file's train_steps.
  steps = sum(phase[0] for phase in config.phases)
  if ('phases' not in given or of_file != ['train_steps']
      or steps in (0, config.train_steps)):
    return {}, []
  return {'train_steps': steps}, [
      f'train_steps={steps:,}, the steps of phases, instead of {config.train_steps:,}']


def rows_of_phases(config: ConfigDict, given: Mapping[str, Any]) -> Resolved:
  """Replaces the max_len or batch_size that all phases of the config file share."""
  phases, notes = config.phases, []
  for name in ('max_len', 'batch_size') if 'phases' not in given else ():
    before = {getattr(Phase(*phase), name) for phase in phases}
    if name in given and len(before) == 1 and before != {config[name]}:
      phases = tuple(
          tuple(Phase(*phase)._replace(**{name: config[name]})) for phase in phases)
      notes.append(f'{name}={config[name]:,} instead of {before.pop():,} in all phases')
  return {'phases': phases}, notes


def steps_of_phases(config: ConfigDict, _: Mapping[str, Any]) -> Resolved:
  """Scales the phases to the steps of the run."""
  steps, in_phases = config.train_steps, sum(phase[0] for phase in config.phases)
  if not in_phases or steps <= 0 or steps == in_phases:
    return {}, []
  left_out = max(len(config.phases) - steps, 0)
  return {'phases': phases_lib.scaled(config.phases, steps)}, [
      f'phases of {in_phases:,} steps scaled to {steps:,}'
      + f', without the {left_out} shortest' * bool(left_out)]


def warmup(config: ConfigDict, given: Mapping[str, Any], planned: int,
           steps: int) -> Resolved:
  """Scales the warmup of a run with fewer steps than planned, unless it is given.

  Args:
    config: the config of the run.
    given: the fields of the command line.
    planned: the steps in the config file; 0 = unknown.
    steps: the steps of the run; 0 = not yet known.
  """
  before = config.optimizer.warmup_steps
  # A longer run keeps its warmup: it stabilizes the first steps, however many follow.
  if not before or not 0 < steps < planned or 'optimizer.warmup_steps' in given:
    return {}, []
  after = min(round(before * steps / planned), steps - 1)
  return {'optimizer.warmup_steps': after}, [
      f'warmup of {before:,} of {planned:,} steps scaled to {after:,} of {steps:,}']
