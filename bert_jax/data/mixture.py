"""Several corpora in one run, each with a share of the rows.

  --config.data.source='wiki/*.gz=0.7,books/*.gz=0.3'
  --config.data.source='wiki/*.gz=0.7:0.3,books/*.gz=0.3:0.7'    # shares that change over the run

The run's rows form blocks of 1,000. A block has an exact number of rows of each corpus, spread
evenly over it. So the corpus of a row is a function of the row's number alone, and a run can start
at any step.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import hashlib
import re
from typing import NamedTuple

import numpy as np

from bert_jax.data.pairs import Layout
from bert_jax.data.phases import Phases
from bert_jax.data.records import Records
from bert_jax.data.rows import Rows, RowSource, RowStatistics
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError, require

_BLOCK = 1000  # rows
_PART = re.compile(r'(?P<source>.+?)=(?P<start>[0-9.]+)(?::(?P<end>[0-9.]+))?(?:,|$)')


class Part(NamedTuple):
  """A corpus of a mixture. The weights of all parts sum to 1."""

  source: str  # as data.source of a single corpus
  start: float  # weight at the first step
  end: float  # weight at the last step


def parse(source: str) -> tuple[Part, ...]:
  """The parts that `data.source` names; () if it names a single corpus.

  Raises:
    UserError: a part without a weight, or weights that have no positive sum.
  """
  matches, at = [], 0
  while match := _PART.match(source, at):
    matches.append(match)
    at = match.end()
  if not matches:
    return ()
  require(at == len(source), f'data.source={source!r}: {source[at:]!r} has no weight: give each '
          "corpus one, as in 'wiki/*.gz=0.7,books/*.gz=0.3'")
  try:
    weights = np.array([(float(m['start']), float(m['end'] or m['start'])) for m in matches])
  except ValueError as e:
    raise UserError(f'data.source={source!r} has a weight that is no number') from e
  total = weights.sum(0)
  require(total.min() > 0, f'data.source={source!r}: the weights sum to {total.min():g}: they must '
          'have a positive sum, at the start and at the end')
  return tuple(Part(m['source'], *map(float, pair)) for m, pair in zip(matches, weights / total))


class MixedRecords(NamedTuple):
  """The token records of a mixture: what `Corpus` needs to know of them."""

  parts: tuple[Records, ...]
  weights: tuple[tuple[float, float], ...]  # of each part, at the start and at the end

  num_tokens = property(lambda self: sum(part.num_tokens for part in self.parts))
  num_documents = property(lambda self: sum(part.num_documents for part in self.parts))

  @property
  def digest(self) -> str:
    text = repr(([part.digest for part in self.parts], self.weights))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class Plan:
  """The corpus of every row of a run.

  Attributes:
    weights: [parts, 2] at the first and at the last row.
    rows: of the run.
  """

  weights: tuple[tuple[float, float], ...]
  rows: int

  @functools.cached_property
  def counts(self) -> np.ndarray:
    """[blocks, parts] int64, the rows of each corpus in each block, by largest remainder."""
    blocks = max(-(-self.rows // _BLOCK), 1)
    middle = (np.arange(blocks)[:, None] + 0.5) / blocks
    start, end = np.array(self.weights).T
    exact = _BLOCK * (start + (end - start) * middle)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    left = _BLOCK - counts.sum(1, keepdims=True)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind='stable'), axis=1)
    return counts + (rank < left)

  @functools.cached_property
  def _before(self) -> np.ndarray:
    """[blocks + 1, parts] int64, the rows of each corpus before each block."""
    return np.concatenate([np.zeros_like(self.counts[:1]), np.cumsum(self.counts, 0)])

  def locate(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the corpus of some rows of the run, how many rows of that corpus come before): [B] each."""
    corpus, rank = np.empty_like(number), np.empty_like(number)
    block = np.minimum(number // _BLOCK, len(self.counts) - 1)
    for b in np.unique(block):
      order = _spread(tuple(self.counts[b]))
      within = np.flatnonzero(block == b)
      at = (number[within] - b * _BLOCK) % _BLOCK
      corpus[within] = order[at]
      rank[within] = self._before[b][order[at]] + _ranks(tuple(self.counts[b]))[at]
    return corpus, rank

  def before(self, number: int) -> np.ndarray:
    """[parts] int64, the rows of each corpus among the first `number` of the run."""
    block = min(number // _BLOCK, len(self.counts) - 1)
    order = _spread(tuple(self.counts[block]))[:number - block * _BLOCK]
    return self._before[block] + np.bincount(order, minlength=len(self.weights))


@functools.lru_cache(maxsize=64)
def _spread(counts: tuple[int, ...]) -> np.ndarray:
  """[sum of counts] the corpus of each row of a block; the rows of each corpus lie evenly in it."""
  place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
  corpus = np.repeat(np.arange(len(counts)), counts)
  return corpus[np.argsort(place, kind='stable')]


@functools.lru_cache(maxsize=64)
def _ranks(counts: tuple[int, ...]) -> np.ndarray:
  """How many rows of its corpus come before each row of a block: [1000]."""
  order = _spread(counts)
  ranks = np.empty_like(order)
  for corpus, count in enumerate(counts):
    ranks[order == corpus] = np.arange(count)
  return ranks


@dataclasses.dataclass(frozen=True)
class MixedRows:
  """The rows of one phase of a mixture, with the interface of a `RowSource`."""

  sources: tuple[RowSource, ...]  # one for each corpus
  plan: Plan
  begin: int  # number of the phase's first row in the run
  first: tuple[int, ...]  # number of that row in the walk over each corpus

  layout = property(lambda self: self.sources[0].layout)
  rows = property(lambda self: sum(source.rows for source in self.sources))  # of an epoch of all

  def batch(self, step: int, batch_size: int, share: slice | np.ndarray = slice(None),
            first: int = 0) -> Rows:
    """The rows of a step of the phase, as of `RowSource.batch`.

    `first` has no effect: every corpus goes on where it ended in the phase before.
    """
    del first
    row = np.arange(batch_size)[share]
    corpus, rank = self.plan.locate(self.begin + step * batch_size + row)
    rank = rank - self.plan.before(self.begin)[corpus] + np.array(self.first)[corpus]
    order, parts = [], []
    for number in np.unique(corpus):
      index = np.flatnonzero(corpus == number)
      order.append(index)
      parts.append(self.sources[number].take(rank[index], row[index]))
    order = np.argsort(np.concatenate(order))
    return Rows(*(None if field[0] is None else np.concatenate(field)[order]
                  for field in zip(*parts)))

  def epoch_batches(self, batch_size: int,
                    share: slice | np.ndarray = slice(None)) -> Iterator[Rows]:
    """The batches of epoch 0 of every corpus: those of each corpus lie evenly among the others."""
    batches = [source.epoch_batches(batch_size, share) for source in self.sources]
    for corpus in _spread(tuple(-(-source.rows // batch_size) for source in self.sources)):
      yield next(batches[corpus])

  def sample(self) -> RowStatistics:
    """Statistics of the first rows of each corpus, weighted by its rows in the run."""
    return RowStatistics(*np.average([source.sample() for source in self.sources], axis=0,
                                     weights=self.plan.counts.sum(0)).tolist())


def mixed_rows(records: MixedRecords, layouts: Sequence[Layout], phases: Phases, seed: int,
               tokenizer: Tokenizer, words: bool) -> tuple[MixedRows, ...]:
  """Makes the row source of each phase; the other arguments are those of `RowSource`."""
  plan = Plan(records.weights, sum(phase.steps * phase.batch_size for phase in phases))
  by_phase = [tuple(RowSource(part, layout, seed, tokenizer, words) for part in records.parts)
              for layout in layouts]
  sources, begin = [], 0
  epochs = np.zeros(len(records.parts))  # of each corpus so far
  for phase, of_phase in zip(phases, by_phase):
    end = begin + phase.steps * phase.batch_size
    rows = np.array([source.rows for source in of_phase])
    first = np.ceil(epochs * rows - 1e-6).astype(np.int64)
    sources.append(MixedRows(of_phase, plan, begin, tuple(first.tolist())))
    epochs = (first + plan.before(end) - plan.before(begin)) / rows
    begin = end
  return tuple(sources)
