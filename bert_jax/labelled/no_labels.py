"""Finds values in a column of labels that are probably not labels.

The user decides: `data.labels` declares such a value a label, `data.skip_labels` leaves
out its rows.
"""

from collections.abc import Mapping
import math
import re

from bert_jax.errors import UserError, require

# Spellings of a missing value in pandas and others; 'nan', 'none', 'null' in any case.
_MISSING = frozenset(('NA', 'N/A', 'n/a', '<NA>', '#NA', '#N/A', '#N/A N/A', '-nan',
                      '-NaN', 'NaT', '1.#QNAN', '-1.#QNAN', '1.#IND', '-1.#IND', '-100'))
_MISSING_IN_ANY_CASE = frozenset(('', 'nan', 'none', 'null'))
_SIGNS = frozenset('-_?.*/') | {'--', '---', '...', '??', 'n.a.', 'inf', '-inf'}
_SIGNS_AMONG_TAGS = frozenset('-_?')  # '.', '*' and 'inf' are parts of speech
_DATE = re.compile(r'[\[(]?(\d{4}([-/.])\d{1,2}\2\d{1,2}([T ].*)?|'
                   r'\d{1,2}([-/.])\d{1,2}\4(\d{2}|\d{4}))[\])]?')
_ADDRESS = re.compile(r'(https?://|www\.)\S')
# Usual names of text columns, in the form that `plain` returns.
TEXT_NAMES = frozenset(
    ('word', 'words', 'token', 'tokens', 'form', 'text', 'texts', 'sentence'))
_LABEL_NAMES = re.compile(r'.*(tag|label)s?|ner|entity|entities|pos|upos|class|category')


def reason(value: str, is_tag: bool = False) -> str:
  """Returns why a value is not a label (with `is_tag`, not the tag of a word), or ''."""
  signs = _SIGNS_AMONG_TAGS if is_tag else _SIGNS
  if value.lower() in _MISSING_IN_ANY_CASE or value in _MISSING or value in signs:
    return 'stands for a missing label'
  if _DATE.fullmatch(value):
    return 'is a date'
  return 'is an address' if _ADDRESS.match(value) else ''


def plain(name: str) -> str:
  """Returns a column name's letters and digits in lower case: 'NER-Tag' -> 'nertag'."""
  return re.sub(r'[\W_]+', '', name).casefold()


def is_label_name(value: str) -> bool:
  """Returns True for a value that may be the header of a column of labels."""
  return bool(_LABEL_NAMES.fullmatch(plain(value)))


def reason_in_row(text: str, label: str, counts: Mapping[str, int],
                  columns: tuple[str, str] = ('', '')) -> str:
  """Returns why a value is not a label, judged by the text next to it, or ''.

  The row may repeat the header, or its columns may be swapped.

  Args:
    text: the text of the first row with the label; for a tag, the word.
    label: the value in the column of labels, or of tags.
    counts: the number of rows of each label in the file.
    columns: the column names of the texts and of the labels; '' = the column has no name.
  """
  text_name, label_name = map(plain, columns)
  has_name, is_single = (
      bool(label_name) and plain(label) == label_name, counts[label] == 1)
  # A column name may be one of two classes: the column 'spam' holds 'spam' and 'ham'.
  if has_name and is_single and (len(counts) > 2 or 'label' in label_name) or (
      columns[1] and (has_name or is_label_name(label))
      and plain(text) in {text_name, *TEXT_NAMES}):
    return 'is the name of a column, as in a repeated header'
  # Checks only labels that occur once: in a sound file, a text may equal a label.
  if is_single and text != label and counts.get(text, 0) > 1:
    return (f'is next to the text {text!r}, which is a label in other rows, as if the '
            'columns were swapped')
  return ''


def skipping(value: str) -> str:
  """Returns the advice to leave out the rows with this value."""
  # The flag must work in a shell: other characters need quotes, and a tuple around them.
  is_plain = re.fullmatch(r'[^\s\[\](){},"\'*?;&|<>#$`\\!~]+', value)
  shown = value if is_plain else f'"{(value,)!r}"'
  return f'leave such rows out with --config.data.skip_labels={shown}'


def _number(label: str) -> float | None:
  try:
    number = float(label)
  except ValueError:
    return None
  return number if math.isfinite(number) and '_' not in label else None


def check(places: Mapping[str, str], reasons: Mapping[str, str] = {}):
  """Raises UserError for a value of the training file that is probably not a label.

  Args:
    places: the first line of each value.
    reasons: why a value is not a label, from `reason_in_row`; '' or missing = it is one.
  """
  named = 'or name every label in data.labels'
  for label, where in places.items():
    why = reason(label) or reasons.get(label)
    require(not why, f'{where}: the label {label!r} {why}: {skipping(label)}, {named}')
  # '1' and '1.0' are one class that two programs wrote.
  numbers = {label: number for label in places if (number := _number(label)) is not None}
  of_number = {}
  for label, number in numbers.items():
    twin = of_number.setdefault(number, label)
    require(twin == label,
            f'{places[label]}: the labels {twin!r} and {label!r} are the same number: '
            f'write it in one way, {named}')
  # Integers among names may be classes. A fraction among names comes from another column.
  for label, number in numbers.items():
    require(number.is_integer() or len(numbers) == len(places),
            f'{places[label]}: the label {label!r} is a number, others are names: '
            f'{skipping(label)}, {named}')
  # Classes are often numbered from 0. -1 without 0 is the negative class of {-1, 1}.
  if -1 in of_number and 0 in of_number and min(of_number) == -1:
    label = of_number[-1]
    raise UserError(
        f'{places[label]}: the label {label!r} next to 0 often stands for a missing '
        f'label: {skipping(label)}, {named}')


def doubtful(places: Mapping[str, str], counts: Mapping[str, int]) -> list[str]:
  """Returns notes about labels that differ only in case, and about labels of one row.

  Args:
    places: the first line of each label.
    counts: the number of rows of each label.
  """
  notes, spellings = [], {}
  for label in places:
    twin = spellings.setdefault(label.casefold(), label)
    if twin != label:
      notes.append(f'the labels {twin!r} and {label!r} ({places[label]}) differ only in '
                   'case, and are two classes')
  # Rare labels mean little in a small file, or where most labels are rare.
  single = [label for label in places if counts[label] == 1]
  if 0 < len(single) < len(places) / 2 and sum(counts.values()) >= 10 * len(places):
    shown = ', '.join(f'{label!r:.50} ({places[label]})' for label in single[:3])
    notes.append(f'{len(single)} of {len(places)} labels have one row each: {shown}')
  return notes
