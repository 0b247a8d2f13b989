"""A field of a config and its rules, which stand with it in a table {full name: Field}.

`bert_jax/fields/` has the tables of all runs, `config_fields` of a task its own.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from bert_jax.errors import require, require_choice

# What a resumed run may change.
ANOTHER_RUN = 'another run'  # no: it would be another run
SCHEDULE = 'schedule'  # with allow_schedule_change: every later step changes
HARMLESS = 'harmless'  # yes: devices, rounding, what a run writes, where its examples are


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a config: its default and its rules. A comment at its entry says what it is.

  Attributes:
    default: the value, whose type is the field's.
    check: raises UserError for a value that no run can have; of the field's name and value.
    on_resume: what a resumed run may change.
    unused: functions of the config that say why a given value has no effect; '' = it has one.
    unused_by_data: the same, of the config and the job of a run.
  """

  default: Any
  check: Callable[[str, Any], None] = lambda name, value: None
  on_resume: str = ANOTHER_RUN
  unused: Collection[Callable[[Any], str]] = ()
  unused_by_data: Collection[Callable[[Any, Any], str]] = ()


Table = Mapping[str, Field]


def with_values(table: Table, values: Mapping[str, Any]) -> Table:
  """The table with other fields: a new Field, another default, or None, which leaves it out."""
  fields = {name: value if isinstance(value, Field) else
            dataclasses.replace(table[name], default=value)
            for name, value in values.items() if value is not None}
  kept = {name: field for name, field in table.items() if values.get(name, field) is not None}
  return {**kept, **fields}


def group(name: str, values: Any, rules: Mapping[str, Field] = {},
          on_resume: str = ANOTHER_RUN) -> Table:
  """The table of a group whose defaults, comments and checks stand in a dataclass.

  Args:
    name: of the group.
    values: an instance of the dataclass.
    rules: of fields that a resumed run may change, or that some runs do not use.
    on_resume: the rule of the other fields.
  """
  default = Field(None, on_resume=on_resume)
  return {f'{name}.{field}': dataclasses.replace(rules.get(field, default), default=value)
          for field, value in dataclasses.asdict(values).items()}


def at_least(least: int) -> Callable[[str, Any], None]:
  """The check of a number with a lower bound."""
  rule = f'must be at least {least}' if least else 'must not be negative'

  def check(name: str, value: float):
    require(value >= least, f'{name}={value} {rule}')

  return check


def one_of(choices: Collection[str]) -> Callable[[str, Any], None]:
  """The check of a name."""
  return lambda name, value: require_choice(name, value, choices)


def changed(config: ConfigDict, fields: Mapping[str, Any]) -> FrozenConfigDict:
  """A frozen copy of a config, or of a group of it, with other values of some fields.

  Args:
    config: it stays as it is.
    fields: the values by full name: optimizer.learning_rate. A missing field is added.
  """
  copy = ConfigDict(config).copy_and_resolve_references()
  with copy.unlocked():
    copy.update_from_flattened_dict(fields)
  return FrozenConfigDict(copy)
