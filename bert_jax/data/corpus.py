"""Reads documents from files or tensorflow-datasets, and splits them into sentences.

A document is a string with one paragraph or sentence on each line. Readers hold one
document in memory, can start again from the beginning, and name the file and line of an
error.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import glob
import gzip
import itertools
import re
from typing import Any, NamedTuple
import zlib

from etils import epath

from bert_jax.data import builtin, languages, tfds_reader
from bert_jax.errors import UserError, require, require_choice
from bert_jax.runtime import storage

FORMATS = ('auto', 'text', 'jsonl', 'wikitext')
_LONGEST_DOCUMENT = 64 << 20  # bytes; one document at a time is in memory
# Tokenizers need a hundred times the memory of a sentence. Sentences beyond 16,384
# characters are cut at white space, or anywhere if they have none.
_SENTENCE = re.compile(r'.{1,16384}(?:\s|$)|.{1,16384}', re.DOTALL)
_WORD = re.compile(r'\S+')
_WIKITEXT_HEADING = re.compile(rb' ?= (?!=)[^\n]*[^=\n] = ?\n?')
_WIKITEXT_SUBHEADING = re.compile(r'^ ?= = .* = = ?$')


@dataclasses.dataclass(frozen=True)
class Settings:
  """The text and how it becomes tokens: fields of the group `data`, and `vocab_size`."""

  source: str
  format: str = 'auto'
  language: str = 'en'
  text_column: str = 'text'
  lines_are_sentences: bool = False
  vocab: str = ''
  vocab_size: int | None = None  # of the vocabulary to train; None with `vocab`
  tokenizer: str = 'wordpiece'
  lowercase: bool = True
  heldout: float = 0.02
  words: int = 0  # only the first N words of the source; 0 = all

  def __post_init__(self):
    languages.check('data.language', self.language)

  def sentences(self, document: str) -> list[str]:
    """Splits a document by the rules of its language.

    WikiText separates its tokens by spaces, so a sentence ends at ` . `. Inside words and
    numbers it writes ` @-@ `, ` @,@ ` and ` @.@ `; these marks are removed.
    """
    is_wikitext = self.format == 'wikitext' and self.source != 'builtin'
    if is_wikitext:
      for mark in '-,.':
        document = document.replace(f' @{mark}@ ', mark)
    lines = document.split('\n')
    if is_wikitext:
      lines = [line for line in lines if not _WIKITEXT_SUBHEADING.match(line)]
    if self.lines_are_sentences:
      sentences = lines
    elif is_wikitext:
      sentences = (s for line in lines for s in re.split(r'(?<= [.!?]) ', line.strip()))
    else:
      sentences = languages.sentences(lines, self.language)
    pieces = (piece for s in sentences for piece in _SENTENCE.findall(s))
    return [s for s in map(str.strip, pieces) if s]


class Source(NamedTuple):
  """Where documents come from."""

  inputs: tuple[str, ...]  # file names with size and time, which reveal a changed file
  read: Callable[[], Iterator[str]]  # yields the documents, from the first one


def find_files(pattern: str) -> list[str]:
  """The sorted files of a glob, local or gs://.

  Raises:
    UserError: no file matches, or a file is empty or cannot be read.
  """
  if storage.is_remote(pattern):
    root, _, rest = pattern.rpartition('/')
    storage.check('data.source', root)
    require('*' not in root and '**' not in rest,
            f'{pattern}: in a bucket only the name of a file may be a pattern')
    files = sorted(str(p) for p in epath.Path(root).glob(rest))
  else:
    files = sorted(glob.glob(pattern, recursive=True))
  require(files != [pattern] or not (epath.Path(pattern) / 'manifest.json').exists(),
          f'{pattern} is a folder of token records, not of text: train on it, or give the '
          'files of a text')
  require(files != [pattern] or not epath.Path(pattern).is_dir(),
          f'{pattern} is a folder without manifest.json, so it does not hold token '
          f"records: give the files, such as '{pattern.rstrip('/')}/*.txt'")
  files = [f for f in files if not epath.Path(f).is_dir()]
  require(files, f'{pattern!r} matches no file: give a quoted glob such as '
          f"'corpus/*.txt.gz', 'tfds:NAME' or 'builtin'")
  # An empty file is usually a failed download, which would go unnoticed among many.
  for file in files:
    try:
      size, _ = storage.size_and_time(epath.Path(file))
    except OSError as e:
      raise UserError(f'{file} cannot be read: {e.strerror or e}') from e
    require(size, f'{file} is empty: remove it or leave it out')
  return files


def _decode(data: bytes, file: str, line: int) -> str:
  try:
    if b'\0' in data:
      raise UserError(f'{file}, line {line + data[:data.index(0)].count(10)}: a NUL '
                      'byte: this is a binary file, not text')
    return data.decode('utf-8')
  except UnicodeDecodeError as e:
    raise UserError(f'{file}, line {line + data[:e.start].count(10)}: invalid UTF-8 '
                    f'({e.reason}): convert the file to UTF-8') from e


def _lines(file: str) -> Iterator[bytes]:
  """Yields the lines of a text or .gz file; Windows line ends become \\n."""
  number = 0
  try:
    with epath.Path(file).open('rb') as raw:
      stream = gzip.open(raw, 'rb') if file.endswith('.gz') else raw
      # Without the limit, a file without line ends would fill the memory.
      while line := stream.readline(_LONGEST_DOCUMENT):
        number += 1
        if number == 1:
          line = line.removeprefix(codecs.BOM_UTF8)
        yield line[:-2] + b'\n' if line.endswith(b'\r\n') else line
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise UserError(f'{file}: damaged gzip after line {number}: {e}') from e
  except OSError as e:
    raise UserError(f'{file} cannot be read: {e.strerror or e}') from e


def _is_blank(line: bytes) -> bool:
  """True for white space alone, including Unicode white space, unlike `bytes.isspace`."""
  # Most lines begin with a printable ASCII character and need not be decoded here.
  starts_with_ascii = b'!' <= line[:1] <= b'~'
  return not starts_with_ascii and not line.decode('utf-8', 'replace').strip()


def _split(file: str,
           is_separator: Callable[[bytes], Any]) -> Iterator[tuple[bytes, int]]:
  """Yields the text between separator lines, and the number of its first line."""
  lines, size, first = [], 0, 1
  for number, line in enumerate(_lines(file), 1):
    if is_separator(line):
      yield b''.join(lines), first
      lines, size, first = [], 0, number + 1
      continue
    lines.append(line)
    size += len(line)
    if size > _LONGEST_DOCUMENT:
      raise UserError(
          f'{file}: the document that begins at line {first} is longer than '
          f'{_LONGEST_DOCUMENT >> 20} MiB: put a blank line between documents')
  yield b''.join(lines), first


def format_of(file: str, data_format: str) -> str:
  """The requested format; for `auto`, the format of the file's extension."""
  if data_format != 'auto':
    return data_format
  return 'jsonl' if file.removesuffix('.gz').endswith(('.jsonl', '.json')) else 'text'


GIVE_FORMAT = ', or give data.format: jsonl, or text to read them as they are'


def check_plain(files: Sequence[str], remedy: str):
  """Raises UserError for tables, and for JSON lines whose names do not say so.

  Such files would be read as text, with their punctuation and field names.

  Args:
    files: files whose format follows from their names; only the first one is opened.
    remedy: the end of the message, such as GIVE_FORMAT.
  """
  for file in files:
    require(not file.lower().removesuffix('.gz').endswith(('.csv', '.tsv')),
            f'{file} is a table, not text: convert it to JSON lines{remedy}')
  if format_of(files[0], 'auto') == 'jsonl':
    return
  try:
    is_json = isinstance(storage.parse_json(next(_lines(files[0]), b'')), dict)
  except ValueError:
    is_json = False
  require(not is_json,
          f'{files[0]} has JSON lines, and its name does not end in .jsonl: rename the '
          f'files{remedy}')


def has_columns(source: str, data_format: str) -> bool:
  """True if a source (a glob, tfds:NAME or builtin) has named columns, not plain text."""
  return source.startswith('tfds:') or (source != 'builtin' and any(
      format_of(file, data_format) == 'jsonl' for file in find_files(source)))


def read_file(file: str, data_format: str, text_column: str) -> Iterator[str]:
  """Yields the documents of a file, which is gzipped if its name ends in .gz.

  Args:
    file: the path, local or gs://.
    data_format: text (a blank line between documents), jsonl (an object on each line) or
      wikitext (` = Title = ` begins an article).
    text_column: the key of the text in the objects of jsonl.

  Raises:
    UserError: invalid UTF-8 or JSON, damaged gzip, or a document that is too long; the
      message names the line.
  """
  if data_format == 'jsonl':
    for number, line in enumerate(_lines(file), 1):
      # `_lines` cuts a line at this length.
      require(len(line) < _LONGEST_DOCUMENT,
              f'{file}, line {number}: longer than {_LONGEST_DOCUMENT >> 20} MiB')
      if not _is_blank(line):
        text = _json_text(_decode(line, file, number), text_column, file, number)
        if text.strip():
          yield text
    return
  is_separator = _WIKITEXT_HEADING.fullmatch if data_format == 'wikitext' else _is_blank
  for data, first in _split(file, is_separator):
    if text := _decode(data, file, first).strip():
      yield text


def _json_text(line: str, text_column: str, file: str, number: int) -> str:
  try:
    record = storage.parse_json(line.lstrip('\ufeff'))
    if isinstance(record[text_column], str):
      return record[text_column]
    problem = f'{text_column!r} is not a string'
  except ValueError as e:
    problem = f'invalid JSON ({e})'
  except (KeyError, TypeError):
    problem = f'it has no {text_column!r}: name the field of the text with data.text_column'
  raise UserError(f'{file}, line {number}: {problem}')


def tfds_documents(name: str, text_column: str) -> Iterator[str]:
  """Yields the texts in one column of a data set's train split.

  Raises:
    UserError: the column does not exist or is not text; see also `tfds_reader.open_split`.
  """
  for i, example in enumerate(tfds_reader.open_split(name, 'train')):
    require(text_column in example,
            f'tfds:{name} has no column {text_column!r}: set data.text_column to one of '
            f'{", ".join(sorted(example))}')
    text = example[text_column]
    require(isinstance(text, bytes | str),
            f'tfds:{name}: {text_column!r} is not text: set data.text_column to a column of '
            'texts')
    text = (_decode(text, f'tfds:{name}, example {i}', 1)
            if isinstance(text, bytes) else text)
    if text := text.strip():
      yield text


def first_words(documents: Iterable[str], words: int) -> Iterator[str]:
  """Yields the first documents, `words` white-space words in total; cuts the last one.

  Raises:
    UserError: all documents together have fewer words.
  """
  left = words
  for document in documents:
    ends = [word.end() for word in itertools.islice(_WORD.finditer(document), left)]
    if ends:
      yield document[:ends[-1]] if len(ends) == left else document
    left -= len(ends)
    if not left:
      return
  raise UserError(f'data.words={words:,}: the corpus has only {words - left:,} words')


def open_source(settings: Settings, scratch: epath.Path) -> Source:
  """Opens a glob, tfds:NAME or the built-in corpus, up to `settings.words` words.

  The built-in corpus is written into `scratch` when it is first read.
  """
  source = _open_whole(settings, scratch)
  if not settings.words:
    return source
  return source._replace(read=lambda: first_words(source.read(), settings.words))


def _open_whole(settings: Settings, scratch: epath.Path) -> Source:
  if settings.source == 'builtin':
    text = scratch / 'builtin.txt.gz'

    def read_builtin() -> Iterator[str]:
      if not text.exists():
        builtin.extract(text)
      return read_file(str(text), 'text', 'text')

    return Source(('builtin',), read_builtin)
  require_choice('data.format', settings.format, FORMATS)
  if settings.source.startswith('tfds:'):
    name = settings.source.removeprefix('tfds:')
    return Source((settings.source,), lambda: tfds_documents(name, settings.text_column))
  files = find_files(settings.source)
  stats = [storage.size_and_time(epath.Path(file)) for file in files]

  def read() -> Iterator[str]:
    # Not before: a run with finished records opens the source but never reads it.
    if settings.format == 'auto':
      check_plain(files, GIVE_FORMAT)
    for file in files:
      yield from read_file(file, format_of(file, settings.format), settings.text_column)

  return Source(
      tuple(f'{f} {size} {time}' for f, (size, time) in zip(files, stats)), read)
