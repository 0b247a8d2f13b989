"""Reads multiple-choice examples: JSON lines, SWAG, CommonsenseQA and ARC."""

from collections.abc import Iterator, Sequence
import string
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import table

FORMATS = ('auto', 'jsonl', 'swag', 'commonsenseqa')


class ChoiceExample(NamedTuple):
  """A text, its choices, and the index of the right choice."""

  where: str  # the file and line, for messages
  text: str
  choices: tuple[str, ...]
  label: int  # the index of the right choice; -1 = unknown


def are_choices(value: Any) -> bool:
  """Returns True for a list of at least two strings."""
  return (isinstance(value, list) and len(value) > 1
          and all(isinstance(choice, str) for choice in value))


def _label(row: table.Row, value: Any, choices: int, names: Sequence[str]) -> int:
  """Returns the index of the right choice.

  If the line names its choices, the label is one of these `names`. Otherwise it is a
  number from 0, or a letter. Raises UserError for another label.
  """
  text = str(value).strip()
  if names:
    # If only some choices have a name, the index of a named choice is unknown.
    require(len(names) == choices,
            f'{row.where}: only {len(names)} of the {choices} choices have a "label": '
            'give one to each choice')
    require(names.count(text) == 1,
            f'{row.where}: the label {value!r} is none of the {choices} choices: '
            f'give one of {", ".join(names)}')
    return names.index(text)
  is_letter = len(text) == 1 and text in string.ascii_uppercase
  # No index has 10 digits. int() raises for very long strings.
  index = ord(text) - ord('A') if is_letter else (
      int(text) if text.isdecimal() and len(text) < 10 else -1)
  require(0 <= index < choices,
          f'{row.where}: the label {value!r} is none of the {choices} choices: '
          'give its number from 0, or its letter')
  return index


def _fields(row: table.Row, data: ConfigDict) -> tuple[Any, Any, str, list[str]]:
  """Returns (text, choices, column of the label, names that the label can have)."""
  if data.format == 'swag':
    # SWAG splits the second sentence: its start is in sent2, its ends are the choices.
    endings = [row[f'ending{i}'] for i in range(4)]
    return row['sent1'], [f'{row["sent2"]} {ending}' for ending in endings], 'label', []
  if data.format != 'commonsenseqa':
    return row[data.text_column], row[data.choices_column], data.label_column, []
  try:
    choices = row['question.choices']
    # ARC names its choices A to D in some lines and 1 to 4 in others.
    names = [str(c['label']).strip() for c in choices if 'label' in c]
    return row['question.stem'], [c['text'] for c in choices], 'answerKey', names
  except (KeyError, TypeError) as e:
    raise UserError(
        f'{row.where}: question.choices is not a list of objects with "text"') from e


def read(path: str, data: ConfigDict, labelled: bool = True) -> Iterator[ChoiceExample]:
  """Yields the examples of a file.

  JSON lines have a text, a list of choices and a label (its number from 0, or its
  letter). The csv files of SWAG and the JSON lines of CommonsenseQA are read too.

  Args:
    path: the file.
    data: the config group with the format and the names of the columns.
    labelled: False = the labels are not read, and may be missing.

  Raises:
    UserError: the format is unknown, or a line is malformed.
  """
  require_choice('data.format', data.format, FORMATS)
  is_csv = data.format == 'swag'
  for row in table.read_separated(path, 'csv') if is_csv else table.read_jsonl(path):
    text, choices, label, names = _fields(row, data)
    require(isinstance(text, str) and are_choices(choices),
            f'{row.where}: a text and a list of at least two choices are needed')
    yield ChoiceExample(
        row.where, text, tuple(choices),
        label=_label(row, row[label], len(choices), names) if labelled else -1)
