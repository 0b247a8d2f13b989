"""Overrides of the config group `data` for a single file, such as its column names."""

from collections.abc import Sequence

from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config_fields
from bert_jax.errors import require, require_choice


def replace(data: ConfigDict, fields: Sequence[str], flag: str) -> FrozenConfigDict:
  """Returns a copy of `data` with some string fields replaced.

  Args:
    data: the config group.
    fields: such as 'text_column=sentence' or 'format=tsv'.
    flag: the name of the flag that gives the fields, for messages.

  Raises:
    UserError: a field is not a string field of `data`, or has no '='.
  """
  # The flag of the command names the file: data.train and data.eval have no effect.
  known = [name for name in data
           if isinstance(data[name], str) and name not in ('train', 'eval', 'test')]
  values = {}
  for field in fields:
    name, equals, value = str(field).partition('=')
    require(bool(equals),
            f'{flag}={",".join(map(str, fields))} must be FIELD=VALUE,...: '
            'text_column=sentence')
    require_choice(f'the field in {flag}', name, known)
    values[name] = value
  return config_fields.changed(data, values)
