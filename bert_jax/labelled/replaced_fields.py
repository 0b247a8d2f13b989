"""Fields of the config group `data` that some files need otherwise, such as names of columns."""

from collections.abc import Sequence

from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax import config_fields
from bert_jax.errors import require, require_choice


def replace(data: ConfigDict, fields: Sequence[str], flag: str) -> FrozenConfigDict:
  """A copy of `data` with other values of some fields that are strings.

  Args:
    data: the config group.
    fields: 'text_column=sentence', 'format=tsv'.
    flag: the name of the flag that has the fields, for messages.

  Raises:
    UserError: a field that `data` lacks or that is no string, or no '='.
  """
  known = [name for name in data if isinstance(data[name], str) and name not in ('train', 'eval',
                                                                                'test')]
  values = {}
  for field in fields:
    name, equals, value = str(field).partition('=')
    require(bool(equals), f'{flag}={",".join(map(str, fields))} must be FIELD=VALUE,...: '
                          'text_column=sentence')
    require_choice(f'the field in {flag}', name, known)
    values[name] = value
  return config_fields.changed(data, values)
