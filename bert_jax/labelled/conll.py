"""Words with a tag each: CoNLL files and JSON lines; and the entities that tags stand for."""

from collections.abc import Collection, Iterator, Sequence
import re
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require, require_choice
from bert_jax.labelled import table

FORMATS = ('auto', 'conll', 'jsonl')
_CONLLU_COLUMNS = 10
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


def entities(tags: Sequence[str]) -> list[Entity]:
  """The entities of a sentence, as conlleval counts them.

  Tags are O, or a letter, '-' and a label: B begins, I and M go on, E and L end, S and U are alone.
  I after O, after another label or at the start begins one too, so that IOB1, IOB2 (BIO), BIOES,
  BILOU and BMES are all read right. Any other tag, such as NOUN, is the label of its word alone.
  """
  spans, start, label, before = [], None, '', 'O'
  for i, tag in enumerate([*tags, 'O']):
    letter, _, name = tag.partition('-')
    if letter not in _LETTERS:
      letter, name = 'S', tag
    goes_on = letter in ('I', 'M', 'E', 'L') and before in ('B', 'I', 'M') and name == label
    if start is not None and not goes_on:
      spans.append(Entity(label, start, i - 1))
      start = None
    if letter != 'O' and not goes_on:
      start, label = i, name
    before = letter
  return spans


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


def _read_conll(path: str, word_column: int, tag_column: int | None) -> Iterator[TaggedWords]:
  lines, words, tags, first = table.read_text(path).split('\n'), [], [], 1
  # A text of spaces can hold a tab.
  separator = '\t' if sum('\t' in x for x in lines) > sum(' ' in x for x in lines) / 2 else None
  for number, line in enumerate([*lines, ''], 1):
    line = line.rstrip('\r')
    # In CoNLL-U, where tabs separate, a line of "# text = ..." is a comment.
    comment = separator and line.startswith('#') and separator not in line
    if not line.strip() or line.startswith('-DOCSTART-') or comment:
      if words:
        yield TaggedWords(f'{path}, line {first}', tuple(words), tuple(tags))
      words, tags = [], []
      continue
    where, fields = f'{path}, line {number}', line.split(separator)
    if len(fields) == _CONLLU_COLUMNS and word_column and _NO_WORD.fullmatch(fields[0]):
      continue
    first = first if words else number
    require(tag_column is None or len(fields) > 1, f'{where}: {line!r} has a word without a tag')
    try:
      words.append(fields[word_column].strip())
      tags += [fields[tag_column].strip()] if tag_column is not None else []
    except IndexError as e:
      raise UserError(f'{where}: {line!r} has no columns {word_column} and {tag_column}') from e
    require(words[-1] and (not tags or tags[-1]), f'{where}: an empty word or tag in {line!r}')


def _strings(row: table.Row, column: str) -> tuple[str, ...]:
  value = row[column]
  require(isinstance(value, list) and all(isinstance(x, str) for x in value),
          f'{row.where}: {column!r} is no list of strings')
  return tuple(value)


def read(path: str, data: ConfigDict, labelled: bool = True) -> Iterator[TaggedWords]:
  """The sentences of a file; raises UserError that names a line of another form.

  CoNLL has a word and its tags on a line, spaces or tabs between them, and a blank line between
  sentences; JSON lines have a list of words and a list of tags. The config group `data` gives the
  format and the columns. Unless `labelled`, the tags are not read.
  """
  require_choice('data.format', data.format, FORMATS)
  name = path.removesuffix('.gz')
  if data.format == 'conll' or (data.format == 'auto' and not name.endswith(('.jsonl', '.json'))):
    yield from _read_conll(path, _column(data, 'text_column'),
                           _column(data, 'label_column') if labelled else None)
    return
  for row in table.read_jsonl(path):
    words = _strings(row, data.text_column)
    tags = _strings(row, data.label_column) if labelled else ()
    require(not labelled or len(words) == len(tags),
            f'{row.where}: {len(words)} words and {len(tags)} tags')
    if words:
      yield TaggedWords(row.where, words, tags)
