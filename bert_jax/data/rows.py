"""Rows for masked LM + next sentence prediction, as a pure function of (records, seed, row number).

Each epoch cuts every document into chunks of whole sentences that fill a row, and every chunk into
A and B. In half of the chunks B stays: the true next sentences. The other half exchange their B's
with chunks of other documents whose B is about as long, so that length does not tell the label and
every sentence is used once an epoch.
"""

import functools
from typing import NamedTuple

import numpy as np

from bert_jax.data.records import Records
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError

_TYPICAL_FILL = 0.88  # of a row by whole sentences, as measured on Wikipedia at 128
_BUCKET = 32  # chunks of about equal B among which half exchange theirs
SPECIAL = 3  # [CLS] A [SEP] B [SEP]


class Rows(NamedTuple):
  """A batch of rows, all int32 but the last."""

  ids: np.ndarray  # [B, L] token ids
  type_ids: np.ndarray  # [B, L] 0 in segment A, 1 in segment B
  positions: np.ndarray  # [B, L] position of each token in its own pair
  pair_index: np.ndarray  # [B, L] 0 on padding, 1..P on the tokens of each pair
  cls_positions: np.ndarray  # [B, P] where each pair's [CLS] stands
  next_sentence: np.ndarray  # [B, P] 0 = B follows A, 1 = B is from another document
  row: np.ndarray  # [B] the row's number in the global batch
  pair_weights: np.ndarray  # [B, P] float32, 1 for a pair, 0 where there is none


class Plan(NamedTuple):
  """The pairs of one epoch, shuffled: token ranges [R] int64 each, and what had to be cut."""

  a_start: np.ndarray
  a_end: np.ndarray
  b_start: np.ndarray
  b_end: np.ndarray
  random: np.ndarray  # [R] bool, B is from another document
  tokens_cut: int  # tokens at the end of a B that no longer fitted after the exchange
  tokens_dropped: int  # tokens in documents of one token, which make no pair
  sentences_split: int  # sentences longer than a row, cut into pieces (every piece is used)

  def real_tokens(self) -> int:
    """Tokens of the epoch's rows, special tokens included, padding not."""
    ordinary = (self.a_end - self.a_start).sum() + (self.b_end - self.b_start).sum()
    return int(ordinary) + SPECIAL * len(self.random)


def _units(records: Records, longest: int) -> tuple[np.ndarray, np.ndarray, int]:
  """Sentences, long ones in pieces of `longest`: bounds [U+1], document bounds [E+1], splits."""
  starts = np.asarray(records.sentences)
  lengths = np.diff(starts)
  pieces = -(-lengths // longest)
  first = np.concatenate([[0], np.cumsum(pieces)])  # unit at which each sentence begins
  within = np.arange(first[-1]) - np.repeat(first[:-1], pieces)
  bounds = np.append(np.repeat(starts[:-1], pieces) + within * longest, starts[-1])
  return bounds, first[np.asarray(records.documents)], int((pieces > 1).sum())


def _chunks(bounds: np.ndarray, documents: np.ndarray, longest: int,
            rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts documents into runs of units of at most `longest` tokens: first unit, last + 1, document.

  All documents advance by one chunk at a time together. The first chunk of each is shorter by
  chance, so that the cuts fall elsewhere every epoch, but no shorter than what would be left over
  at the end: the document takes no more rows for it.
  """
  at, end = documents[:-1].copy(), documents[1:]
  typical = max(int(_TYPICAL_FILL * longest), 1)
  tokens = bounds[end] - bounds[at]
  left_over = tokens - np.maximum(-(-tokens // typical) - 1, 0) * typical
  budget = rng.integers(np.minimum(left_over, longest), longest, endpoint=True)
  alive = np.flatnonzero(at < end)
  found = []
  while len(alive):
    here = at[alive]
    there = np.searchsorted(bounds, bounds[here] + budget[alive], side='right') - 1
    there = np.clip(there, here + 1, end[alive])
    found.append((here, there, alive))
    at[alive] = there
    budget[alive] = longest
    alive = alive[there < end[alive]]
  return tuple(np.concatenate(parts) for parts in zip(*found))


def _split(bounds: np.ndarray, first: np.ndarray, last: np.ndarray,
           rng: np.random.Generator) -> np.ndarray:
  """The token at which B begins: between two sentences, or inside a chunk of only one."""
  between = bounds[rng.integers(first + 1, np.maximum(last, first + 2))]
  start, end = bounds[first], bounds[last]
  inside = rng.integers(start + 1, np.maximum(end, start + 2))
  return np.where(last - first > 1, between, inside)


def _exchange(b_length: np.ndarray, document: np.ndarray,
              rng: np.random.Generator) -> np.ndarray:
  """Which chunk's B each chunk gets: [C] int64, its own index where B stays."""
  count = len(b_length)
  order = np.lexsort((rng.random(count), b_length))  # by length, in random order where equal
  bucket = np.empty(count, np.int64)
  bucket[order] = np.arange(count) // _BUCKET
  # Half of each bucket, at random.
  by_chance = np.lexsort((rng.random(count), bucket))
  rank = np.arange(count) % _BUCKET
  size = np.bincount(bucket)
  coin = rng.random(len(size)) < 0.5  # an odd bucket rounds up or down by chance
  half = (size + coin) // 2
  drawn = by_chance[rank < half[bucket[by_chance]]]

  # Sorted by document inside the bucket, and moved on by as many places as its most frequent
  # document has chunks, everyone gets a B from elsewhere; a document with more than half of the
  # chunks first gives up those for which no partner is left.
  shuffled_document = rng.permutation(document.max() + 1)[document]
  for _ in range(2):
    drawn = drawn[np.lexsort((shuffled_document[drawn], bucket[drawn]))]
    where, what = bucket[drawn], document[drawn]
    new_run = np.append(True, (where[1:] != where[:-1]) | (what[1:] != what[:-1]))
    run = np.cumsum(new_run) - 1
    length = np.bincount(run)
    rank = np.arange(len(drawn)) - np.flatnonzero(new_run)[run]
    members = np.bincount(where, minlength=len(size))
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, where, length[run])
    drawn = drawn[rank < np.minimum(most, members - most)[where]]
  where = bucket[drawn]
  members = np.bincount(where, minlength=len(size))
  begin = np.cumsum(members) - members
  rank = np.arange(len(drawn)) - begin[where]
  source = np.arange(count)
  partner = begin[where] + (rank + most[where]) % np.maximum(members[where], 1)
  source[drawn] = drawn[partner]
  return source


def make_plan(records: Records, max_len: int, key: tuple[int, ...]) -> Plan:
  """The pairs of one epoch.

  Args:
    records: the corpus; at least two documents.
    max_len: L.
    key: seeds the epoch's generator, (seed, epoch) say.
  """
  rng = np.random.default_rng(key)
  longest = max_len - SPECIAL
  bounds, documents, split = _units(records, longest)
  first, last, document = _chunks(bounds, documents, longest, rng)
  start, end = bounds[first], bounds[last]
  whole = end - start >= 2
  dropped = int((end - start)[~whole].sum())
  first, last, document = first[whole], last[whole], document[whole]
  start, end = start[whole], end[whole]
  if not len(start):
    raise UserError('the corpus holds no document of two tokens: there is nothing to pair')

  middle = _split(bounds, first, last, rng)
  source = _exchange(end - middle, document, rng)
  order = rng.permutation(len(start))
  source = source[order]
  a_start, a_end, b_start, b_end = start[order], middle[order], middle[source], end[source]
  room = longest - (a_end - a_start)
  cut = np.maximum(b_end - b_start - room, 0)
  return Plan(a_start, a_end, b_start, b_end - cut, source != order, int(cut.sum()), dropped, split)


def gather(records: Records, plan: Plan, index: np.ndarray, max_len: int, tokenizer: Tokenizer,
           row: np.ndarray) -> Rows:
  """Builds rows [CLS] A [SEP] B [SEP] for some pairs of a plan, all at once.

  Args:
    records: the corpus.
    plan: of the epoch.
    index: [B] int64 pairs of the plan; -1 gives an empty row.
    max_len: L.
    tokenizer: names the special tokens.
    row: [B] the rows' numbers in the global batch.
  """
  real = index >= 0
  a_start, b_start = plan.a_start[index], plan.b_start[index]
  a_length = np.where(real, plan.a_end[index] - a_start, 0)[:, None]
  b_length = np.where(real, plan.b_end[index] - b_start, 0)[:, None]
  column = np.arange(max_len)[None, :]
  end = np.where(real[:, None], a_length + b_length + SPECIAL, 0)
  in_b = column > a_length + 1
  source = np.where(in_b, b_start[:, None] + column - a_length - 2, a_start[:, None] + column - 1)
  ids = records.tokens[np.clip(source, 0, len(records.tokens) - 1)].astype(np.int32)
  ids[:, 0] = tokenizer.cls_id
  ids[(column == a_length + 1) | (column == end - 1)] = tokenizer.sep_id
  inside = column < end
  return Rows(
      ids=np.where(inside, ids, tokenizer.pad_id).astype(np.int32),
      type_ids=(in_b & inside).astype(np.int32),
      positions=np.where(inside, column, 0).astype(np.int32),
      pair_index=inside.astype(np.int32),
      cls_positions=np.zeros((len(index), 1), np.int32),
      next_sentence=(plan.random[index] & real).astype(np.int32)[:, None],
      row=row.astype(np.int32),
      pair_weights=real.astype(np.float32)[:, None])


class RowSource:
  """The rows of an endless walk over a corpus, epoch after epoch, each shuffled anew."""

  def __init__(self, records: Records, max_len: int, seed: int, tokenizer: Tokenizer):
    self.records, self.max_len, self.seed, self.tokenizer = records, max_len, seed, tokenizer
    self._ends = []  # rows up to the end of each epoch seen
    self.plan = functools.lru_cache(maxsize=2)(self._plan)

  def _plan(self, epoch: int) -> Plan:
    return make_plan(self.records, self.max_len, (self.seed, epoch, self.max_len))

  def _locate(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Epoch and place in its plan of rows by their number in the whole walk."""
    while not self._ends or self._ends[-1] <= number.max():
      epoch = len(self._ends)
      rows = len(self.plan(epoch).random)
      self._ends.append((self._ends[-1] if self._ends else 0) + rows)
    ends = np.array(self._ends)
    epoch = np.searchsorted(ends, number, side='right')
    return epoch, number - np.where(epoch > 0, ends[epoch - 1], 0)

  def batch(self, step: int, batch_size: int, share: slice = slice(None)) -> Rows:
    """Rows of one step, or the share of them that one process feeds."""
    row = np.arange(batch_size)[share]
    epoch, place = self._locate(step * batch_size + row)
    parts = [gather(self.records, self.plan(e), place[epoch == e], self.max_len, self.tokenizer,
                    row[epoch == e]) for e in np.unique(epoch)]
    return Rows(*map(np.concatenate, zip(*parts)))

  def epoch_batches(self, batch_size: int, share: slice = slice(None)):
    """The batches of epoch 0, the last filled up with empty rows: always the same."""
    plan = self.plan(0)
    for start in range(0, len(plan.random), batch_size):
      row = start + np.arange(batch_size)[share]
      index = np.where(row < len(plan.random), row, -1)
      yield gather(self.records, plan, index, self.max_len, self.tokenizer, row)
