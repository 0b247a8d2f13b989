"""Folders in the layout of BEIR (Thakur et al. 2021, https://arxiv.org/abs/2104.08663).

corpus.jsonl {"_id", "title", "text"}, queries.jsonl {"_id", "text"}, and qrels/SPLIT.tsv with a
head line: query-id, corpus-id, score.
"""

from collections.abc import Iterator
import hashlib
from typing import NamedTuple

from etils import epath

from bert_jax.errors import UserError, require
from bert_jax.inference import json_lines
from bert_jax.labelled import table


class Texts:
  """The texts of a file, read anew by each iteration.

  Attributes:
    ids: of the texts, in order.
    digest: of ids and texts.
  """

  def __init__(self, path: epath.Path, only: dict | None = None):
    """Reads the ids; with `only` those of its keys alone.

    Raises:
      UserError: a line is no text with an id, or an id stands twice or holds a space.
    """
    self._path, self._only = path, only
    self.ids, digest, known = [], hashlib.blake2b(digest_size=16), set()
    for name, text, _ in self._read():
      require(name not in known, f'{path}: the _id {name!r} is there twice')
      require(
          len(name.split()) == 1,
          f'{path}: the _id {name!r} is empty or holds a space, which '
          'a run file cannot have')
      known.add(name)
      self.ids.append(name)
      digest.update(f'{name}\0{text}\0'.encode())
    self.digest = digest.hexdigest()

  def _read(self) -> Iterator[tuple[str, str, str]]:
    """The id of each text, the text with its title, and without."""
    try:
      stream = self._path.open('rb')
    except OSError as e:
      raise UserError(f'{self._path} cannot be read: {e.strerror or e}') from e
    with stream:
      for line in json_lines.read(stream, str(self._path), ('_id', 'text'), ('title',)):
        require(not line.error, line.error)
        name, title = line.example['_id'], line.example.get('title') or ''
        require(isinstance(title, str), f"{line.where}: 'title' is no text")
        if self._only is None or name in self._only:
          yield name, f'{title} {line.example["text"]}'.strip(), line.example['text']

  def __iter__(self) -> Iterator[str]:
    """Each text with its title."""
    return (text for _, text, _ in self._read())

  def with_and_without_title(self) -> Iterator[tuple[str, str]]:
    return ((text, body) for _, text, body in self._read())


Qrels = dict[str, dict[str, int]]  # {query: {document: grade}}; above 0 is relevant


def read_qrels(path: epath.Path) -> Qrels:
  """The judgements of a file; raises UserError for a bad line, or a query without a positive."""
  qrels = {}
  for row in table.read_separated(str(path), 'tsv'):
    grade = row.number('score')
    require(grade == int(grade), f'{row.where}: the score {grade} is no whole number')
    qrels.setdefault(row.text('query-id'), {})[row.text('corpus-id')] = int(grade)
  require(bool(qrels), f'{path} holds no judgement')
  for query, grades in qrels.items():
    require(
        max(grades.values()) > 0,
        f'{path}: the query {query!r} has no relevant document (a '
        'score above 0): leave its lines out')
  return qrels


class Collection(NamedTuple):
  """A folder, for one split."""

  corpus: Texts
  queries: Texts  # those that the split judges
  qrels: Qrels
  absent: tuple[str, ...]  # judged documents that the corpus lacks, in order


def load(folder: epath.Path, split: str) -> Collection:
  """Reads a folder.

  Judgements of a document that corpus.jsonl lacks stay, as trec_eval keeps them: no search can find
  it. Published folders have some.

  Raises:
    UserError: a file is missing or malformed, a judgement names a query that queries.jsonl lacks,
      or corpus.jsonl has no relevant document at all.
  """
  path = folder / 'qrels' / f'{split}.tsv'
  qrels = read_qrels(path)
  queries = Texts(folder / 'queries.jsonl', qrels)
  missing = qrels.keys() - set(queries.ids)
  require(
      not missing,
      f'{path} names {len(missing):,} queries that queries.jsonl lacks, such as '
      f'{min(missing, default="")!r}')
  corpus = Texts(folder / 'corpus.jsonl')
  known = set(corpus.ids)
  absent = tuple(sorted({name for grades in qrels.values() for name in grades} - known))
  found = any(grade > 0 and name in known for grades in qrels.values()
              for name, grade in grades.items())
  require(found, f'corpus.jsonl lacks every relevant document of {path}, such as '
                 f'{min(absent, default="")!r}: do the two belong together?')
  return Collection(corpus, queries, qrels, absent)
