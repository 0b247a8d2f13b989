"""Changes of the config between a run and its continuation.

`on_resume` in the table of the fields says which fields may change; by default a field
may not. A field that the older run does not have counts as unchanged.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple

from flax import traverse_util

from bert_jax.config_fields import ANOTHER_RUN, HARMLESS, SCHEDULE, Field, Table
from bert_jax.errors import UserError, require

# Fields that have another name in older runs.
_MOVED = {f'model.{name}': name
          for name in ('add_tokens', 'embedding_init', 'reinit_layers')}


class Change(NamedTuple):
  """A field, its value in the run and its value now."""

  name: str
  before: Any
  now: Any

  def __str__(self) -> str:
    return f'{self.name}={self.before} (now {self.now})'


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
  """The fields whose values in two configs differ."""
  # JSON turned the tuples of `before` into lists, so `now` takes the same path.
  old = traverse_util.flatten_dict(before, sep='.')
  new = traverse_util.flatten_dict(json.loads(json.dumps(now)), sep='.')
  old = {_MOVED.get(name, name): value for name, value in old.items()}
  return [Change(name, value, new[name]) for name, value in old.items()
          if name in new and new[name] != value]


def _remedy(schedule: Sequence[Change]) -> str:
  """The flags that restore the schedule of a run."""
  values = {x.name: x.before for x in schedule}
  if values.get('train_minutes'):
    values.pop('train_steps', None)  # train_minutes is the length; the steps follow from it
  if 'phases' in values:
    values['phases'] = f"'{tuple(map(tuple, values['phases']))}'"
  return ' '.join(f'--config.{name}={value}' for name, value in values.items())


def check(workdir: str, differences: Sequence[Change], table: Table,
          allow_schedule_change: bool) -> list[Change]:
  """Returns the changes that a resumed run may have.

  Raises:
    UserError: a change makes it another run, or changes the schedule without
      `allow_schedule_change`.
  """
  harmless, schedule, others = ([
      x for x in differences if table.get(x.name, Field(None)).on_resume == rule]
      for rule in (HARMLESS, SCHEDULE, ANOTHER_RUN))
  require(not others,
          f'{workdir} holds a run with {", ".join(map(str, others))}: that is another '
          'run, use another --workdir')
  if schedule and not allow_schedule_change:
    raise UserError(
        f'{workdir} holds a run with {", ".join(map(str, schedule))}: every later '
        f'learning rate or row changes with it; give {_remedy(schedule)} to continue as '
        'before, use another --workdir, or continue with '
        '--config.allow_schedule_change=True')
  return harmless + schedule
