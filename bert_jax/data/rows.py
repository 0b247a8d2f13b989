"""Rows for pretraining as a pure function of (records, layout, seed, row number).

Every epoch shuffles the blocks of the records and takes them in windows (see windows.py). How many
rows an epoch and each of its windows have follows from the token counts of the blocks alone, so
that any row of any epoch is found without making those before it.
"""

from collections.abc import Iterator
import functools
import math
from typing import NamedTuple

from absl import logging
import numpy as np

from bert_jax.data import windows
from bert_jax.data.records import Records
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.data.windows import Layout
from bert_jax.errors import UserError

_WINDOW = 3_000  # tokens of a window for each position of a row: some 4,000 chunks
_SAMPLE = 3  # windows that are made to find how many rows the corpus needs
# More rows than the sample needed where rows are not packed: there are no gaps for the text of
# windows that need more than others.
_RESERVE_UNPACKED = 0.015

_SHUFFLE = 3  # tells the generator of the rows' order from that of make_pairs


class Rows(NamedTuple):
  """A batch of rows, int32 but for the weights."""

  ids: np.ndarray  # [B, L] token ids
  type_ids: np.ndarray  # [B, L] 0 in segment A, 1 in segment B
  positions: np.ndarray  # [B, L] position of each token in its own pair
  pair_index: np.ndarray  # [B, L] 0 on padding, 1..P on the tokens of each pair
  cls_positions: np.ndarray  # [B, P] where each pair's [CLS] stands
  labels: np.ndarray  # [B, P] 0 = B follows A; 1 = B is from elsewhere, or comes before A
  # [B, P] float32, 1 for a pair; 0 where there is none, or only a text for masked LM
  pair_weights: np.ndarray
  row: np.ndarray  # [B] the row's number in the global batch
  word_start: np.ndarray | None = None  # [B, L] 1 where a word starts; only where it is asked for


class Sample(NamedTuple):
  """What rows are like."""

  fill: float  # share of real tokens
  pairs: float  # in a row; texts where there are no pairs
  unchanged: float  # share of pairs whose B follows A


class Table(NamedTuple):
  """Pairs by row: [R, P] int64 each; all 0 where a row has fewer pairs."""

  a_start: np.ndarray
  a_length: np.ndarray
  b_start: np.ndarray
  b_length: np.ndarray
  label: np.ndarray


def tabulate(pairs: windows.Pairs, rows: int, layout: Layout, rng: np.random.Generator) -> Table:
  """The pairs of a window by row, its rows in random order; pairs beyond `rows` are left out."""
  order = np.argsort(pairs.row, kind='stable')
  row = pairs.row[order]
  place = np.arange(len(row)) - np.searchsorted(row, row)
  kept = row < rows
  row, place, order = rng.permutation(rows)[row[kept]], place[kept], order[kept]
  fields = []
  for values in pairs[:len(Table._fields)]:
    field = np.zeros((rows, layout.pairs), np.int64)
    field[row, place] = values[order]
    fields.append(field)
  return Table(*fields)


def gather(records: Records, table: Table, layout: Layout, tokenizer: Tokenizer, row: np.ndarray,
           words: bool = False) -> Rows:
  """Builds the rows of a table, all at once.

  Args:
    records: the corpus.
    table: the pairs of each row, [B, P].
    layout: of the rows.
    tokenizer: names the special tokens.
    row: [B] the rows' numbers in the global batch.
    words: also say where words start.
  """
  count, length = len(row), layout.max_len
  real = table.a_length > 0
  asked = table.b_length > 0
  total = np.where(real, table.a_length + table.b_length + 2 + asked, 0)  # [B, P]
  begin = np.cumsum(total, axis=1) - total  # of each pair in its row
  size = total[real]  # of each pair, and so on: the pairs of all rows, one after another
  a_length = table.a_length[real]
  flat_start = np.cumsum(size) - size
  # Everything below is by token, [N]: its pair, its place in the pair, its place in the batch.
  pair = np.repeat(np.arange(len(size)), size)
  place = np.arange(len(pair)) - flat_start[pair]
  at = (np.arange(count)[:, None] * length + begin)[real][pair] + place
  after_a = place - a_length[pair] - 1  # 0 on the [SEP] after A
  in_b = after_a > 0
  cls, sep = place == 0, (after_a == 0) | (place == (size - 1)[pair])
  source = np.where(in_b, (table.b_start[real] - 1)[pair] + after_a,
                    (table.a_start[real] - 1)[pair] + place)
  source[cls | sep] = 0
  tokens = records.tokens(source)
  tokens[cls], tokens[sep] = tokenizer.cls_id, tokenizer.sep_id

  def spread(values, fill=0):
    field = np.full(count * length, fill, np.int32)
    field[at] = values
    return field.reshape(count, length)

  number = np.broadcast_to(np.arange(1, layout.pairs + 1), real.shape)[real]
  return Rows(
      ids=spread(tokens, tokenizer.pad_id), type_ids=spread(in_b), positions=spread(place),
      pair_index=spread(number[pair]),
      cls_positions=np.where(real, begin, 0).astype(np.int32),
      labels=table.label.astype(np.int32), pair_weights=asked.astype(np.float32),
      row=row.astype(np.int32),
      word_start=spread(records.word_starts(source) | cls | sep | (after_a == 1) | (place == 1))
                 if words else None)


class RowSource:
  """The rows of an endless walk over a corpus, epoch after epoch, each shuffled anew."""

  def __init__(self, records: Records, layout: Layout, seed: int, tokenizer: Tokenizer,
               words: bool = False):
    """See `gather` for the arguments; `seed` seeds the shuffling and the pairs.

    Raises:
      UserError: the records hold nothing to make a pair of.
    """
    self.records, self.layout, self.tokenizer, self.words = records, layout, tokenizer, words
    self._seed = seed
    tokens, _, documents = np.diff(records.blocks, axis=0).T
    documents = np.maximum(documents, 1)
    if layout.pairs > 1:  # about how many tokens a block brings to the rows, special ones included
      self._weights = tokens + layout.special * (documents + tokens // layout.max_len)
    else:  # the last row of a document is half full on average
      self._weights = tokens + layout.max_len // 2 * documents
    count = max(min(records.num_tokens // (_WINDOW * layout.max_len), records.num_blocks), 1)
    self._first_block = np.arange(count + 1) * records.num_blocks // count  # of each window
    self.rows = self._rows_needed()  # in an epoch
    self._arguments = (records, layout, seed, tokenizer, words)
    self._permutation = functools.lru_cache(maxsize=2)(self._permutation)
    self._table = functools.lru_cache(maxsize=3)(self._table)
    self._warned = False

  def __reduce__(self):
    return RowSource, self._arguments  # without its caches

  def _rows_needed(self) -> int:
    count = len(self._first_block) - 1
    needed = 0.0  # rows for each token of weight
    for sample in range(_SAMPLE):
      order = np.random.default_rng(sample).permutation(self.records.num_blocks)
      blocks = order[:self._first_block[1]]
      weight = int(self._weights[blocks].sum())
      if not weight:
        break
      # In a corpus of one window, text that is poured needs as many rows in every epoch.
      for rows in (None, 0) if count == 1 else (None,):
        pairs = windows.make_pairs(self.records, blocks, self.layout, (sample,), rows)
        needed = max(needed, pairs.rows / weight)
    if not needed:
      raise UserError('the corpus holds no token')
    reserve = 0 if self.layout.pairs > 1 else _RESERVE_UNPACKED
    return math.ceil(needed * int(self._weights.sum()) * (1 + reserve)) + count

  def _permutation(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The epoch's order of the blocks, and the row at which each window begins."""
    order = np.random.default_rng((self._seed, epoch)).permutation(self.records.num_blocks)
    weight = np.concatenate([[0], np.cumsum(self._weights[order])])
    return order, weight[self._first_block] * self.rows // weight[-1]

  def _table(self, epoch: int, window: int) -> Table:
    order, first_row = self._permutation(epoch)
    blocks = order[self._first_block[window]:self._first_block[window + 1]]
    rows = int(first_row[window + 1] - first_row[window])
    key = (self._seed, epoch, window)
    pairs = windows.make_pairs(self.records, blocks, self.layout, key, rows)
    if pairs.rows > rows and not self._warned:
      self._warned = True
      left_out = int((pairs.a_length + pairs.b_length)[pairs.row >= rows].sum())
      logging.warning('%d tokens of %d found no place in their window of epoch %d: the corpus '
                      'varies too much', left_out, self._weights[blocks].sum(), epoch)
    return tabulate(pairs, rows, self.layout, np.random.default_rng((*key, _SHUFFLE)))

  def _tables(self, number: np.ndarray) -> Table:
    """The pairs of some rows, by their number in the whole walk."""
    epoch, within = number // self.rows, number % self.rows
    parts = []
    for e in np.unique(epoch):
      first_row = self._permutation(int(e))[1]
      here = within[epoch == e]
      window = np.searchsorted(first_row, here, side='right') - 1
      for w in np.unique(window):
        rows = here[window == w] - first_row[w]
        parts.append(Table(*(field[rows] for field in self._table(int(e), int(w)))))
    return Table(*map(np.concatenate, zip(*parts)))

  def batch(self, step: int, batch_size: int, share: slice | np.ndarray = slice(None),
            first: int = 0) -> Rows:
    """Rows of one step, or those of them that one process feeds; step 0 begins at row `first`."""
    row = np.arange(batch_size)[share]
    return gather(self.records, self._tables(first + step * batch_size + row), self.layout,
                  self.tokenizer, row, self.words)

  def epoch_batches(self, batch_size: int,
                    share: slice | np.ndarray = slice(None)) -> Iterator[Rows]:
    """The batches of epoch 0, the last filled up with empty rows: always the same."""
    for start in range(0, self.rows, batch_size):
      row = start + np.arange(batch_size)[share]
      table = self._tables(np.minimum(row, self.rows - 1))
      inside = (row < self.rows)[:, None]
      yield gather(self.records, Table(*(field * inside for field in table)), self.layout,
                   self.tokenizer, row, self.words)

  def sample(self) -> Sample:
    """What the first window's rows are like."""
    order, first_row = self._permutation(0)
    pairs = windows.make_pairs(self.records, order[:self._first_block[1]], self.layout,
                               (self._seed, 0, 0), int(first_row[1]))
    asked = pairs.b_length > 0
    tokens = int((pairs.a_length + pairs.b_length + 2 + asked).sum())
    counted = asked.sum() if self.layout.sequences != 'full_sentences' else len(asked)
    return Sample(tokens / first_row[1] / self.layout.max_len, counted / first_row[1],
                  1 - pairs.label.sum() / max(asked.sum(), 1))
