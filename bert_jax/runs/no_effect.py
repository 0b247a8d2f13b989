"""Fields of the command line that have no effect in a run: each is refused, with its reason.

A default without effect is fine: a config file serves many runs. The table of the fields says when
a field has no effect (`unused`, `unused_by_data`).
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
  """Why the field has no effect; '' = it has one."""
  reasons = field.unused_by_data if job else field.unused
  try:
    return next(filter(None, (why(config, job) if job else why(config) for why in reasons)), '')
  except UserError:  # a file that cannot be read: its reader says so
    return ''


def check(config: ConfigDict, given: Collection[str], job: Job | None = None):
  """Raises UserError for a field on the command line that has no effect; `given` names them.

  With a job it applies the rules that depend on the data, without one the others.
  """
  architecture, table = config.model.architecture, config_lib.fields(config.task)
  if architecture in architectures.ALL and not job:
    known = {f.name for f in dataclasses.fields(architectures.ALL[architecture].config)}
    for name in given:
      require(not name.startswith('model.') or name.partition('.')[2] in known,
              f'--config.{name} has no effect here: model.architecture={architecture} has no such '
              'field')
  for name in given:
    reason = _reason(table[name], config, job) if name in table else ''
    require(not reason, f'--config.{name} has no effect here: {reason}')
