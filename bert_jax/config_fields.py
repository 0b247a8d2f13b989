"""Defines a field of a config: its default and its rules, in a table {full name: Field}.

`bert_jax/fields/` has the tables of all runs; `config_fields` of a task adds its own.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax.errors import require, require_choice

# May a resumed run change a field?
ANOTHER_RUN = 'another run'  # no: that would be another run
SCHEDULE = 'schedule'  # only with allow_schedule_change: every later step changes
HARMLESS = 'harmless'  # yes: devices, rounding, outputs, paths of the data


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a config: its default and its rules. A comment at its entry explains it.

  Attributes:
    default: the default value; it determines the type.
    check: called with the name and the value; raises UserError for an invalid value.
    on_resume: whether a resumed run may change the field.
    unused: functions of the config. Each returns why the value has no effect; '' = it has
      an effect.
    unused_by_data: the same, as functions of the config and the job of a run.
  """

  default: Any
  check: Callable[[str, Any], None] = lambda name, value: None
  on_resume: str = ANOTHER_RUN
  unused: Collection[Callable[[Any], str]] = ()
  unused_by_data: Collection[Callable[[Any, Any], str]] = ()


Table = Mapping[str, Field]


def with_values(table: Table, values: Mapping[str, Any]) -> Table:
  """A table with some entries changed: a new Field, a new default, or None to drop it."""
  fields = {name: value if isinstance(value, Field) else
            dataclasses.replace(table[name], default=value)
            for name, value in values.items() if value is not None}
  kept = {name: field for name, field in table.items()
          if values.get(name, field) is not None}
  return {**kept, **fields}


def group(name: str, values: Any, rules: Mapping[str, Field] = {},
          on_resume: str = ANOTHER_RUN) -> Table:
  """The table of a group whose defaults, comments and checks are in a dataclass.

  Args:
    name: the name of the group.
    values: an instance of the dataclass.
    rules: {field: its rules} for fields that a resumed run may change, or that some runs
      do not use.
    on_resume: the rule of all other fields.
  """
  default = Field(None, on_resume=on_resume)
  return {f'{name}.{field}': dataclasses.replace(rules.get(field, default), default=value)
          for field, value in dataclasses.asdict(values).items()}


def at_least(least: int) -> Callable[[str, Any], None]:
  """A check that a number is at least `least`."""
  rule = f'must be at least {least}' if least else 'must not be negative'

  def check(name: str, value: float):
    require(value >= least, f'{name}={value} {rule}')

  return check


def one_of(choices: Collection[str]) -> Callable[[str, Any], None]:
  """A check that a name is one of `choices`."""
  return lambda name, value: require_choice(name, value, choices)


def changed(config: ConfigDict, fields: Mapping[str, Any]) -> FrozenConfigDict:
  """A frozen copy of a config, or of one of its groups, with new values of some fields.

  Args:
    config: the config, which is not modified.
    fields: {full name: value}, such as optimizer.learning_rate. A new name adds a field.
  """
  copy = ConfigDict(config).copy_and_resolve_references()
  with copy.unlocked():
    copy.update_from_flattened_dict(fields)
  return FrozenConfigDict(copy)
