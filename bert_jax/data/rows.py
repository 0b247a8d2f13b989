"""Rows for pretraining as a pure function of (records, layout, seed, row number).

Each epoch shuffles the blocks of the records and divides them into windows (see
pairs.py). The numbers of rows in an epoch and in each window follow from the token counts
of the blocks alone. So any row of any epoch can be made without the rows before it.
"""

from collections.abc import Iterator, Sequence
import functools
import math
from typing import NamedTuple

from absl import logging
import numpy as np

from bert_jax.data import negatives
from bert_jax.data.pairs import Pairs, RowLayout, make_pairs
from bert_jax.data.records import Records
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens
from bert_jax.errors import require

_WINDOW = 3_000  # tokens of a window for each position of a row: about 4,000 chunks
_SAMPLED_WINDOWS = 3  # for the estimate of the rows that the corpus needs
# The share of reserve rows in an epoch without packing. A window may need more rows than
# the sampled windows, and unpacked rows have no gaps for the surplus.
_RESERVE_UNPACKED = 0.015
_SHUFFLE = 3  # the key of the generator that shuffles rows; make_pairs uses another


class Rows(NamedTuple):
  """A batch of rows; int32, except `pair_weights`, `mask_rate` and `tokens.causal`."""

  tokens: Tokens  # [B, L] each
  starts: np.ndarray  # [B, P] position of each pair's [CLS]
  labels: np.ndarray  # [B, P] 0 = B follows A; 1 = B is from elsewhere, or comes before A
  # [B, P] float32: 1 for a pair; 0 for a single text, which serves masked LM only, or for
  # an empty slot.
  pair_weights: np.ndarray
  row: np.ndarray  # [B] number of the row in the global batch; in evaluations, in epoch 0
  word_start: np.ndarray | None = None  # [B, L] 1 where a word starts, if requested
  mask_rate: np.ndarray | None = None  # [B] float32; None = the constant of the config


class RowStatistics(NamedTuple):
  """Statistics of rows."""

  fill: float  # share of real tokens
  pairs: float  # mean pairs in a row; mean texts if no row has a pair
  unchanged: float  # share of pairs whose B follows A


def _by_row(pairs: Pairs, row: np.ndarray, rows: int, layout: RowLayout,
            rng: np.random.Generator) -> Pairs:
  """Arranges pairs [C] by row [rows, P], and shuffles rows; drops pairs beyond `rows`."""
  order = np.argsort(row, kind='stable')
  row = row[order]
  slot = np.arange(len(row)) - np.searchsorted(row, row)
  inside = row < rows
  # make_pairs puts rows with pairs first. A shuffle makes all batches alike.
  row, slot, order = rng.permutation(rows)[row[inside]], slot[inside], order[inside]
  table = np.zeros((len(pairs), rows, layout.pairs), np.int64)
  table[:, row, slot] = np.stack(pairs)[:, order]
  return Pairs(*table)


def gather(records: Records, pairs: Pairs, layout: RowLayout, tokenizer: Tokenizer,
           row: np.ndarray, words: bool = False) -> Rows:
  """Builds a batch of rows.

  Args:
    records: of the corpus.
    pairs: [B, P].
    layout: of the rows.
    tokenizer: of the records.
    row: [B] numbers of the rows in the global batch.
    words: whether to fill `word_start`.
  """
  count, length = len(row), layout.max_len
  real = pairs.a_length > 0
  size = pairs.size
  begin = np.cumsum(size, axis=1) - size  # [B, P] start of each pair in its row
  flat, size = pairs.take(real), size[real]  # [N], the pairs of all rows in sequence
  first = np.cumsum(size) - size
  # [T] for each token: its pair, its position in the pair, its position in the batch.
  pair = np.repeat(np.arange(len(first)), size)
  position = np.arange(len(pair)) - first[pair]
  target = (np.arange(count)[:, None] * length + begin)[real][pair] + position
  after_a = position - flat.a_length[pair] - 1  # 0 on the [SEP] after A
  in_b = after_a > 0
  cls = position == 0
  sep = (after_a == 0) | (position == (size - 1)[pair])
  source = np.where(in_b, (flat.b_start - 1)[pair] + after_a,
                    (flat.a_start - 1)[pair] + position)
  # Special tokens are not in the corpus: reads position 0 instead, and replaces it.
  source[cls | sep] = 0
  tokens = records.tokens(source)
  tokens[cls] = tokenizer.cls_id
  tokens[sep] = tokenizer.sep_id

  def spread(values, fill=0):
    field = np.full(count * length, fill, np.int32)
    field[target] = values
    return field.reshape(count, length)

  word_start = None
  if words:
    starts = records.word_starts(source)
    # A special token is a word. A segment starts with a word, even after a cut in a word.
    word_start = spread(starts | cls | sep | (after_a == 1) | (position == 1))
  number = np.broadcast_to(np.arange(1, layout.pairs + 1), real.shape)[real]
  return Rows(
      Tokens(ids=spread(tokens, tokenizer.pad_id), type_ids=spread(in_b),
             positions=spread(position), text_ids=spread(number[pair])),
      starts=np.where(real, begin, 0).astype(np.int32),
      labels=pairs.label.astype(np.int32),
      pair_weights=pairs.has_b.astype(np.float32),
      row=row.astype(np.int32),
      word_start=word_start)


class RowSource:
  """The rows of an endless walk over a corpus, in a different order each epoch."""

  def __init__(self, records: Records, layout: RowLayout, seed: int, tokenizer: Tokenizer,
               words: bool = False):
    """Estimates the number of rows; see `gather` for the other arguments.

    Args:
      seed: of the shuffling and the pairs.

    Raises:
      UserError: the records hold no token.
    """
    self.records, self.layout, self._seed = records, layout, seed
    self.tokenizer, self.words = tokenizer, words
    self._classes = (None if layout.negatives == 'other_document' else
                     negatives.token_classes(tokenizer))
    tokens, _, documents = np.diff(records.blocks, axis=0).T
    documents = np.maximum(documents, 1)
    # A block's weight estimates the tokens that it fills in rows, with special tokens.
    if layout.pairs > 1:
      self._weights = tokens + layout.special * (documents + tokens // layout.max_len)
    else:
      # The last row of a document is half full on average.
      self._weights = tokens + layout.max_len // 2 * documents
    count = max(
        min(records.num_tokens // (_WINDOW * layout.max_len), records.num_blocks), 1)
    # The first block of each window, in the order of an epoch.
    self._first_block = np.arange(count + 1) * records.num_blocks // count
    self.rows = self._rows_needed()  # in an epoch
    # Each instance has its own cache: a cache of the class would keep all sources alive.
    self._permutation = functools.lru_cache(maxsize=2)(self._permutation)
    self._window = functools.lru_cache(maxsize=3)(self._window)
    self._warned = False

  def __reduce__(self):
    # Pickles leave out the caches.
    return RowSource, (self.records, self.layout, self._seed, self.tokenizer, self.words)

  def _rows_needed(self) -> int:
    count = len(self._first_block) - 1
    needed = 0.0  # rows per unit of weight
    for sample in range(_SAMPLED_WINDOWS):
      order = np.random.default_rng(sample).permutation(self.records.num_blocks)
      blocks = order[:self._first_block[1]]
      weight = int(self._weights[blocks].sum())
      if not weight:
        break
      # With a single window, also tries 0, which pours all text: the rows that this needs
      # are the same in every epoch.
      for rows in (None, 0) if count == 1 else (None,):
        window_rows = make_pairs(self.records, blocks, self.layout, (sample,), rows,
                                 self._classes)[-1]
        needed = max(needed, window_rows / weight)
    require(needed, 'the corpus holds no token')
    reserve = 0 if self.layout.pairs > 1 else _RESERVE_UNPACKED
    return math.ceil(needed * int(self._weights.sum()) * (1 + reserve)) + count

  def _permutation(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of the blocks in an epoch, and the first row of each window."""
    order = np.random.default_rng(
        (self._seed, epoch)).permutation(self.records.num_blocks)
    weight = np.concatenate([[0], np.cumsum(self._weights[order])])
    # As integers of Python: the product exceeds 64 bits from about 30 billion tokens on.
    first = weight[self._first_block].astype(object) * self.rows // int(weight[-1])
    return order, first.astype(np.int64)

  def _window(self, epoch: int, window: int) -> Pairs:
    """The pairs of a window by row."""
    order, first_row = self._permutation(epoch)
    blocks = order[self._first_block[window]:self._first_block[window + 1]]
    rows = int(first_row[window + 1] - first_row[window])
    key = (self._seed, epoch, window)
    pairs, row, needed = make_pairs(self.records, blocks, self.layout, key, rows,
                                    self._classes)
    if needed > rows and not self._warned:
      self._warned = True
      tokens = pairs.a_length + pairs.b_length
      logging.warning('%d tokens of %d found no place in their window of epoch %d: the '
                      'corpus varies too much', tokens[row >= rows].sum(), tokens.sum(),
                      epoch)
    return _by_row(pairs, row, rows, self.layout,
                   np.random.default_rng((*key, _SHUFFLE)))

  def _pairs(self, number: np.ndarray) -> Pairs:
    """The pairs [B, P] of the rows with these numbers in the walk."""
    epoch, within = number // self.rows, number % self.rows
    window_pairs = []
    for e in np.unique(epoch):
      first_row = self._permutation(int(e))[1]
      in_epoch = within[epoch == e]
      window = np.searchsorted(first_row, in_epoch, side='right') - 1
      for w in np.unique(window):
        rows = in_epoch[window == w] - first_row[w]
        window_pairs.append(self._window(int(e), int(w)).take(rows))
    return Pairs(*map(np.concatenate, zip(*window_pairs)))

  def row_after(self, before: 'RowSource', number: int) -> int:
    """The first row whose window shares no text with the first `number` rows of `before`.

    `before` has another layout, but the same records and seed, so the same block order.
    """
    epoch, within = divmod(number, before.rows)
    # Rows of a window are shuffled, so all blocks of a begun window count as read.
    begun = np.searchsorted(before._permutation(epoch)[1], within)
    window = np.searchsorted(self._first_block, before._first_block[begun])
    return epoch * self.rows + int(self._permutation(epoch)[1][window])

  def batch(self, step: int, batch_size: int, share: slice | np.ndarray = slice(None),
            first: int = 0) -> Rows:
    """The rows of a step, or one process's share; step 0 begins at row `first`."""
    row = np.arange(batch_size)[share]
    return self.take(first + step * batch_size + row, row)

  def take(self, number: np.ndarray, row: np.ndarray) -> Rows:
    """Makes rows of the walk.

    Args:
      number: [B] int64 numbers of the rows in the walk.
      row: [B] int64 numbers of the rows in the global batch.
    """
    return gather(self.records, self._pairs(number), self.layout, self.tokenizer, row,
                  self.words)

  def epoch_batches(self, batch_size: int,
                    share: slice | np.ndarray = slice(None)) -> Iterator[Rows]:
    """The batches of epoch 0, which are always the same; empty rows pad the last one."""
    for start in range(0, self.rows, batch_size):
      row = start + np.arange(batch_size)[share]
      pairs = self._pairs(np.minimum(row, self.rows - 1))
      inside = (row < self.rows)[:, None]
      yield gather(self.records, Pairs(*(field * inside for field in pairs)), self.layout,
                   self.tokenizer, row, self.words)

  def sample(self) -> RowStatistics:
    """Statistics of the first window's rows."""
    pairs = self._window(0, 0)
    with_b = pairs.has_b.sum()
    counted = (with_b if self.layout.sequences != 'full_sentences'
               else (pairs.a_length > 0).sum())
    rows = len(pairs.label)
    return RowStatistics(
        fill=int(pairs.size.sum()) / rows / self.layout.max_len,
        pairs=counted / rows,
        unchanged=1 - pairs.label.sum() / max(with_b, 1))


def first_rows(sources: Sequence[RowSource], counts: Sequence[int]) -> tuple[int, ...]:
  """The row of the walk at which each phase of a run over one corpus begins.

  A phase with the same row layout as the previous phase continues at the next row. A
  phase with another layout begins at the next window that shares no text with a window
  already begun. Rows of a window are shuffled, so the unread text of a begun window is
  unknown.

  Args:
    sources: the rows of each phase, with one seed.
    counts: the number of rows that each phase reads.
  """
  first = [0]
  for before, source, count in zip(sources, sources[1:], counts):
    end = first[-1] + count
    first.append(end if source.layout == before.layout else
                 source.row_after(before, end))
  return tuple(first)
