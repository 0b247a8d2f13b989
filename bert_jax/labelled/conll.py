"""Words with a tag each: CoNLL files and JSON lines; and the entities that tags stand for."""

import collections
from collections.abc import Collection, Iterator, Sequence
import re
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import no_labels, table

FORMATS = ('auto', 'conll', 'jsonl')
_CONLLU_COLUMNS = 10
_BOUNDS = ('-DOCSTART-', '#begin document', '#end document')  # of documents
_NO_WORD = re.compile(r'\d+[-.]\d+')  # CoNLL-U: 8-9 repeats words that follow, 8.1 is not written


class TaggedWords(NamedTuple):
  """A sentence."""

  where: str  # for messages
  words: tuple[str, ...]
  tags: tuple[str, ...]  # as many; () where there are none


_LETTERS = ('O', 'B', 'I', 'M', 'E', 'L', 'S', 'U')


class Entity(NamedTuple):
  """Words that belong together, and their label."""

  label: str
  first: int  # word
  last: int  # word, included


def is_plain(tag: str) -> bool:
  """True for a tag such as NOUN: neither O nor a letter, '-' and a label."""
  return tag.partition('-')[0] not in _LETTERS


def entities(tags: Sequence[str]) -> list[Entity]:
  """The entities of a sentence, as conlleval counts them.

  Tags are O, or a letter, '-' and a label: B begins, I and M go on, E and L end, S and U are alone.
  I after O, after another label or at the start begins one too, so that IOB1, IOB2 (BIO), BIOES,
  BILOU and BMES are all read right. Any other tag, such as NOUN, is the label of its word alone.
  """
  spans, start, label, before = [], None, '', 'O'
  for i, tag in enumerate([*tags, 'O']):
    letter, name = ('S', tag) if is_plain(tag) else tag.partition('-')[::2]
    goes_on = letter in ('I', 'M', 'E', 'L') and before in ('B', 'I', 'M') and name == label
    if start is not None and not goes_on:
      spans.append(Entity(label, start, i - 1))
      start = None
    if letter != 'O' and not goes_on:
      start, label = i, name
    before = letter
  return spans


def _has_scheme(tag: str) -> bool:
  """True for O, and for a letter, '-' and a label."""
  return tag == 'O' or bool(tag[2:]) and tag[1] == '-' and tag[0] in _LETTERS


def with_partners(tags: Collection[str]) -> set[str]:
  """The tags, and for each B-NAME an I-NAME and the other way round: other files may have it."""
  partners = {'B-': 'I-', 'I-': 'B-'}
  return set(tags) | {partners[tag[:2]] + tag[2:] for tag in tags if tag[:2] in partners}


def _column(data: ConfigDict, field: str) -> int:
  try:
    return int(data[field])
  except ValueError as e:
    raise UserError(f'data.{field}={data[field]!r} is no number of a column: CoNLL files have no '
                    'names, count from 0, or from -1 at the end') from e


class _Line(NamedTuple):
  """A line of a CoNLL file, and its fields."""

  number: int
  text: str
  fields: list[str]


def _blocks(path: str) -> Iterator[list[_Line]]:
  """The lines of each sentence with its comments, but for those that are comments for sure."""
  lines, block = table.read_text(path).split('\n'), []
  # A text of spaces can hold a tab.
  has_tabs = sum('\t' in x for x in lines) > sum(' ' in x for x in lines) / 2
  for number, line in enumerate([*lines, ''], 1):
    line = line.rstrip('\r')
    # In CoNLL-U, where tabs separate, a line of "# text = ..." is a comment.
    is_comment = has_tabs and line.startswith('#') and '\t' not in line
    if not line.strip() or line.startswith(_BOUNDS) or is_comment:
      if block:
        yield block
      block = []
      continue
    # A word may hold other white space: 10 000 with a no-break space.
    fields = line.split('\t') if has_tabs else re.split(r'[ \t]+', line.strip(' \t'))
    block.append(_Line(number, line, [field.strip() for field in fields]))


def _at(line: _Line, column: int) -> str | None:
  return line.fields[column] if -len(line.fields) <= column < len(line.fields) else None


def _is_word(line: _Line) -> bool:
  return not line.fields[0].startswith('#')


def _without_comments(block: list[_Line], columns: tuple[int, int | None], known: Collection[str],
                      widths: Collection[int]) -> list[_Line]:
  """A sentence without the comments before it that have the form of words.

  GermEval has '#', an address and a date between tabs, MultiCoNER '# id 17 domain=en'. A comment
  begins with '#'. It has another number of fields than the words, or stands where they have their
  numbers, or its tag is not `known`. A word '#' with the tag of another word is no comment.

  Args:
    block: the lines.
    columns: of the word and the tag; None = there is no tag.
    known: the tags of all lines that begin otherwise.
    widths: the numbers of fields that these lines have.
  """
  words = [line for line in block if _is_word(line)]
  widths = {len(line.fields) for line in words} or widths
  numbered = columns[0] and words and all(line.fields[0].isdecimal() for line in words)
  first = 0
  while first < len(block) and not _is_word(block[first]):
    fields = block[first].fields
    another_form = widths and len(fields) not in widths and len(fields) > 1
    no_tag = columns[1] is not None and _at(block[first], columns[1]) not in known
    # A file without tags may have a sign for none: '_' on every word, and not on a comment.
    unlike = columns[1] is None and words and any(
        field != '_' and all(_at(line, i) == '_' for line in words)
        for i, field in enumerate(fields))
    is_sign = fields == ['#', '#']  # as the Penn Treebank tags it
    if is_sign or not (another_form or numbered or unlike or (no_tag and fields[0] == '#')):
      break
    first += 1
  return block[first:]


class _Tags:
  """The tags of a file: the number of each, its first line and the word there."""

  def __init__(self):
    self._counts, self._firsts = collections.Counter(), {}

  def add(self, where: str, word: str, tag: str):
    self._counts[tag] += 1
    self._firsts.setdefault(tag, (where, word))

  def _reason(self, tag: str, word: str) -> str:
    """Why a tag is none, '' if it may be one."""
    named = sum(n for x, n in self._counts.items() if _has_scheme(x) and x != 'O')
    others = sum(n for x, n in self._counts.items() if not _has_scheme(x))
    if not _has_scheme(tag) and named >= max(others, 1):
      return "is not O or a letter, '-' and a label, as most tags of this file are"
    # A sign is a part of speech and a word: ',' has the tag ','. So may be the word O.
    return '' if _has_scheme(tag) or not any(map(str.isalpha, word)) else (
        no_labels.reason_in_row(word, tag, self._counts))

  def check(self, labels: Collection[str]):
    """Raises UserError for a tag that is none, unless `labels` name it."""
    for tag, (where, word) in self._firsts.items():
      why = tag not in labels and (
          no_labels.reason(tag, is_tag=True) or self._reason(tag, word))
      require(not why, f'{where}: the tag {tag!r} {why}: mend the line, or name every tag in '
                       'data.labels')


def _tags_of_headers(lines: Sequence[_Line], columns: tuple[int, int]) -> set[str]:
  """The tags that are names of columns, and stand beside no word but the name of another."""
  words = {}
  for line in lines:
    words.setdefault(_at(line, columns[1]) or '', set()).add(_at(line, columns[0]) or '')
  return {tag for tag, beside in words.items() if no_labels.is_label_name(tag)
          and no_labels.TEXT_NAMES.issuperset(map(no_labels.plain, beside))}


def _check_form(path: str, block: list[_Line], tag_column: int, of_headers: Collection[str]):
  """Raises UserError for a header, and for a line of a sentence with another number of fields."""
  first = block[0]
  for line in block:
    where = f'{path}, line {line.number}'
    require(len(line.fields) > 1, f'{where}: {line.text!r} has a word without a tag')
    require(_at(line, tag_column) not in of_headers,
            f'{where}: {line.text!r:.50} are names of columns: leave the line out, as CoNLL files '
            'have none, or name every tag in data.labels')
    require(len(line.fields) == len(first.fields),
            f'{where}: {len(line.fields)} fields, line {first.number} of the same sentence has '
            f'{len(first.fields)}: does a word hold a space?')


def _read_conll(path: str, word_column: int, tag_column: int | None, labels: Collection[str],
                notes: list[str], tags_of_file: _Tags) -> Iterator[TaggedWords]:
  blocks = [[line for line in block if not (
      len(line.fields) == _CONLLU_COLUMNS and word_column and _NO_WORD.fullmatch(line.fields[0]))]
      for block in _blocks(path)]
  words = [line for block in blocks for line in block if _is_word(line)]
  widths, known, of_headers = {len(line.fields) for line in words}, {'O', *labels}, set()
  if tag_column is not None:
    known |= {_at(line, tag_column) for line in words}
    of_headers = _tags_of_headers(words, (word_column, tag_column)) - set(labels)
  left_out = []
  for block in blocks:
    sentence = _without_comments(block, (word_column, tag_column), known, widths)
    left_out += block[:len(block) - len(sentence)]
    if not sentence:
      continue
    if tag_column is not None:
      _check_form(path, sentence, tag_column, of_headers)
    words, tags = [], []
    for line in sentence:
      where = f'{path}, line {line.number}'
      word = _at(line, word_column)
      tag = '' if tag_column is None else _at(line, tag_column)
      require(word is not None and tag is not None,
              f'{where}: {line.text!r} has no columns {word_column} and {tag_column}')
      require(word and (tag_column is None or tag), f'{where}: an empty word or tag in '
                                                    f'{line.text!r}')
      words.append(word)
      if tag_column is not None:
        tags_of_file.add(where, word, tag)
        tags.append(tag)
    yield TaggedWords(f'{path}, line {sentence[0].number}', tuple(words), tuple(tags))
  if left_out:
    notes.append(f'{len(left_out):,} lines of {path} that begin with # are taken for comments, '
                 f'such as line {left_out[0].number}: {left_out[0].text!r:.60}')


def _strings(row: table.Row, column: str) -> tuple[str, ...]:
  value = row[column]
  require(isinstance(value, list) and all(isinstance(x, str) for x in value),
          f'{row.where}: {column!r} is no list of strings')
  return tuple(value)


def _read_jsonl(path: str, data: ConfigDict, labelled: bool,
                tags_of_file: _Tags) -> Iterator[TaggedWords]:
  for row in table.read_jsonl(path):
    words = _strings(row, data.text_column)
    tags = _strings(row, data.label_column) if labelled else ()
    require(not labelled or len(words) == len(tags),
            f'{row.where}: {len(words)} words and {len(tags)} tags')
    for word, tag in zip(words, tags):
      tags_of_file.add(row.where, word, tag)
    if words:
      yield TaggedWords(row.where, words, tags)


def read(path: str, data: ConfigDict, labelled: bool = True,
         notes: list[str] | None = None) -> list[TaggedWords]:
  """The sentences of a file; raises UserError that names a line of another form.

  CoNLL has a word and its tags on a line, spaces or tabs between them, and a blank line between
  sentences; JSON lines have a list of words and a list of tags. The config group `data` gives the
  format, the columns and the tags. Unless `labelled`, the tags are not read. A line about the
  comments that are left out is added to `notes`.
  """
  require_choice('data.format', data.format, FORMATS)
  name, labels, tags = path.removesuffix('.gz'), tuple(map(str, data.labels)), _Tags()
  if data.format == 'conll' or (data.format == 'auto' and not name.endswith(('.jsonl', '.json'))):
    sentences = list(_read_conll(path, _column(data, 'text_column'),
                                 _column(data, 'label_column') if labelled else None, labels,
                                 [] if notes is None else notes, tags))
  else:
    sentences = list(_read_jsonl(path, data, labelled, tags))
  tags.check(labels)
  return sentences
