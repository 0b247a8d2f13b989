"""Reads examples of sequence classification: texts or pairs with labels or a number."""

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import require, require_choice
from bert_jax.labelled import glue, no_labels, table

PROBLEMS = ('single_label', 'multi_label', 'regression')
_FEW = 32  # with fewer examples than this, all labels may differ
LEFT_OUT = object()  # the label of a row that data.skip_labels leaves out


class TextExample(NamedTuple):
  """A text, or a pair of texts, with its label."""

  where: str  # the file and line, for messages
  text: str
  text_pair: str | None  # None = a single text
  label: Any  # the name of a class; a tuple of names; a number; LEFT_OUT; None = not read


def distinct(field: str, names: Sequence[Any]) -> tuple[str, ...]:
  """Returns the names in a config field; raises UserError for a repeated or empty one."""
  names = tuple(map(str, names))  # files hold strings, a config may hold numbers
  for i, name in enumerate(names):
    require(name and name not in names[:i],
            f'{field}={",".join(names)}: {name!r} is empty or repeated')
  return names


def columns(data: ConfigDict) -> glue.Columns:
  """Returns the columns that the config group `data` names, or its GLUE task."""
  require_choice('data.problem', data.problem, PROBLEMS)
  if data.format.startswith('glue'):
    return glue.find(data.format)
  return glue.Columns(data.text_column, data.text_pair_column, data.label_column,
                      data.problem, distinct('data.labels', data.labels))


def _written(value: Any) -> str:
  """Returns a label in the form that data.labels and data.skip_labels have."""
  return 'null' if value is None else str(value).strip()


def _is_true(row: table.Row, column: str) -> bool:
  """Returns the value of a column of 0 and 1, or of false and true."""
  value = row.or_null(column)
  written = _written(value)
  try:
    number = float({'true': '1', 'false': '0'}.get(written.lower(), written))
  except ValueError:
    number = None
  require(number in (0, 1),
          f'{row.where}: {column!r} is {value!r:.50}, not 0 or 1: write one of them, or '
          f'{no_labels.skipping(written)}')
  return bool(number)


def _several_labels(row: table.Row, c: glue.Columns, skipped: Collection[str]) -> Any:
  names = label_columns(c)
  if len(names) > 1:  # one column of 0 and 1 per label
    if any(_written(row.or_null(name)) in skipped for name in names):
      return LEFT_OUT
    return tuple(name for name in names if _is_true(row, name))
  values = row[c.label]
  require(isinstance(values, list),
          f'{row.where}: {c.label!r} is {values!r:.50}, not a list of labels: for '
          'columns of 0 and 1 give data.label_column=first,second,...')
  require(not any(isinstance(value, list | dict) for value in values),
          f'{row.where}: {c.label!r} is {values!r:.50}, not a list of labels but of '
          'lists')
  labels = tuple(map(_written, values))
  return LEFT_OUT if set(labels) & set(skipped) else labels


def _label(row: table.Row, c: glue.Columns, skipped: Collection[str]) -> Any:
  if c.problem == 'regression':
    number, (least, most) = row.number(c.label), c.bounds
    require(least <= number <= most,
            f'{row.where}: {c.label!r} is {number:g}, which is not in '
            f'[{least:g}, {most:g}]: fix it, or leave the line out')
    return number
  if c.problem == 'multi_label':
    return _several_labels(row, c, skipped)
  value = row.or_null(c.label)
  require(not isinstance(value, list | dict),
          f'{row.where}: {c.label!r} is {value!r:.50}, not one label: several are for '
          'data.problem=multi_label')
  value = _written(value)
  # Skipped values come first, because skip_labels is the remedy for empty labels.
  if value in skipped:
    return LEFT_OUT
  require(value, f'{row.where}: {c.label!r} is empty: {no_labels.skipping(value)}')
  return c.labels[c.written.index(value)] if value in c.written else value


def label_columns(c: glue.Columns) -> tuple[str, ...]:
  """Returns the label columns of a multi-label table; a single column holds lists."""
  names = tuple(c.label.split(','))
  return distinct('data.label_column', names) if len(names) > 1 else names


def read(source: str, data_format: str, c: glue.Columns, split: str,
         labelled: bool = True, skipped: Collection[str] = (),
         notes: list[str] | None = None) -> Iterator[TextExample]:
  """Yields the examples of a file or of tfds:NAME.

  Args:
    source: the file, or tfds:NAME.
    data_format: one of `table.FORMATS`, or a GLUE task.
    c: the columns.
    split: train, validation or test.
    labelled: False = the labels are not read.
    skipped: values of label columns; a row with one of them gets the label LEFT_OUT.
    notes: gets a note about short lines of a GLUE file, which are left out.

  Raises:
    UserError: a column is missing or unsuitable.
  """
  if data_format.startswith('glue'):
    rows = glue.read(source, glue.find(data_format), split, notes)
  else:
    require_choice('data.format', data_format, (*table.FORMATS, 'glue/TASK'))
    rows = table.read(source, data_format, split)
  for row in rows:
    pair = row.text(c.text_pair) if c.text_pair else None
    yield TextExample(row.where, row.text(c.text), pair,
                      _label(row, c, skipped) if labelled else None)


def check_labels(examples: Sequence[TextExample], c: glue.Columns) -> list[str]:
  """Returns notes about doubtful labels of the training file.

  Labels that the user names in data.labels are not checked.

  Raises:
    UserError: a value is probably not a label, no example has a label, or every example
      has a different one.
  """
  if c.problem == 'regression' or c.labels or (
      c.problem == 'multi_label' and len(label_columns(c)) > 1):
    return []
  firsts, counts = {}, collections.Counter()
  for e in examples:
    for label in e.label if c.problem == 'multi_label' else (e.label,):
      firsts.setdefault(label, e)
      counts[label] += 1
  # Each label is checked once, at the first line that has it.
  places = {label: e.where for label, e in firsts.items()}
  no_labels.check(places, {
      label: no_labels.reason_in_row(e.text, label, counts, (c.text, c.label))
      for label, e in firsts.items()})
  require(places, f'{examples[0].where} and all other rows have no label: is '
                  f'data.label_column={c.label} right?')
  # If every label differs, the column probably holds ids or texts, not labels.
  require(c.problem == 'multi_label' or len(places) < max(len(examples), _FEW),
          f'each of the {len(examples):,} rows has a different label, such as '
          f'{next(iter(places))!r:.50}: is data.label_column={c.label} right? If it is, '
          'name every label in data.labels')
  return no_labels.doubtful(places, counts)


def are_scores(labels: Iterable[Any]) -> bool:
  """Returns True if all names of labels are numbers, and some are not integers."""
  try:
    return not all(float(name).is_integer() for name in labels)
  except (ValueError, OverflowError):
    return False


def label_names(examples: Iterable[TextExample], c: glue.Columns) -> tuple[str, ...]:
  """Returns the label names: from `c` if it has them, else from the examples, sorted."""
  if c.problem == 'regression':
    return ('value',)
  if c.labels:
    return c.labels
  has_several = c.problem == 'multi_label'
  if has_several and len(label_columns(c)) > 1:
    return label_columns(c)
  labels = {label for e in examples for label in (e.label if has_several else [e.label])}
  # Sorts numbers by value, so that 10 comes after 9.
  try:
    return tuple(sorted(labels, key=lambda name: (int(name), name)))
  except ValueError:
    return tuple(sorted(labels))
