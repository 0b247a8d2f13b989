"""Rejects fields of the command line that have no effect in a run, and says why.

A config file may have fields without effect, because it serves many runs. `unused` and
`unused_by_data` in the table of the fields say when a field has no effect.
"""

from collections.abc import Collection
import dataclasses

from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.config_fields import Field
from bert_jax.errors import UserError, require
from bert_jax.model import architectures
from bert_jax.training.job import Job


def _reason(field: Field, config: ConfigDict, job: Job | None) -> str:
  """The reason why a field has no effect; '' = it has one."""
  rules = field.unused_by_data if job else field.unused
  try:
    return next(filter(None, (
        rule(config, job) if job else rule(config) for rule in rules)), '')
  except UserError:  # an unreadable file: its reader reports it later
    return ''


def check(config: ConfigDict, given: Collection[str], job: Job | None = None):
  """Raises UserError for a field in `given` that has no effect.

  With a job this applies the rules that depend on the data; without one, the others.
  """
  architecture, table = config.model.architecture, config_lib.fields(config.task)
  # The group `model` may have fields that only another architecture uses.
  if architecture in architectures.ALL and not job:
    known = {f.name for f in dataclasses.fields(architectures.ALL[architecture].config)}
    for name in given:
      require(not name.startswith('model.') or name.partition('.')[2] in known,
              f'--config.{name} has no effect here: model.architecture={architecture} '
              'has no such field')
  for name in given:
    reason = _reason(table[name], config, job) if name in table else ''
    require(not reason, f'--config.{name} has no effect here: {reason}')
