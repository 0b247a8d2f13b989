"""Changes of the config between a run and the run that goes on with it.

Only the fields that are named here may change: a new field is refused until it is named.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple

from flax import traverse_util

from bert_jax.errors import UserError

# Fields and groups that change the output of a run, its devices or its rounding.
_HARMLESS = ('log_every', 'eval_every', 'eval_batches', 'checkpoint_every', 'keep_checkpoints',
             'keep_every', 'keep_best', 'profile_steps', 'log_batch_digest', 'platform', 'mesh',
             'sharding', 'init_from', 'allow_schedule_change', 'model.dtype', 'model.attention',
             'model.remat', 'model.scan_unroll', 'optimizer.accumulation', 'data.loader_workers')
# Fields that say where examples are and how to read them: a digest of the rows shows a change.
_READING = tuple(f'data.{name}' for name in (
    'source', 'vocab', 'format', 'language', 'lines_are_sentences', 'tokenizer', 'lowercase',
    'train', 'text_column', 'text_pair_column', 'label_column', 'choices_column', 'skip_labels',
    'doc_stride'))
# Fields of evaluations and predictions alone.
_SCORING = tuple(f'data.{name}' for name in (
    'heldout', 'eval', 'eval_columns', 'test', 'n_best', 'max_answer_len', 'null_threshold'))
# Fields that change every later step.
_SCHEDULE = ('train_steps', 'train_epochs', 'phases', 'batch_size', 'max_len', 'optimizer')


class Change(NamedTuple):
  """A field, its value in the run and its value now."""

  name: str
  before: Any
  now: Any

  def __str__(self) -> str:
    return f'{self.name}={self.before} (now {self.now})'

  def is_in(self, names: Sequence[str]) -> bool:
    """True if these fields and groups have the field."""
    return any(self.name == name or self.name.startswith(name + '.') for name in names)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
  """The fields of both configs that differ; as JSON has them, so that a tuple equals a list."""
  old = traverse_util.flatten_dict(before, sep='.')
  new = traverse_util.flatten_dict(json.loads(json.dumps(now)), sep='.')
  return [Change(name, value, new[name]) for name, value in old.items()
          if name in new and new[name] != value]


def check(workdir: str, differences: Sequence[Change], fed_by: Sequence[str],
          allow_schedule_change: bool) -> list[Change]:
  """The changes that a resumed run may have; the fields `fed_by` decide which rows a step sees.

  Raises:
    UserError: it would be another run, or has another schedule without `allow_schedule_change`.
  """
  harmless, schedule, others = [], [], []
  for change in differences:
    if change.name in fed_by:
      others.append(change)
    elif change.is_in(_HARMLESS + _READING + _SCORING):
      harmless.append(change)
    else:
      (schedule if change.is_in(_SCHEDULE) else others).append(change)
  if others:
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, others))}: that is another '
                    'run, use another --workdir')
  if schedule and not allow_schedule_change:
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, schedule))}: every later '
                    'learning rate or row changes with it; use another --workdir, or go on with '
                    '--config.allow_schedule_change=True')
  return harmless + schedule
