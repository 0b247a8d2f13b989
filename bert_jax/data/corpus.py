"""Text in: from files, WikiText dumps or tensorflow-datasets to documents of paragraphs.

A document is a list of non-empty paragraphs. Every reader is a generator that holds one document
at a time and can be run again from the start.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import glob
import gzip
import os
import re
import zlib

from etils import epath
import sentencex

from bert_jax.errors import UserError

Document = list[str]
FORMATS = ('text', 'wikitext')

_WIKITEXT_HEADING = re.compile(r'^ ?= (?!=)(.*[^=]) = ?$')
_WIKITEXT_SUBHEADING = re.compile(r'^ ?= = .* = = ?$')


def find_files(pattern: str) -> list[str]:
  """The files that a glob (local or gs://) names, sorted.

  Raises:
    UserError: it matches nothing, or a file is empty.
  """
  if '://' in pattern:
    root, _, rest = pattern.rpartition('/')
    files = sorted(str(p) for p in epath.Path(root).glob(rest))
  else:
    files = sorted(glob.glob(pattern, recursive=True))
  files = [f for f in files if not epath.Path(f).is_dir()]
  if not files:
    raise UserError(f'data.source={pattern!r} matches no file: give a quoted glob such as '
                    f"'corpus/*.txt.gz', 'tfds:NAME' or 'builtin'")
  for file in files:
    if epath.Path(file).stat().length == 0:
      raise UserError(f'{file} is empty: remove it or leave it out of data.source')
  return files


def read_lines(file: str) -> Iterator[str]:
  """The lines of a UTF-8 text file, gzipped if its name ends in .gz, without their line ends.

  Raises:
    UserError: bytes that are not UTF-8 or belong to no text (with file and line), damaged gzip.
  """
  number = 0
  try:
    with epath.Path(file).open('rb') as raw:
      stream = gzip.open(raw, 'rb') if file.endswith('.gz') else raw
      for number, line in enumerate(stream, 1):
        if b'\0' in line:
          raise UserError(f'{file}, line {number}: a NUL byte: this is a binary file, not text')
        yield line.decode('utf-8-sig' if number == 1 else 'utf-8').rstrip('\r\n')
  except UnicodeDecodeError as e:
    raise UserError(f'{file}, line {number}: invalid UTF-8 ({e.reason} at byte {e.start}): convert '
                    'the file to UTF-8') from e
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise UserError(f'{file}: damaged gzip after line {number}: {e}') from e


def text_documents(files: Iterable[str]) -> Iterator[Document]:
  """Documents of plain text: one paragraph or sentence a line, a blank line between documents."""
  for file in files:
    document = []
    for line in read_lines(file):
      if line := line.strip():
        document.append(line)
      elif document:
        yield document
        document = []
    if document:  # a document ends with its file
      yield document


def wikitext_documents(files: Iterable[str]) -> Iterator[Document]:
  """Articles of WikiText's raw format: ` = Title = ` starts one, ` = = Section = = ` is dropped."""
  for file in files:
    document = []
    for line in read_lines(file):
      if _WIKITEXT_HEADING.match(line):
        if document:
          yield document
        document = []
      elif line.strip() and not _WIKITEXT_SUBHEADING.match(line):
        document.append(line.strip())
    if document:
      yield document


def tfds_documents(name: str, text_column: str, data_dir: str | None = None) -> Iterator[Document]:
  """Documents of the train split of a tensorflow-datasets data set, a line a paragraph.

  Args:
    name: of the data set.
    text_column: the feature that holds a document's text.
    data_dir: where data sets are kept; None = TFDS_DATA_DIR, or tfds' own default.
  """
  try:
    import tensorflow_datasets as tfds  # slow to import, and few runs need it
    data_dir = data_dir or os.environ.get('TFDS_DATA_DIR')
    source = tfds.data_source(name, split='train', data_dir=data_dir)
  except ImportError as e:
    raise UserError(f'tfds:{name} needs a package that is not installed ({e}): pip install '
                    'tensorflow, or store the data set as array_record') from e
  except tfds.core.registered.DatasetNotFoundError as e:
    raise UserError(f'tfds:{name}: tensorflow-datasets knows no such data set') from e
  except (NotImplementedError, AssertionError, ValueError, OSError) as e:
    raise UserError(f'tfds:{name} cannot be read: {str(e).splitlines()[0]} Without TensorFlow a '
                    'data set must be prepared with file_format=array_record') from e
  for i in range(len(source)):
    example = source[i]
    if text_column not in example:
      raise UserError(f'tfds:{name} has no column {text_column!r}: set data.text_column to one of '
                      f'{", ".join(sorted(example))}')
    text = example[text_column]
    text = text.decode('utf-8') if isinstance(text, bytes) else str(text)
    if document := [line.strip() for line in text.splitlines() if line.strip()]:
      yield document


def open_source(source: str, data_format: str,
                text_column: str) -> Callable[[], Iterator[Document]]:
  """A function that reads `data.source` (a glob or tfds:NAME) from the start at each call.

  Raises:
    UserError: an unknown format, or nothing to read.
  """
  if data_format not in FORMATS:
    raise UserError(f'data.format={data_format!r} is unknown: use {" or ".join(FORMATS)}')
  if source.startswith('tfds:'):
    return lambda: tfds_documents(source.removeprefix('tfds:'), text_column)
  files = find_files(source)
  read = wikitext_documents if data_format == 'wikitext' else text_documents
  return lambda: read(files)


def split_sentences(paragraph: str, data_format: str, language: str) -> list[str]:
  """Sentences of a paragraph, by sentencex (rules of Wikimedia for 200 languages).

  WikiText separates its tokens by spaces, so there a sentence ends at ` . `, and the marks that
  it puts around hyphens and commas inside words and numbers are undone.
  """
  if data_format == 'wikitext':
    for mark in '-,.':
      paragraph = paragraph.replace(f' @{mark}@ ', mark)
    sentences = re.split(r'(?<= [.!?]) ', paragraph)
  else:
    sentences = sentencex.segment(language, paragraph)
  return [s for s in map(str.strip, sentences) if s]
