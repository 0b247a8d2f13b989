"""The pairs of one window of an epoch: chunks of documents, next sentences, rows.

A window is a few thousand chunks from blocks all over the corpus. Documents are cut into
chunks of whole sentences, and each chunk is cut into A and B between two sentences. Half
of these pairs exchange their B, by default with pairs of other documents. The two B are
about equally long, so length does not leak the label. Pairs and single sentences are
packed into rows. The token count of a window fixes the number of its rows, so any row of
any epoch can be found directly. Text beyond these rows is poured into their gaps
(`packing.pour`), in pieces for masked LM only: a pair that is cut inside a sentence would
leak its label. Each token is used once.

An example: two documents of four and three sentences, where each letter is a token, in a
row of 24 tokens with C for [CLS], S for [SEP] and . for padding.

  documents  abc de fgh ij   kl mno pq

  seed 3     C k l S m n o p q S C a b c S d e f g h i j S .
  type_ids   0 0 0 0 1 1 1 1 1 1 0 0 0 0 0 1 1 1 1 1 1 1 1 0
  text_ids   1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 2 2 2 2 0
  labels     0 0: each B follows its A

  seed 0     C a b c d e S p q S C k l m n o S f g h i j S .
  type_ids   0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 1 1 1 1 1 1 0
  text_ids   1 1 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2 2 2 2 2 2 0
  labels     1 1: the pairs have exchanged their B
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import negatives, packing
from bert_jax.data.negatives import NEGATIVES
from bert_jax.data.records import Records, cut

SEQUENCES = ('next_sentence', 'sentence_order', 'full_sentences')
SHORT_SHARE = 0.1  # share of chunks with a random length, as published (short_seq_prob)
_MAX_PAIRS = 8  # upper bound on P
_FULL = 0.98  # the target fill of rows, if it costs at most an eighth of the pairs
_TYPICAL_FILL = 0.88  # average length of a chunk as a share of the longest possible one


class RowLayout(NamedTuple):
  """The shape and the kind of rows."""

  max_len: int  # L
  pairs: int  # P, the most pairs in a row; 1 = unpacked
  sequences: str = 'next_sentence'  # one of SEQUENCES
  negatives: str = NEGATIVES[0]  # where false next sentences come from

  @classmethod
  def create(cls, max_len: int, pack: bool, sequences: str,
             negatives: str = NEGATIVES[0]) -> 'RowLayout':
    """Makes a layout with up to 8 pairs in a packed row, and fewer in short rows."""
    pairs = max(min(_MAX_PAIRS, max_len // 8), 1) if pack else 1
    return cls(max_len, pairs, sequences, negatives)

  @property
  def special(self) -> int:
    """Special tokens of [CLS] A [SEP] B [SEP], or of [CLS] A [SEP] for full sentences."""
    return 2 if self.sequences == 'full_sentences' else 3


class Pairs(NamedTuple):
  """Pairs of segments, or single segments: int64, [C] in a window or [R, P] by row."""

  a_start: np.ndarray  # position in the corpus
  a_length: np.ndarray  # 0 where a row has no pair
  b_start: np.ndarray
  b_length: np.ndarray  # 0 for a single segment, which has no label
  # 1 = B is from elsewhere, or comes before A; 0 = B follows A, or B is missing.
  label: np.ndarray

  @property
  def has_b(self) -> np.ndarray:
    return self.b_length > 0

  @property
  def size(self) -> np.ndarray:
    """int64 tokens of each pair, special tokens included; 0 where a row has no pair."""
    return np.where(self.a_length > 0, self.a_length + self.b_length + 2 + self.has_b, 0)

  def take(self, index: np.ndarray) -> 'Pairs':
    """The pairs that a boolean mask or an array of numbers selects."""
    return Pairs(*(field[index] for field in self))


class Window(NamedTuple):
  """The sentences of a window's blocks, which are concatenated on one token axis."""

  bounds: np.ndarray  # [S + 1] start of each sentence on the axis, and end of the last
  segments: np.ndarray  # [E + 1] first sentence of each segment, and S (see `_segments`)
  document: np.ndarray  # [E] number of the document in the corpus
  offset: np.ndarray  # [E] position in the corpus minus position on the axis


def _read_window(records: Records, blocks: np.ndarray, layout: RowLayout) -> Window:
  """Reads the index of a window's blocks.

  A sentence that is longer than a row is cut into pieces, and each piece becomes a
  segment. For sentence_order, so does the first sentence of a document, because its style
  would leak the order.
  """
  # By block: sentence lengths, first sentences of documents, their numbers and offsets.
  lengths, firsts, documents, offsets, opening = [], [], [], [], []
  sentences = tokens = 0
  for number in blocks.tolist():
    block, starts, document = records.block(number)
    opening.append(starts + sentences)
    if not len(starts) or starts[0]:  # the block begins inside a document
      starts = np.concatenate([[0], starts])
    lengths.append(block)
    firsts.append(starts + sentences)
    documents.append(document + np.arange(len(starts)))
    offsets.append(np.full(len(starts), records.blocks[number, 0] - tokens))
    sentences += len(block)
    tokens += int(records.blocks[number + 1, 0] - records.blocks[number, 0])
  length, pieces = cut(np.concatenate(lengths).astype(np.int64), layout.max_len - 2)
  # Sentences get new numbers, because each piece of a long sentence counts as one.
  renumbered = np.concatenate([[0], np.cumsum(pieces)])
  document_starts = renumbered[np.concatenate(firsts)]
  stands_alone = np.repeat(pieces > 1, pieces)
  if layout.sequences == 'sentence_order':
    stands_alone[renumbered[np.concatenate(opening)]] = True
  segments = _segments(document_starts, stands_alone)
  # The document of each segment.
  source = np.searchsorted(document_starts, segments[:-1], side='right') - 1
  return Window(bounds=np.concatenate([[0], np.cumsum(length)]), segments=segments,
                document=np.concatenate(documents)[source],
                offset=np.concatenate(offsets)[source])


def _segments(document_starts: np.ndarray, stands_alone: np.ndarray) -> np.ndarray:
  """The first sentence of each segment, and the number of sentences: [E + 1] int64.

  Chunks are cut from segments. A segment begins with a document, with a sentence that
  stands alone, and after such a sentence. In this example, two documents have three and
  two sentences, and the second sentence stands alone:

    sentence             0   1   2   3   4
    document starts      0           3
    stands alone             1
    after it                     2
    segments             0   1   2   3       and 5, the number of sentences

  Args:
    document_starts: first sentence of each document.
    stands_alone: [S] bool.
  """
  alone = np.flatnonzero(stands_alone)
  return np.unique(
      np.concatenate([document_starts, alone, alone + 1, [len(stands_alone)]]))


def _chunks(window: Window, layout: RowLayout,
            rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts segments into chunks: runs of sentences that fit into a row.

  Each pass cuts one chunk from every segment. The first chunk of a segment has a random
  length, so that the cuts differ between epochs. This chunk is at least as long as the
  remainder that chunks of typical length would leave, so it does not add a chunk.

  Returns:
    (first sentence, last sentence + 1, segment) of each chunk, in order: [C] int64 each.
  """
  bounds = window.bounds
  first, last = window.segments[:-1].copy(), window.segments[1:].copy()
  longest = layout.max_len - layout.special
  tokens = bounds[last] - bounds[first]
  typical = max(int(_TYPICAL_FILL * longest), 1)
  remainder = tokens - np.maximum(-(-tokens // typical) - 1, 0) * typical
  budget = rng.integers(np.minimum(remainder, longest), longest, endpoint=True)
  # The sentence after a chunk tends to be long, otherwise it would belong to the chunk.
  # Half of the segments are cut from the end, so that lengths do not leak the order.
  backward = rng.random(len(first)) < 0.5
  alive = np.flatnonzero(first < last)
  chunks = []
  while len(alive):
    low, high, back = first[alive], last[alive], backward[alive]
    short = rng.integers(1, longest, len(alive), endpoint=True)
    room = np.where(rng.random(len(alive)) < SHORT_SHARE, short, budget[alive])
    ahead = np.searchsorted(bounds, bounds[low] + room, side='right') - 1
    behind = np.searchsorted(bounds, bounds[high] - room)
    # At least one sentence: a single sentence always fits into a row.
    begin = np.where(back, np.clip(behind, low, high - 1), low)
    end = np.where(back, high, np.clip(ahead, low + 1, high))
    chunks.append((begin, end, alive))
    first[alive] = np.where(back, low, end)
    last[alive] = np.where(back, begin, high)
    budget[alive] = longest
    alive = alive[first[alive] < last[alive]]
  begin, end, segment = map(np.concatenate, zip(*chunks))
  order = np.argsort(begin)
  return begin[order], end[order], segment[order]


def _labelled(records: Records, window: Window, layout: RowLayout,
              classes: np.ndarray | None, rng: np.random.Generator) -> Pairs:
  """Cuts chunks of two or more sentences into A and B, and labels them."""
  first, last, segment = _chunks(window, layout, rng)
  # Packing keeps the order of equally long chunks. Without a shuffle, a row would hold
  # neighboring chunks of one document.
  if layout.pairs > 1:
    order = rng.permutation(len(first))
    first, last, segment = first[order], last[order], segment[order]
  has_b = (last - first > 1) & (layout.sequences != 'full_sentences')
  middle = np.where(has_b, rng.integers(first + 1, np.maximum(last, first + 2)), last)
  start, middle, end = (
      window.bounds[x] + window.offset[segment] for x in (first, middle, last))
  pairs = Pairs(a_start=start, a_length=middle - start, b_start=middle,
                b_length=end - middle, label=np.zeros_like(first))
  index = np.flatnonzero(has_b)
  if layout.sequences == 'sentence_order':
    swapped = index[rng.random(len(index)) < 0.5]
    for a, b in ((pairs.a_start, pairs.b_start), (pairs.a_length, pairs.b_length)):
      a[swapped], b[swapped] = b[swapped], a[swapped]
    pairs.label[swapped] = 1
  else:
    with_b = pairs.take(index)
    style = (None if layout.negatives == 'other_document' else
             negatives.styles(records, classes, with_b.b_start, with_b.b_length))
    source = index[negatives.exchange(
        with_b.a_length, with_b.b_length, window.document[segment[index]],
        layout.max_len - layout.special, rng, layout.negatives, style)]
    pairs.label[index] = source != index
    for field in (pairs.b_start, pairs.b_length):
      field[index] = field[source]
  return pairs


def _rows_to_keep(pairs: Pairs, row: np.ndarray, space: np.ndarray, rows: int | None,
                  layout: RowLayout) -> int:
  """The number of rows that keep their pairs; the text of the other rows fills gaps.

  Args:
    pairs: [C].
    row: [C] the row of each pair.
    space: [R] tokens left in each row for a piece; 0 = the row takes no piece.
    rows: the number of rows; None = the smallest number into which all text fits.
    layout: of the rows.
  """
  count = len(space)
  # Each piece of poured text gets a [CLS] and a [SEP].
  text = np.bincount(row, pairs.a_length + pairs.b_length + 2, count)
  text = text.sum() - np.concatenate([[0], np.cumsum(text)])
  room = np.concatenate([[0], np.cumsum(space)])
  if rows is None:
    return int(np.argmax(room >= text))
  keep = np.arange(min(count, rows) + 1)
  fits = room[keep] + (rows - keep) * layout.max_len >= text[keep]
  return int(np.flatnonzero(fits).max(initial=0))


def _stretches(pairs: Pairs, segment_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Start and end of the text of pairs, with neighbors joined: [T] int64 each.

  Texts [0, 5), [5, 9) and [12, 15) become the stretches [0, 9) and [12, 15), unless a
  segment begins at 5.
  """
  start = np.concatenate([pairs.a_start, pairs.b_start])
  end = start + np.concatenate([pairs.a_length, pairs.b_length])
  order = np.argsort(start)
  order = order[(end > start)[order]]  # drops the empty B of single segments
  start, end = start[order], end[order]
  joins = np.zeros(len(order), bool)  # True = it continues the stretch before it
  joins[1:] = (start[1:] == end[:-1]) & ~np.isin(start[1:], segment_starts)
  is_last = ~np.roll(joins, -1)  # True = the next text does not join it
  return start[~joins], end[is_last]


def make_pairs(records: Records, blocks: np.ndarray, layout: RowLayout,
               key: tuple[int, ...], rows: int | None = None,
               classes: np.ndarray | None = None) -> tuple[Pairs, np.ndarray, int]:
  """Makes the pairs of a window.

  Args:
    records: of the corpus.
    blocks: [blocks] int64, the numbers of the window's blocks.
    layout: of the rows.
    key: seeds the generator.
    rows: the number of rows; None = the smallest number that keeps most pairs. With fewer
      rows, more text is poured. 0 pours all text, so every key gives the same pairs.
    classes: [V] uint8, from `negatives.token_classes`; None works if `layout.negatives`
      is other_document.

  Returns:
    (the pairs [C], the row of each pair [C], the number of rows that they need).
  """
  rng = np.random.default_rng(key)
  window = _read_window(records, np.sort(blocks), layout)
  segment_starts = window.bounds[window.segments[:-1]] + window.offset
  pairs = _labelled(records, window, layout, classes, rng)
  row, count = packing.pack(pairs.size, layout.max_len, layout.pairs)
  # Rows without a labeled pair get the last numbers, so they are poured first.
  if layout.pairs > 1:
    has_b = np.bincount(row, pairs.b_length, count) > 0
    order = np.lexsort((rng.random(count), ~has_b))
    row = np.argsort(order)[row]  # argsort inverts the order
  space = layout.max_len - np.bincount(row, pairs.size, count)
  # A row with P pairs takes no piece, even if it has space.
  usable = (space >= packing.SHORTEST_PIECE + 2) & (np.bincount(row) < layout.pairs)
  keep = _rows_to_keep(pairs, row, space * usable, rows, layout)
  least = 0  # the lower bound of `keep`
  # Without a given number of rows, up to an eighth of the kept rows may be poured too.
  if rows is None:
    rows = int(pairs.size.sum() / _FULL / layout.max_len) + 1
    least = keep * 7 // 8 if layout.pairs > 1 else keep

  # The pairs beyond the first `keep` rows are poured into gaps, then into new rows. If
  # that takes too many rows, fewer rows keep their pairs.
  while True:
    is_kept = row < keep
    used = np.bincount(row[is_kept], pairs.size[is_kept], keep).astype(np.int64)
    slots = layout.pairs - np.bincount(row[is_kept], minlength=keep)
    start, length, into, needed = packing.pour(
        *_stretches(pairs.take(~is_kept), segment_starts),
        space=layout.max_len - used,
        slots=slots,
        max_len=layout.max_len,
        max_items=layout.pairs)
    if needed <= rows or keep == least:
      zeros = np.zeros_like(start)
      pieces = Pairs(start, length, zeros, zeros, label=zeros)
      fields = zip(pairs.take(is_kept), pieces)
      return (Pairs(*map(np.concatenate, fields)), np.concatenate([row[is_kept], into]),
              needed)
    keep = max(keep - 2 * (needed - rows) - keep // 64, least)
