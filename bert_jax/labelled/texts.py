"""Texts and pairs with a label, labels or a number: examples of sequence classification."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import require, require_choice
from bert_jax.labelled import glue, table
from bert_jax.labelled.glue import Columns
from bert_jax.labelled.table import Row

PROBLEMS = ('single_label', 'multi_label', 'regression')


class TextExample(NamedTuple):
  """A text, or a pair of texts."""

  where: str  # for messages
  text: str
  text_pair: str | None
  label: Any  # a class's name; a tuple of names; a number; None = not read


def given_labels(labels: Sequence[Any]) -> tuple[str, ...]:
  """The names in data.labels, numbers too as strings, as files have them; each once."""
  names = tuple(map(str, labels))
  for i, name in enumerate(names):
    require(name and name not in names[:i],
            f'data.labels={",".join(names)}: {name!r} is empty or stands there twice')
  return names


def columns(data: ConfigDict) -> Columns:
  """The columns of the config group `data`, or of the GLUE task that data.format names."""
  require_choice('data.problem', data.problem, PROBLEMS)
  if data.format.startswith('glue'):
    return glue.find(data.format)
  return Columns(data.text_column, data.text_pair_column, data.label_column, data.problem,
                 given_labels(data.labels))


def _label(row: Row, c: Columns) -> Any:
  if c.problem == 'regression':
    return row.number(c.label)
  if c.problem == 'multi_label':
    names = c.label.split(',')
    if len(names) > 1:  # a column of 0 or 1 for each
      return tuple(name for name in names if row.number(name))
    value = row[c.label]
    require(isinstance(value, list), f'{row.where}: {c.label!r} is {value!r}, not a list of '
            'labels: for columns of 0 and 1 give data.label_column=first,second,...')
    return tuple(map(str, value))
  require(not isinstance(row[c.label], list | dict), f'{row.where}: {c.label!r} is '
          f'{row[c.label]!r:.50}, not one label: several are for data.problem=multi_label')
  value = str(row[c.label])
  require(value, f'{row.where}: {c.label!r} is empty')
  return c.labels[c.written.index(value)] if value in c.written else value


def read(source: str, data_format: str, c: Columns, split: str,
         labelled: bool = True) -> Iterator[TextExample]:
  """The examples of a file or of tfds:NAME; raises UserError for an unsuitable column.

  Args:
    data_format: one of `table.FORMATS`, or a GLUE task.
    split: train, validation or test.
    labelled: False = the labels are not read.
  """
  if data_format.startswith('glue'):
    rows = glue.read(source, glue.find(data_format), split)
  else:
    require_choice('data.format', data_format, (*table.FORMATS, 'glue/TASK'))
    rows = table.read(source, data_format, split)
  for row in rows:
    pair = row.text(c.text_pair) if c.text_pair else None
    yield TextExample(row.where, row.text(c.text), pair, _label(row, c) if labelled else None)


def are_scores(labels: Iterable[Any]) -> bool:
  """True if the names of labels are all numbers, and not all of them whole ones."""
  try:
    return not all(float(name).is_integer() for name in labels)
  except (ValueError, OverflowError):
    return False


def label_names(examples: Iterable[TextExample], c: Columns) -> tuple[str, ...]:
  """The names of the labels: those known beforehand, or all that the examples have, in order."""
  if c.problem == 'regression':
    return ('value',)
  if c.labels:
    return c.labels
  has_several = c.problem == 'multi_label'
  if has_several and ',' in c.label:
    return tuple(c.label.split(','))
  labels = {label for e in examples for label in (e.label if has_several else [e.label])}
  try:
    return tuple(sorted(labels, key=lambda name: (int(name), name)))
  except ValueError:
    return tuple(sorted(labels))
