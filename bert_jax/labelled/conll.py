"""Reads tagged sentences from CoNLL files and JSON lines, and finds their entities."""

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
import re
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import no_labels, table

FORMATS = ('auto', 'conll', 'jsonl')
_CONLLU_COLUMNS = 10
_DOCUMENT_BOUNDS = ('-DOCSTART-', '#begin document', '#end document')
# In CoNLL-U, a line with the number 8-9 repeats the next two words, and a line with the
# number 8.1 is an omitted word.
_NO_WORD = re.compile(r'\d+[-.]\d+')


class TaggedWords(NamedTuple):
  """A sentence as words, with a tag for each word."""

  where: str  # the file and line, for messages
  words: tuple[str, ...]
  tags: tuple[str, ...]  # one per word; () = the file has no tags


_LETTERS = ('O', 'B', 'I', 'M', 'E', 'L', 'S', 'U')  # the letters of tags, see `entities`


class Entity(NamedTuple):
  """A span of words, and its label."""

  label: str
  first: int  # the index of the first word
  last: int  # the index of the last word, included


def is_plain(tag: str, plain_letters: bool = False) -> bool:
  """Returns True for a tag such as NOUN, which is neither O nor of the form B-NAME.

  `plain_letters`: see `letters_are_plain`.
  """
  return tag.partition('-')[0] not in _LETTERS or (
      plain_letters and tag in _LETTERS and tag != 'O')


def letters_are_plain(tags: Iterable[str]) -> bool:
  """Returns True if a bare letter such as S is a plain tag in a file with these tags.

  In Italian part-of-speech tags, S is a noun and E a preposition. In word segmentation,
  all tags are bare letters, and S marks a word of one character.
  """
  return any(map(is_plain, tags))


def entities(tags: Sequence[str], plain_letters: bool = False) -> list[Entity]:
  """Returns the entities of a sentence, with the rules of conlleval.

  A tag is O, or a letter, '-' and a label. B begins an entity, I and M continue it, E and
  L end it, S and U are entities of one word. I also begins an entity at the start, after
  O and after another label. Therefore IOB1, IOB2 (BIO), BIOES, BILOU and BMES all work.
  Any other tag, such as NOUN, makes an entity of its word alone. So does a letter without
  a label if `plain_letters` is True; see `letters_are_plain`.
  """
  spans, start, label, previous = [], None, '', 'O'
  # The O at the end closes an entity that reaches to the last word.
  for i, tag in enumerate([*tags, 'O']):
    letter, name = ('S', tag) if is_plain(tag, plain_letters) else tag.partition('-')[::2]
    continues = (letter in ('I', 'M', 'E', 'L') and previous in ('B', 'I', 'M')
                 and name == label)
    if start is not None and not continues:
      spans.append(Entity(label, start, i - 1))
      start = None
    if letter != 'O' and not continues:
      start, label = i, name
    previous = letter
  return spans


def _has_scheme(tag: str) -> bool:
  """Returns True for O, and for a letter, '-' and a label."""
  return tag == 'O' or bool(tag[2:]) and tag[1] == '-' and tag[0] in _LETTERS


def with_partners(tags: Collection[str]) -> set[str]:
  """Returns the tags, with the I-NAME of each B-NAME and vice versa.

  A training file may have only one of the two tags, and a held-out file the other.
  """
  partners = {'B-': 'I-', 'I-': 'B-'}
  return set(tags) | {partners[tag[:2]] + tag[2:] for tag in tags if tag[:2] in partners}


def _column(data: ConfigDict, field: str) -> int:
  try:
    return int(data[field])
  except ValueError as e:
    raise UserError(f'data.{field}={data[field]!r} is not the number of a column: the '
                    'columns of CoNLL files have no names; count from 0, or from -1 at '
                    'the end') from e


class _Line(NamedTuple):
  """A line of a CoNLL file, and its fields."""

  number: int
  text: str
  fields: list[str]


def _blocks(path: str) -> Iterator[list[_Line]]:
  """Yields the lines of each sentence, without the lines that are certainly comments.

  Other comments stay, see `_without_comments`.
  """
  lines, block = table.read_text(path).split('\n'), []
  # A file separated by spaces may contain a few tabs.
  has_tabs = sum('\t' in x for x in lines) > sum(' ' in x for x in lines) / 2
  for number, line in enumerate([*lines, ''], 1):
    line = line.rstrip('\r')
    # In CoNLL-U, which separates by tabs, a line such as "# text = ..." is a comment.
    is_comment = has_tabs and line.startswith('#') and '\t' not in line
    if not line.strip() or line.startswith(_DOCUMENT_BOUNDS) or is_comment:
      if block:
        yield block
      block = []
      continue
    # A word may contain other white space, such as the no-break space in 10 000.
    fields = line.split('\t') if has_tabs else re.split(r'[ \t]+', line.strip(' \t'))
    block.append(_Line(number, line, [field.strip() for field in fields]))


def _at(line: _Line, column: int) -> str | None:
  return line.fields[column] if -len(line.fields) <= column < len(line.fields) else None


def _is_word(line: _Line) -> bool:
  return not line.fields[0].startswith('#')


def _without_comments(block: list[_Line], columns: tuple[int, int | None],
                      known: Collection[str], widths: Collection[int]) -> list[_Line]:
  """Returns a sentence without the comments at its start that look like words.

  A line that begins with '#' is a comment in these cases:
    - it has several fields, but not as many as the lines of words;
    - the lines of words begin with a number, before the column of words;
    - the file has no tags, and where the lines of words have '_', it has another value;
    - its first field is '#' and its tag is not `known`.
  A comment of GermEval has '#', an address and a date, separated by tabs. A comment of
  MultiCoNER is '# id 17 domain=en'. A line with the word '#' and a tag of other words is
  not a comment.

  Args:
    block: the lines.
    columns: the columns of the word and of the tag; None = the file has no tags.
    known: O, data.labels, and the tags of all lines that do not begin with '#'.
    widths: the numbers of fields of all lines that do not begin with '#'.
  """
  words = [line for line in block if _is_word(line)]
  # The sentence itself is the best evidence, unless each of its lines begins with '#'.
  widths = {len(line.fields) for line in words} or widths
  is_numbered = columns[0] and words and all(line.fields[0].isdecimal() for line in words)
  first = 0
  while first < len(block) and not _is_word(block[first]):
    fields = block[first].fields
    has_other_width = widths and len(fields) not in widths and len(fields) > 1
    has_no_tag = columns[1] is not None and _at(block[first], columns[1]) not in known
    # A file without tags may fill their column with '_', but only in the lines of words.
    is_filled = columns[1] is None and words and any(
        field != '_' and all(_at(line, i) == '_' for line in words)
        for i, field in enumerate(fields))
    is_sign = fields == ['#', '#']  # the Penn Treebank gives the word '#' the tag '#'
    is_comment = (has_other_width or is_numbered or is_filled
                  or (has_no_tag and fields[0] == '#'))
    if is_sign or not is_comment:
      break
    first += 1
  return block[first:]


class _Tags:
  """The tags of a file, with the count, the first line and the first word of each."""

  def __init__(self):
    self._counts, self._firsts = collections.Counter(), {}

  def add(self, where: str, word: str, tag: str):
    self._counts[tag] += 1
    self._firsts.setdefault(tag, (where, word))

  def _reason(self, tag: str, word: str) -> str:
    """Returns why a value in the column of tags is not a tag, or ''."""
    named = sum(n for x, n in self._counts.items() if _has_scheme(x) and x != 'O')
    others = sum(n for x, n in self._counts.items() if not _has_scheme(x))
    # Where most tags have the form B-NAME, a plain tag is a word in the wrong column.
    if not _has_scheme(tag) and named >= max(others, 1):
      return "is not O or a letter, '-' and a label, as most tags of this file are"
    # In part-of-speech tags, a punctuation mark is its own tag: ',' has the tag ','. The
    # word O may have the tag O.
    return '' if _has_scheme(tag) or not any(map(str.isalpha, word)) else (
        no_labels.reason_in_row(word, tag, self._counts))

  def check(self, labels: Collection[str]):
    """Raises UserError for a value that is not a tag, unless `labels` contains it."""
    for tag, (where, word) in self._firsts.items():
      why = tag not in labels and (
          no_labels.reason(tag, is_tag=True) or self._reason(tag, word))
      require(not why,
              f'{where}: the tag {tag!r} {why}: fix the line, or name every tag in '
              'data.labels')


def _tags_of_headers(lines: Sequence[_Line], columns: tuple[int, int]) -> set[str]:
  """Returns tags that look like column names and occur only with words that do, too."""
  words_of = {}
  for line in lines:
    word, tag = (_at(line, column) or '' for column in columns)
    words_of.setdefault(tag, set()).add(word)
  return {tag for tag, words in words_of.items() if no_labels.is_label_name(tag)
          and no_labels.TEXT_NAMES.issuperset(map(no_labels.plain, words))}


def _check_form(path: str, block: list[_Line], tag_column: int,
                of_headers: Collection[str]):
  """Raises UserError for a header, a line without a tag, or lines of different widths."""
  first, width = block[0].number, len(block[0].fields)
  for line in block:
    where = f'{path}, line {line.number}'
    require(len(line.fields) > 1, f'{where}: {line.text!r} has a word without a tag')
    require(_at(line, tag_column) not in of_headers,
            f'{where}: {line.text!r:.50} are names of columns: leave the line out, as '
            'CoNLL files have no header, or name every tag in data.labels')
    require(len(line.fields) == width,
            f'{where}: {len(line.fields)} fields, line {first} of the same sentence has '
            f'{width}: does a word contain a space?')


def _read_conll(path: str, word_column: int, tag_column: int | None,
                labels: Collection[str], notes: list[str],
                tags_of_file: _Tags) -> Iterator[TaggedWords]:
  # If the first column holds the words, the file has no word numbers: 3-4 is a word.
  blocks = [[line for line in block
             if not (word_column and len(line.fields) == _CONLLU_COLUMNS
                     and _NO_WORD.fullmatch(line.fields[0]))]
            for block in _blocks(path)]
  words = [line for block in blocks for line in block if _is_word(line)]
  widths, known, of_headers = {len(line.fields) for line in words}, {'O', *labels}, set()
  # The tags of the whole file decide which lines are comments or headers.
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
      require(word and (tag_column is None or tag),
              f'{where}: an empty word or tag in {line.text!r}')
      words.append(word)
      if tag_column is not None:
        tags_of_file.add(where, word, tag)
        tags.append(tag)
    yield TaggedWords(f'{path}, line {sentence[0].number}', tuple(words), tuple(tags))
  if left_out:
    notes.append(f'{len(left_out):,} lines of {path} that begin with # are treated as '
                 f'comments, such as line {left_out[0].number}: {left_out[0].text!r:.60}')


def _strings(row: table.Row, column: str) -> tuple[str, ...]:
  value = row[column]
  require(isinstance(value, list) and all(isinstance(x, str) for x in value),
          f'{row.where}: {column!r} is not a list of strings')
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
  """Returns the sentences of a file.

  CoNLL files have a word and its tags on a line, separated by spaces or tabs, and a blank
  line between sentences. JSON lines have a list of words and a list of tags.

  Args:
    path: the file.
    data: the config group with the format, the columns and the tags.
    labelled: False = the tags are not read.
    notes: the function appends a line about the comments that it leaves out.

  Raises:
    UserError: a line is malformed, or a value is probably not a tag.
  """
  require_choice('data.format', data.format, FORMATS)
  name, labels, tags = path.removesuffix('.gz'), tuple(map(str, data.labels)), _Tags()
  if data.format == 'jsonl' or (
      data.format == 'auto' and name.endswith(('.jsonl', '.json'))):
    sentences = list(_read_jsonl(path, data, labelled, tags))
  else:
    sentences = list(_read_conll(path, _column(data, 'text_column'),
                                 _column(data, 'label_column') if labelled else None,
                                 labels, [] if notes is None else notes, tags))
  # Only the whole file shows which tags are usual.
  tags.check(labels)
  return sentences
