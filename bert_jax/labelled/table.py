"""Reads tables of examples with named columns: csv, tsv, JSON lines and tfds."""

from collections.abc import Iterator, Sequence
import csv
import gzip
import io
import math
from typing import Any, NamedTuple
import zlib

from etils import epath
import numpy as np

from bert_jax.data import tfds_reader
from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import no_labels
from bert_jax.runtime import storage

FORMATS = ('auto', 'csv', 'tsv', 'jsonl')
# A gzip file may unpack to this number of bytes or to this multiple of its size,
# whichever is larger.
_LARGEST_UNPACKED = 256 << 20
_LARGEST_RATIO = 100
_LONGEST_NAME = 200  # characters of the name of a column


class Row(NamedTuple):
  """One line of a table.

  Its methods raise UserError for a column that is missing or unsuitable.
  """

  where: str  # such as 'train.tsv, line 7', for messages
  values: dict[str, Any]  # strings in csv and tsv
  twice: frozenset[str] = frozenset()  # names that two or more columns have

  def __getitem__(self, column: str) -> Any:
    """Returns a value; `column` may be a path into JSON objects, like question.stem."""
    value = self.values
    require(column not in self.twice,
            f'{self.where}: there are several columns {column!r}: give them different '
            'names')
    require(value.get(column, '') is not None,
            f'{self.where}: no column {column!r} in this line')
    for key in ([column] if column in value else column.split('.')):
      if not isinstance(value, dict) or value.get(key) is None:
        known = ', '.join(map(repr, self.values))
        raise UserError(f'{self.where}: no column {column!r}: the columns are {known}')
      value = value[key]
    return value

  def or_null(self, column: str) -> Any:
    """Returns a value, or None if the line has null in this column or on its path."""
    value: Any = self.values
    for key in ([column] if column in value else column.split('.')):
      value = value.get(key, '') if isinstance(value, dict) else ''
    return None if value is None else self[column]

  def text(self, column: str) -> str:
    value = self[column]
    if not isinstance(value, str):
      raise UserError(f'{self.where}: {column!r} is {value!r}, not text')
    return value

  def number(self, column: str) -> float:
    """Returns a finite number; false, true and Python's 1_000 are not numbers."""
    value = self[column]
    # float() accepts booleans and underscores, which are mistakes in a table.
    try:
      if isinstance(value, bool) or (isinstance(value, str) and '_' in value):
        raise ValueError
      number = float(value)
    except (TypeError, ValueError, OverflowError) as e:
      raise UserError(f'{self.where}: {column!r} is {value!r:.50}, not a number') from e
    require(math.isfinite(number),
            f'{self.where}: {column!r} is {number}, not a finite number: leave the line out')
    return number

  def numbers(self, column: str, count: int) -> tuple[float, ...]:
    """Returns the numbers of a list of length `count`."""
    values = self[column]
    require(isinstance(values, list) and len(values) == count
            and all(type(x) in (int, float) and math.isfinite(x) for x in values),
            f'{self.where}: {column!r} is {values!r:.50}, not a list of {count} numbers')
    return tuple(values)


def read_text(path: str) -> str:
  """Returns the UTF-8 text of a file, gzipped or not, without a byte order mark.

  Raises:
    UserError: the file cannot be read, is not UTF-8, or unpacks to too much text.
  """
  storage.check('the file', path)
  try:
    data = epath.Path(path).read_bytes()
    if data[:2] == b'\x1f\x8b':
      packed, largest = len(data), max(_LARGEST_UNPACKED, _LARGEST_RATIO * len(data))
      # Reads at most one byte more than allowed: enough to detect a file that is too
      # large, without all of it in memory.
      data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(largest + 1)
      require(len(data) <= largest,
              f'{path}: its {packed:,} bytes unpack to more than {largest >> 20} MiB: '
              'this is not a text')
    return data.decode('utf-8-sig')
  except (OSError, EOFError, zlib.error) as e:
    raise UserError(f'{path} cannot be read: {getattr(e, "strerror", None) or e}') from e
  except UnicodeDecodeError as e:
    raise UserError(f'{path}: invalid UTF-8 at byte {e.start}') from e


def read_jsonl(path: str) -> Iterator[Row]:
  """Yields the objects of a JSON lines file; skips blank lines.

  Raises:
    UserError: a line is not a JSON object.
  """
  for number, line in enumerate(read_text(path).split('\n'), 1):
    if not line.strip():
      continue
    where = f'{path}, line {number}'
    try:
      values = storage.parse_json(line)
    except ValueError as e:
      raise UserError(f'{where}: not JSON ({e})') from e
    require(isinstance(values, dict), f'{where}: not a JSON object')
    yield Row(where, values)


def _check_header(row: Row, plain_names: Sequence[str], first: int):
  """Raises UserError for a line that repeats the header, in any order or spelling."""
  values = [value or '' for value in row.values.values()]
  # This runs for every row. Most rows have a text longer than any column name.
  if any(len(value) > _LONGEST_NAME for value in values):
    return
  values = sorted(map(no_labels.plain, values))
  if any(values) and values == plain_names:
    raise UserError(f'{row.where} repeats the names of the columns in line {first}, as in '
                    'concatenated files: leave it out')


def read_separated(path: str, data_format: str, names: Sequence[str] | None = None,
                   whole: bool = True) -> Iterator[Row]:
  """Yields the lines of a csv file (RFC 4180), or of a tsv file without quoting.

  Args:
    path: the file.
    data_format: csv or tsv.
    names: the names of the columns; None = the first line holds them.
    whole: False = a line may lack its last fields, whose values are then None.

  Raises:
    UserError: the number of fields changes, a quote is not closed, or a line repeats the
      header.
  """
  text = io.StringIO(read_text(path), newline='')
  is_tsv = data_format == 'tsv'
  options = {'delimiter': '\t', 'quoting': csv.QUOTE_NONE} if is_tsv else {'strict': True}
  csv.field_size_limit(1 << 30)  # the default, 128 KiB, is too short for some texts
  reader = csv.DictReader(text, fieldnames=names, **options)
  # A row with quotes may span several lines. An error names the first line, which has the
  # open quote.
  first = 1
  try:
    columns = reader.fieldnames or []
    header = reader.line_num
    plain_names = sorted(map(no_labels.plain, columns))
    named = [name.strip() for name in columns if name.strip()]
    twice = frozenset(name for name in named if named.count(name) > 1)
    for values in reader:
      where, beyond = f'{path}, line {reader.line_num}', values.pop(None, [])
      # Empty fields beyond the last column come from spreadsheets, and are harmless.
      if any(beyond):
        raise UserError(f'{where}: {len(values) + len(beyond)} fields for {len(values)} '
                        'columns: is a separator inside of a text?')
      row = Row(where, values, twice)
      missing = [name for name, value in values.items() if value is None and name]
      if whole and missing:
        raise UserError(f'{where}: {len(columns) - len(missing)} fields for '
                        f'{len(columns)} columns: no column {missing[0]!r} in this line')
      # With a single column, a text may equal the column name.
      if header and len(columns) > 1:
        _check_header(row, plain_names, header)
      yield row
      first = reader.line_num + 1
  except csv.Error as e:
    raise UserError(
        f'{path}, line {first}: {e}: is a quote not closed? Write a quote in a quoted '
        'text as ""') from e


def read_tfds(name: str, split: str) -> Iterator[Row]:
  """Yields the examples of NAME[@SPLIT]; class indices become class names.

  `split` is the split for a NAME without one. For errors, see `tfds_reader.open_split`.
  """
  name, _, given = name.partition('@')
  source = tfds_reader.open_split(name, given or split)
  features = source.dataset_info.features
  classes = {key: features[key].names for key in features
             if getattr(features[key], 'names', None)}
  for i in range(len(source)):
    values = {key: value.decode('utf-8') if isinstance(value, bytes) else value
              for key, value in source[i].items()}
    # A test set without labels has the class -1.
    for key, names in classes.items():
      value = values[key]
      values[key] = ([names[number] for number in value] if np.ndim(value) else
                     names[value] if value >= 0 else None)
    yield Row(f'tfds:{name}, example {i}', values)


def read(source: str, data_format: str, split: str) -> Iterator[Row]:
  """Returns the rows of a file, or of tfds:NAME[@SPLIT].

  Args:
    source: the file, or tfds:NAME[@SPLIT].
    data_format: one of FORMATS; auto = the suffix of the file decides.
    split: the split for a NAME without one.

  Raises:
    UserError: the source is not readable, or malformed; may be raised during iteration.
  """
  if source.startswith('tfds:'):
    return read_tfds(source.removeprefix('tfds:'), split)
  require_choice('data.format', data_format, FORMATS)
  if data_format == 'auto':
    data_format = source.removesuffix('.gz').rpartition('.')[2]
    if data_format == 'txt' and '\t' in read_text(source).partition('\n')[0]:
      data_format = 'tsv'
    require(data_format in FORMATS,
            f'{source}: the name of this file does not tell its format: set data.format '
            'to csv, tsv or jsonl')
  return (read_jsonl(source) if data_format == 'jsonl' else
          read_separated(source, data_format))
