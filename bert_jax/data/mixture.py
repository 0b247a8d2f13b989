"""Mixtures: several corpora in one run, each with a share of the rows.

  --config.data.source='wiki/*.gz=0.7,books/*.gz=0.3'
  --config.data.source='wiki/*.gz=0.7:0.3,books/*.gz=0.3:0.7'  # shares change linearly

The rows of each corpus are spread evenly over the run. The corpus of a row depends only
on the number of the row, so a run can start at any step.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import os
import re
from typing import NamedTuple

import numpy as np

from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.records import Records
from bert_jax.data.rows import Rows, RowSource, RowStatistics, first_rows
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError, require

_WEIGHT = r'[0-9.]+(?:[eE]-?[0-9]+)?'
_PART = re.compile(
    rf'(?P<source>.+?)=(?P<start>{_WEIGHT})(?::(?P<end>{_WEIGHT}))?(?:,|$)')


class WeightedCorpus(NamedTuple):
  """A corpus of a mixture. The weights of a mixture sum to 1."""

  source: str  # as data.source of a single corpus
  start: float  # weight at the first step
  end: float  # weight at the last step


def parse(source: str) -> tuple[WeightedCorpus, ...]:
  """The corpora of a mixture that `data.source` names; () if it names a single corpus.

  Raises:
    UserError: a corpus has no weight, a weight is not a number, or the sum of the weights
      is not positive.
  """
  matches = list(_PART.finditer(source))
  # A single corpus may have = in its path, as in records/date=20240101.
  if not matches or len(matches) == 1 and os.path.exists(source):
    return ()
  rest = source[matches[-1].end():]
  require(not rest,
          f'data.source={source!r}: {rest!r} has no weight: give each corpus one, as in '
          "'wiki/*.gz=0.7,books/*.gz=0.3'")
  try:
    weights = np.array(
        [(float(m['start']), float(m['end'] or m['start'])) for m in matches])
  except ValueError as e:
    raise UserError(f'data.source={source!r} has a weight that is not a number') from e
  total = weights.sum(0)
  require(total.min() > 0,
          f'data.source={source!r}: the weights sum to {total.min():g}: they must have a '
          'positive sum, at the start and at the end')
  return tuple(WeightedCorpus(m['source'], *map(float, pair))
               for m, pair in zip(matches, weights / total))


class MixedRecords(NamedTuple):
  """The token records of a mixture, with the interface that `Corpus` uses."""

  corpora: tuple[Records, ...]
  weights: tuple[tuple[float, float], ...]  # (at the start, at the end) of each corpus

  @property
  def num_tokens(self) -> int:
    return sum(corpus.num_tokens for corpus in self.corpora)

  @property
  def num_documents(self) -> int:
    return sum(corpus.num_documents for corpus in self.corpora)

  @property
  def digest(self) -> str:
    text = repr(([corpus.digest for corpus in self.corpora], self.weights))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sentence_hashes(records: Records) -> Iterator[np.ndarray]:
  """Yields hashes of the sentences, [S] uint64 for about 2**20 tokens at a time."""
  rng = np.random.default_rng(0)
  of_token, of_place = (rng.integers(1 << 63, size=1 << 16, dtype=np.uint64) * 2 + 1
                        for _ in range(2))
  for shard in records.shards:
    ends = np.cumsum(shard.sentences, dtype=np.int64)
    first = 0
    while first < len(ends):
      begin = int(ends[first - 1]) if first else 0
      after = max(int(np.searchsorted(ends, begin + (1 << 20))), first + 1)
      lengths = np.asarray(shard.sentences[first:after], np.int64)
      starts = np.cumsum(lengths) - lengths
      ids = np.asarray(shard.tokens[begin:int(ends[after - 1])], np.int64)
      place = np.arange(len(ids)) - np.repeat(starts, lengths)
      # Two tables, because a vocabulary may have more than 2**16 entries.
      mixed = of_token[ids & 0xffff] + of_place[ids >> 16]
      yield np.add.reduceat(mixed * of_place[place], starts)
      first = after


def count_seen(heldout: MixedRecords, train: MixedRecords) -> tuple[int, int]:
  """(held-out sentences that occur in the training text of any corpus, all of them)."""
  held = [x for corpus in heldout.corpora for x in _sentence_hashes(corpus)]
  if not held:
    return 0, 0
  held, copies = np.unique(np.concatenate(held), return_counts=True)
  seen = np.zeros(len(held), bool)
  for corpus in train.corpora:
    for hashes in _sentence_hashes(corpus):
      place = np.minimum(np.searchsorted(held, hashes), len(held) - 1)
      seen[place[held[place] == hashes]] = True
  return int(copies[seen].sum()), int(copies.sum())


@dataclasses.dataclass(frozen=True)
class Plan:
  """The corpus of every row of a run.

  Time is counted in rows of the run. Row k of a corpus is due when the corpus's share of
  the run so far is k + 1/2 rows. The run reads the rows of all corpora in the order of
  their due times.

  Attributes:
    weights: [corpora, 2] at the first and at the last row; constant after the last row.
    rows: the number of rows of the run.
  """

  weights: tuple[tuple[float, float], ...]
  rows: int

  def _share(self, corpus: int, moment: float) -> float:
    """The share of a corpus, in rows (a real number), in the run up to a moment."""
    start, end = self.weights[corpus]
    within = min(moment, self.rows)
    return (start * within + (end - start) * within**2 / 2 / max(self.rows, 1)
            + end * (moment - within))

  def _due(self, corpus: int, rank: np.ndarray) -> np.ndarray:
    """The moments at which rows of a corpus are due, inf = never: [N] -> [N] float64."""
    start, end = self.weights[corpus]
    share, whole = rank + 0.5, self._share(corpus, self.rows)
    # The weight changes linearly, so the share is quadratic: solve it for the moment.
    # Where the weight is 0, the division by 0 gives inf.
    with np.errstate(divide='ignore', invalid='ignore'):
      root = np.sqrt(start**2 + 2 * (end - start) * share / max(self.rows, 1))
      moment = np.where(share <= whole, 2 * share / (start + root),
                        self.rows + (share - whole) / end)
    # Rounding makes ties exact, so the stable sort orders rows due together by corpus.
    return np.round(moment, 6)

  def _stretch(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan of a part of the run that includes rows `first` to `last`.

    Returns:
      ([N] the corpus of each row, [N] its rank in that corpus, [corpora] the rows of each
      corpus before this part).
    """
    corpora = len(self.weights)
    # At any moment, each corpus is within half a row of its share.
    begin, end = max(first - corpora - 1, 0), last + corpora + 2
    before, rows = [], []
    for corpus in range(corpora):
      least = max(int(self._share(corpus, begin)) - 2, 0)
      rank = np.arange(least, int(self._share(corpus, end)) + 3)
      moment = self._due(corpus, rank)
      before.append(least + np.count_nonzero(moment < begin))
      inside = (moment >= begin) & (moment < end)
      rows.append((np.full(inside.sum(), corpus), rank[inside], moment[inside]))
    corpus_of, ranks, moments = map(np.concatenate, zip(*rows))
    order = np.argsort(moments, kind='stable')
    return corpus_of[order], ranks[order], np.array(before)

  def locate(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the corpus of each row, the number of earlier rows of that corpus): [B] each."""
    corpus, rank, before = self._stretch(int(number.min()), int(number.max()))
    index = number - before.sum()
    return corpus[index], rank[index]

  def before(self, number: int) -> np.ndarray:
    """[corpora] int64: the rows of each corpus among the first `number` of the run."""
    corpus, _, before = self._stretch(number, number)
    return before + np.bincount(corpus[:number - before.sum()], minlength=len(before))


def unread(source: str, plan: Plan) -> Iterator[str]:
  """Yields a note for each corpus of a mixture that the run does not read."""
  for corpus, rows in zip(parse(source), plan.before(plan.rows)):
    if corpus.start + corpus.end and not rows:
      yield (f'{corpus.source} has {max(corpus.start, corpus.end):.3g} of the '
             f'{plan.rows:,} rows of the run, less than half a row, and is not read: '
             'train longer, or raise its weight')


def _spread(counts: Sequence[int]) -> np.ndarray:
  """The corpus of each item, evenly distributed: [corpora] -> [sum of counts] int64."""
  place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
  corpus = np.repeat(np.arange(len(counts)), counts)
  return corpus[np.argsort(place, kind='stable')]


@dataclasses.dataclass(frozen=True)
class MixedRows:
  """The rows of one phase of a mixture, with the interface of a `RowSource`."""

  sources: tuple[RowSource, ...]  # one for each corpus
  plan: Plan
  begin: int  # number of the phase's first row in the run
  first: tuple[int, ...]  # of each corpus, the first row that this phase reads

  @property
  def layout(self) -> RowLayout:
    return self.sources[0].layout

  @property
  def rows(self) -> int:
    """The rows of an epoch of every corpus."""
    return sum(source.rows for source in self.sources)

  def ranks(self, step: int, batch_size: int,
            share: slice | np.ndarray = slice(None)) -> np.ndarray:
    """For each row of a step, the number of earlier rows of its corpus: [B] int64."""
    row = np.arange(batch_size)[share]
    return self.plan.locate(self.begin + step * batch_size + row)[1]

  def batch(self, step: int, batch_size: int,
            share: slice | np.ndarray = slice(None)) -> Rows:
    """The rows of a step of the phase; see `RowSource.batch`.

    Each corpus continues where the previous phase ended.
    """
    row = np.arange(batch_size)[share]
    corpus, rank = self.plan.locate(self.begin + step * batch_size + row)
    # Converts the rank in the run to the row in the walk over the corpus.
    rank = rank - self.plan.before(self.begin)[corpus] + np.array(self.first)[corpus]
    order, corpus_rows = [], []
    for number in np.unique(corpus):
      index = np.flatnonzero(corpus == number)
      order.append(index)
      corpus_rows.append(self.sources[number].take(rank[index], row[index]))
    # The rows are grouped by corpus: put them back into the order of the batch.
    order = np.argsort(np.concatenate(order))

    def in_order(arrays):
      return None if arrays[0] is None else np.concatenate(arrays)[order]

    tokens, *others = zip(*corpus_rows)
    return Rows(Tokens(*map(in_order, zip(*tokens))), *map(in_order, others))

  def epoch_batches(self, batch_size: int,
                    share: slice | np.ndarray = slice(None)) -> Iterator[Rows]:
    """The batches of epoch 0 of all corpora, with each corpus evenly distributed."""
    batches = [source.epoch_batches(batch_size, share) for source in self.sources]
    for corpus in _spread([-(-source.rows // batch_size) for source in self.sources]):
      yield next(batches[corpus])

  def sample(self) -> RowStatistics:
    """Statistics of the first rows of each corpus, weighted by its rows in the run."""
    return RowStatistics(*np.average(
        [source.sample() for source in self.sources], axis=0,
        weights=self.plan.before(self.plan.rows)).tolist())


def mixed_rows(records: MixedRecords, layouts: Sequence[RowLayout], phases: Phases,
               seed: int, tokenizer: Tokenizer, words: bool) -> tuple[MixedRows, ...]:
  """Makes the rows of each phase; for `tokenizer` and `words`, see `RowSource`."""
  plan = Plan(records.weights, sum(phase.steps * phase.batch_size for phase in phases))
  by_phase = [tuple(RowSource(corpus, layout, seed, tokenizer, words)
                     for corpus in records.corpora)
              for layout in layouts]
  begins = np.cumsum([0] + [phase.steps * phase.batch_size for phase in phases])
  # [phases, corpora]: the rows that each phase reads of each corpus.
  counts = np.diff([plan.before(int(begin)) for begin in begins], axis=0)
  firsts = [first_rows(of_corpus, counts[:, corpus].tolist())
            for corpus, of_corpus in enumerate(zip(*by_phase))]
  return tuple(MixedRows(*of_phase) for of_phase in zip(
      by_phase, [plan] * len(phases), begins.tolist(), zip(*firsts)))
