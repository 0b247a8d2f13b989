"""A text and endings or answers to choose from: SWAG and its like."""

from collections.abc import Iterator, Sequence
import string
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import table

FORMATS = ('auto', 'jsonl', 'swag', 'commonsenseqa')


class ChoiceExample(NamedTuple):
  """A text and its choices."""

  where: str  # for messages
  text: str
  choices: tuple[str, ...]
  label: int  # the right one, from 0; -1 = not known


def are_choices(value: Any) -> bool:
  """True for a list of at least two strings."""
  return (isinstance(value, list) and len(value) > 1
          and all(isinstance(choice, str) for choice in value))


def _label(row: table.Row, value: Any, choices: int, names: Sequence[str]) -> int:
  """An index, as a number or as a letter, or as one of the `names` that the line has, if any."""
  text = str(value).strip()
  if names:
    require(names.count(text) == 1, f'{row.where}: the label {value!r} is none of the {choices} '
            f'choices: give one of {", ".join(names)}')
    return names.index(text)
  is_letter = len(text) == 1 and text in string.ascii_uppercase
  index = ord(text) - ord('A') if is_letter else (
      int(text) if text.isdecimal() and len(text) < 10 else -1)
  require(0 <= index < choices, f'{row.where}: the label {value!r} is none of the {choices} '
          'choices: give its number from 0, or its letter')
  return index


def _fields(row: table.Row, data: ConfigDict) -> tuple[Any, Any, str, list[str]]:
  """(text, choices, column of the label, the names of the choices in that column)."""
  if data.format == 'swag':
    endings = [row[f'ending{i}'] for i in range(4)]
    return row['sent1'], [f'{row["sent2"]} {ending}' for ending in endings], 'label', []
  if data.format != 'commonsenseqa':
    return row[data.text_column], row[data.choices_column], data.label_column, []
  try:
    choices = row['question.choices']
    names = [str(c['label']).strip() for c in choices if 'label' in c]  # ARC has 1 to 4 too
    return row['question.stem'], [c['text'] for c in choices], 'answerKey', names
  except (KeyError, TypeError) as e:
    raise UserError(f'{row.where}: question.choices is no list of objects with "text"') from e


def read(path: str, data: ConfigDict, labelled: bool = True) -> Iterator[ChoiceExample]:
  """The examples of a file; raises UserError that names a line of another form.

  JSON lines have a text, a list of choices and a label (its number from 0, or its letter); there
  are SWAG's csv and CommonsenseQA's JSON lines too. The config group `data` gives the format and
  the columns. Unless `labelled`, the file need not say which choice is right.
  """
  require_choice('data.format', data.format, FORMATS)
  rows = table.read_separated(path, 'csv') if data.format == 'swag' else table.read_jsonl(path)
  for row in rows:
    text, choices, label, names = _fields(row, data)
    require(isinstance(text, str) and are_choices(choices),
            f'{row.where}: a text and a list of at least two choices are needed')
    yield ChoiceExample(row.where, text, tuple(choices),
                        _label(row, row[label], len(choices), names) if labelled else -1)
