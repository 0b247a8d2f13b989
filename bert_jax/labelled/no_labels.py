"""Values in a column of labels that are no labels, unless the user says so.

`data.labels` names such a value as a label; `data.skip_labels` leaves its rows out.
"""

from collections.abc import Mapping
import math
import re

from bert_jax.errors import require

# As pandas and others write a value that is missing; 'nan', 'none' and 'null' in any case.
_MISSING = frozenset(('NA', 'N/A', 'n/a', '<NA>', '#NA', '#N/A', '#N/A N/A', '-nan', '-NaN', 'NaT',
                      '1.#QNAN', '-1.#QNAN', '1.#IND', '-1.#IND', '-100'))
_MISSING_IN_ANY_CASE = frozenset(('', 'nan', 'none', 'null'))
_SIGNS = frozenset('-_?.*/') | {'--', '---', '...', '??', 'n.a.', 'inf', '-inf'}
_SIGNS_AMONG_TAGS = frozenset('-_?')  # '.', '*' and 'inf' are parts of speech
_DATE = re.compile(r'[\[(]?(\d{4}([-/.])\d{1,2}\2\d{1,2}([T ].*)?|'
                   r'\d{1,2}([-/.])\d{1,2}\4(\d{2}|\d{4}))[\])]?')
_ADDRESS = re.compile(r'(https?://|www\.)\S')
# Names of columns in a header, as `plain` writes them.
TEXT_NAMES = frozenset(('word', 'words', 'token', 'tokens', 'form', 'text', 'texts', 'sentence'))
_LABEL_NAMES = re.compile(r'.*(tag|label)s?|ner|entity|entities|pos|upos|class|category')


def reason(value: str, is_tag: bool = False) -> str:
  """Why a value is no label, '' if it may be one; a tag is the label of a word."""
  signs = _SIGNS_AMONG_TAGS if is_tag else _SIGNS
  if value.lower() in _MISSING_IN_ANY_CASE or value in _MISSING or value in signs:
    return 'stands for a label that is missing'
  if _DATE.fullmatch(value):
    return 'is a date'
  return 'is an address' if _ADDRESS.match(value) else ''


def plain(name: str) -> str:
  """A name of a column without its case, spaces and signs: 'NER-Tag' is 'nertag'."""
  return re.sub(r'[\W_]+', '', name).casefold()


def is_label_name(value: str) -> bool:
  """True for what a header may have above the labels."""
  return bool(_LABEL_NAMES.fullmatch(plain(value)))


def reason_in_row(text: str, label: str, counts: Mapping[str, int], columns: tuple[str, str] = (
    '', '')) -> str:
  """Why the label of a row is none: it repeats the header, or its columns are swapped; else ''.

  Args:
    text: of the first row with the label.
    label: may be a tag, of a word.
    counts: rows of each label of the file.
    columns: the names of those of the texts and the labels; '' = they have none.
  """
  text_name, label_name = map(plain, columns)
  has_name, is_single = bool(label_name) and plain(label) == label_name, counts[label] == 1
  # Beside another class alone it may be a class: the column 'spam' has 'spam' and 'ham'.
  if has_name and is_single and (len(counts) > 2 or 'label' in label_name) or (
      columns[1] and (has_name or is_label_name(label))
      and plain(text) in {text_name, *TEXT_NAMES}):
    return 'is the name of a column, as in a header that stands there twice'
  if is_single and text != label and counts.get(text, 0) > 1:
    return (f'stands beside the text {text!r}, which is a label of other rows, as if the columns '
            'were swapped')
  return ''


def as_override(value: str) -> str:
  """A list of one string, as --config.FIELD takes it in a shell."""
  is_plain = re.fullmatch(r'[^\s\[\](){},"\'*?;&|<>#$`\\!~]+', value)
  return value if is_plain else f'"{(value,)!r}"'


def skipping(value: str) -> str:
  """The override that leaves out the rows with this value."""
  return f'leave such rows out with --config.data.skip_labels={as_override(value)}'


def _number(label: str) -> float | None:
  try:
    number = float(label)
  except ValueError:
    return None
  return number if math.isfinite(number) and '_' not in label else None


def check(places: Mapping[str, str], reasons: Mapping[str, str] = {}):
  """Raises UserError for a label of the training file that is none.

  Args:
    places: the labels, and the first line of each.
    reasons: why a label is none by what the file has beside it; '' = it may be one.
  """
  named = 'or name every label in data.labels'
  for label, where in places.items():
    why = reason(label) or reasons.get(label)
    require(not why, f'{where}: the label {label!r} {why}: {skipping(label)}, {named}')
  numbers = {label: number for label in places if (number := _number(label)) is not None}
  of_number = {}
  for label, number in numbers.items():
    twin = of_number.setdefault(number, label)
    require(twin == label, f'{places[label]}: the labels {twin!r} and {label!r} are the same '
                           f'number: write it in one way, {named}')
  for label, number in numbers.items():
    require(number.is_integer() or len(numbers) == len(places),
            f'{places[label]}: the label {label!r} is a number, others are names: '
            f'{skipping(label)}, {named}')
  if -1 in of_number and 0 in of_number and min(of_number) == -1:
    label = of_number[-1]
    require(False, f'{places[label]}: the label {label!r} beside 0 often stands for a label that '
                   f'is missing: {skipping(label)}, {named}')


def doubtful(places: Mapping[str, str], counts: Mapping[str, int]) -> list[str]:
  """Notes about labels that may be no labels.

  Args:
    places: the labels, and the first line of each.
    counts: rows of each.
  """
  notes, spellings = [], {}
  for label in places:
    twin = spellings.setdefault(label.casefold(), label)
    if twin != label:
      notes.append(f'the labels {twin!r} and {label!r} ({places[label]}) differ in case alone, and '
                   'are two classes')
  single = [label for label in places if counts[label] == 1]
  if 0 < len(single) < len(places) / 2 and sum(counts.values()) >= 10 * len(places):
    shown = ', '.join(f'{label!r:.50} ({places[label]})' for label in single[:3])
    notes.append(f'{len(single)} of {len(places)} labels have one row each: {shown}')
  return notes
