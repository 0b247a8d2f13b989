"""Changes of the config between a run and the run that goes on with it.

Only the fields that are named here may change: a new field is refused until it is named. A field
that the older run does not have counts as unchanged.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple

from flax import traverse_util

from bert_jax.errors import UserError

_HARMLESS = (
    # Fields and groups of what a run writes, of its devices and of its rounding.
    'log_every', 'eval_every', 'eval_batches', 'checkpoint_every', 'keep_checkpoints', 'keep_every',
    'keep_best', 'profile_steps', 'trackers', 'log_batch_digest', 'platform', 'mesh', 'sharding',
    'init_from', 'allow_schedule_change', 'model.dtype', 'model.attention', 'model.remat',
    'model.scan_unroll', 'optimizer.accumulation', 'data.loader_workers',
    # Where examples are and how to read them: a digest of the rows shows a change.
    'data.source', 'data.vocab', 'data.format', 'data.language', 'data.lines_are_sentences',
    'data.tokenizer', 'data.lowercase', 'data.words', 'data.train', 'data.text_column',
    'data.text_pair_column', 'data.label_column', 'data.choices_column', 'data.skip_labels',
    'data.doc_stride',
    # Evaluations and predictions alone.
    'data.heldout', 'data.eval', 'data.eval_columns', 'data.eval_fields', 'data.test',
    'data.n_best', 'data.max_answer_len', 'data.null_threshold')
# Fields that change every later step.
_SCHEDULE = ('train_steps', 'train_epochs', 'train_minutes', 'phases', 'batch_size', 'max_len',
             'optimizer')


# Fields that older runs have under another name.
_MOVED = {f'model.{name}': name for name in ('add_tokens', 'embedding_init', 'reinit_layers')}


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
  old = {_MOVED.get(name, name): value for name, value in old.items()}
  return [Change(name, value, new[name]) for name, value in old.items()
          if name in new and new[name] != value]


def check(workdir: str, differences: Sequence[Change], fed_by: Sequence[str],
          allow_schedule_change: bool) -> list[Change]:
  """The changes that a resumed run may have; the fields `fed_by` decide which rows a step sees.

  Raises:
    UserError: it would be another run, or has another schedule without `allow_schedule_change`.
  """
  harmless = [x for x in differences if x.is_in(_HARMLESS) and x.name not in fed_by]
  schedule = [x for x in differences
              if x.is_in(_SCHEDULE) and x.name not in fed_by and x not in harmless]
  others = [x for x in differences if x not in harmless + schedule]
  if others:
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, others))}: that is another '
                    'run, use another --workdir')
  if schedule and not allow_schedule_change:
    before = ' '.join(f'--config.{x.name}={x.before}' for x in schedule
                      if isinstance(x.before, int | float | str))
    raise UserError(f'{workdir} holds a run with {", ".join(map(str, schedule))}: every later '
                    f'learning rate or row changes with it; give {before or "what it had"} to go '
                    'on as before, use another --workdir, or go on with '
                    '--config.allow_schedule_change=True')
  return harmless + schedule
