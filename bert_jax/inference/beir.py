"""Reads folders in the layout of BEIR (Thakur et al. 2021, arXiv:2104.08663).

corpus.jsonl {"_id", "title", "text"}, queries.jsonl {"_id", "text"}, and qrels/SPLIT.tsv
with the header query-id, corpus-id, score.
"""

from collections.abc import Iterator
import hashlib
from typing import NamedTuple

from etils import epath

from bert_jax.errors import UserError, require
from bert_jax.inference import json_lines
from bert_jax.labelled import table


class Texts:
  """The texts of a file; each iteration reads the file again.

  Attributes:
    ids: the ids of the texts, in order.
    digest: a digest of the ids and the texts.
  """

  def __init__(self, path: epath.Path, only: dict | None = None):
    """Reads the ids; `only` restricts them to its keys.

    Raises:
      UserError: a line is not a text with an id, or an id is repeated or contains a
        space.
    """
    require(not path.exists() or path.is_file(),
            f'{path} is a pipe or a folder, and it is read several times: give a file')
    self._path, self._only = path, only
    self.ids, digest, known = [], hashlib.blake2b(digest_size=16), set()
    for name, text, _ in self.read():
      require(name not in known, f'{path}: the _id {name!r} occurs twice')
      # A run file separates its columns by spaces.
      require(len(name.split()) == 1,
              f'{path}: the _id {name!r} is empty or contains a space, which a run file '
              'does not allow')
      known.add(name)
      self.ids.append(name)
      digest.update(f'{name}\0{text}\0'.encode())
    self.digest = digest.hexdigest()

  def read(self) -> Iterator[tuple[str, str, str]]:
    """Yields (id, the text with its title, the text without it)."""
    try:
      stream = self._path.open('rb')
    except OSError as e:
      raise UserError(f'{self._path} cannot be read: {e.strerror or e}') from e
    with stream:
      for line in json_lines.read(stream, str(self._path), ('_id', 'text'), ('title',)):
        require(not line.error, line.error)
        name, title = line.example['_id'], line.example.get('title') or ''
        require(isinstance(title, str), f"{line.where}: 'title' is not a text")
        if self._only is None or name in self._only:
          yield name, f'{title} {line.example["text"]}'.strip(), line.example['text']

  def __iter__(self) -> Iterator[str]:
    """Yields each text with its title."""
    return (text for _, text, _ in self.read())


Qrels = dict[str, dict[str, int]]  # {query: {document: grade}}; above 0 is relevant


def read_qrels(path: epath.Path) -> Qrels:
  """Reads judgments from a .tsv file with the header of BEIR.

  Raises:
    UserError: a bad line, no judgment, or a query without a relevant document.
  """
  qrels: Qrels = {}
  for row in table.read_separated(str(path), 'tsv'):
    grade = row.number('score')
    require(grade == int(grade), f'{row.where}: the score {grade} is not a whole number')
    qrels.setdefault(row.text('query-id'), {})[row.text('corpus-id')] = int(grade)
  require(bool(qrels), f'{path} holds no judgment')
  # NDCG, MAP and recall divide by zero for a query without relevant documents.
  for query, grades in qrels.items():
    require(max(grades.values()) > 0,
            f'{path}: the query {query!r} has no relevant document (a score above 0): leave '
            'its lines out')
  return qrels


class Collection(NamedTuple):
  """A folder, for one split."""

  corpus: Texts
  queries: Texts  # the judged queries of the split
  qrels: Qrels
  absent: tuple[str, ...]  # judged documents that the corpus lacks, in order


def load(folder: epath.Path, split: str) -> Collection:
  """Reads the corpus, the queries and the judgments of a split.

  Some published folders judge documents that are not in corpus.jsonl. These judgments are
  kept, as in trec_eval: the documents count as not found.

  Raises:
    UserError: a file is missing or malformed, a judgment names a query that queries.jsonl
      lacks, or corpus.jsonl has no relevant document at all.
  """
  path = folder / 'qrels' / f'{split}.tsv'
  qrels = read_qrels(path)
  queries = Texts(folder / 'queries.jsonl', qrels)
  missing = qrels.keys() - set(queries.ids)
  require(not missing,
          f'{path} names {len(missing):,} queries that queries.jsonl lacks, such as '
          f'{min(missing, default="")!r}')
  corpus = Texts(folder / 'corpus.jsonl')
  known = set(corpus.ids)
  absent = tuple(sorted({name for grades in qrels.values() for name in grades} - known))
  # A few absent documents are normal; all of them means the wrong corpus.
  has_relevant = any(grade > 0 and name in known for grades in qrels.values()
                     for name, grade in grades.items())
  require(has_relevant,
          f'corpus.jsonl lacks every relevant document of {path}, such as '
          f'{min(absent, default="")!r}: do the two belong together?')
  return Collection(corpus, queries, qrels, absent)
