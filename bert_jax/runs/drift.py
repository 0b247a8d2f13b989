"""What differs between the config of a run and the one that it is resumed with, and what it does.

Only the fields that are named here may change: one that a task gains is refused until it is named.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any
from typing import NamedTuple

from bert_jax.errors import UserError

# Fields and groups that change what is seen of a run, where it is computed, and with what rounding.
_HARMLESS = ('log_every', 'eval_every', 'eval_batches', 'checkpoint_every', 'keep_checkpoints',
             'keep_every', 'keep_best', 'profile_steps', 'log_batch_digest', 'platform', 'mesh',
             'sharding', 'init_from', 'allow_schedule_change', 'model.dtype', 'model.attention',
             'model.remat', 'model.scan_unroll', 'optimizer.accumulation', 'data.loader_workers')
# Fields that say where examples stand and how they are read: a digest of the rows tells a change.
_READING = tuple(f'data.{name}' for name in (
    'source', 'vocab', 'format', 'language', 'lines_are_sentences', 'tokenizer', 'lowercase',
    'train', 'text_column', 'text_pair_column', 'label_column', 'choices_column', 'skip_labels',
    'doc_stride'))
# Those of evaluations and predictions alone.
_SCORING = tuple(f'data.{name}' for name in (
    'heldout', 'eval', 'eval_columns', 'test', 'n_best', 'max_answer_len', 'null_threshold'))
# Those that decide what every later step does.
_SCHEDULE = ('train_steps', 'train_epochs', 'phases', 'batch_size', 'max_len', 'optimizer')


class Change(NamedTuple):
  """A field, its value in the run and its value now."""

  name: str
  before: Any
  now: Any

  def __str__(self) -> str:
    return f'{self.name}={self.before} (now {self.now})'


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  found = {}
  for name, value in config.items():
    found |= (_flat(value, f'{prefix}{name}.') if isinstance(value, Mapping)
              else {prefix + name: value})
  return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
  """The fields of both configs that differ; as JSON has them, so that a tuple equals a list."""
  old, new = _flat(before), _flat(json.loads(json.dumps(now)))
  return [Change(name, value, new[name]) for name, value in old.items()
          if name in new and new[name] != value]


def _within(change: Change, names: Sequence[str]) -> bool:
  return any(change.name == name or change.name.startswith(name + '.') for name in names)


def check(workdir: str, found: Sequence[Change], fed_by: Sequence[str],
          allow_schedule_change: bool) -> list[Change]:
  """The changes that a resumed run may have.

  Args:
    workdir: of the run, for people.
    found: what differs.
    fed_by: fields that decide which rows a step sees.
    allow_schedule_change: whether the schedule may be another from here on.

  Raises:
    UserError: it would be another run, or another schedule that was not asked for.
  """
  harmless = [c for c in found
              if _within(c, _HARMLESS + _READING + _SCORING) and c.name not in fed_by]
  schedule = [c for c in found
              if c not in harmless and _within(c, _SCHEDULE) and c.name not in fed_by]
  others = [c for c in found if c not in harmless and c not in schedule]
  if others:
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, others))}: that is another '
                    'run, use another --workdir')
  if schedule and not allow_schedule_change:
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, schedule))}: every later '
                    'learning rate or row changes with it; use another --workdir, or go on with '
                    '--config.allow_schedule_change=True')
  return harmless + schedule
