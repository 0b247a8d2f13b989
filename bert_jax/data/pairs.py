"""The pairs of one window of an epoch: chunks of documents, next sentences, rows.

A window is a few thousand chunks from blocks all over the corpus. Documents are cut into chunks of
whole sentences, and each chunk into A and B between two sentences. Half of these pairs exchange
their B with pairs of other documents whose B is about as long, so length does not tell the label.
Pairs and single sentences are packed into rows. The window's token count fixes the number of its
rows, so any row of any epoch can be found directly. The text of rows beyond that number fills gaps
in the others, in pieces that serve masked LM only: a pair cut inside a sentence would leak its
label. Every token is used once.

An example: two documents of four and three sentences, where each letter is a token, in a row of 24
tokens with C for [CLS], S for [SEP] and . for padding.

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
SHORT_SHARE = 0.1  # of the chunks get a random length, as published (short_seq_prob)
_MAX_PAIRS = 8  # in a row
_FULL = 0.98  # fill of the rows to reach, where that costs an eighth of the pairs at most
_TYPICAL_FILL = 0.88  # share of the longest chunk that whole sentences fill on average


class RowLayout(NamedTuple):
  """The shape of rows."""

  max_len: int  # L
  pairs: int  # P, the most in a row; 1 = unpacked
  sequences: str = 'next_sentence'  # one of SEQUENCES
  negatives: str = NEGATIVES[0]  # where false next sentences come from

  @classmethod
  def create(cls, max_len: int, pack: bool, sequences: str,
             negatives: str = NEGATIVES[0]) -> 'RowLayout':
    """Up to 8 pairs in a packed row, fewer in rows that are too short for them."""
    pairs = max(min(_MAX_PAIRS, max_len // 8), 1) if pack else 1
    return cls(max_len, pairs, sequences, negatives)

  @property
  def special(self) -> int:
    """Special tokens of a pair: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] for full sentences."""
    return 2 if self.sequences == 'full_sentences' else 3


class Pairs(NamedTuple):
  """Pairs of text segments, or single segments: int64 arrays, [C] of a window, [R, P] by row."""

  a_start: np.ndarray  # position in the corpus
  a_length: np.ndarray  # 0 where a row has no pair
  b_start: np.ndarray
  b_length: np.ndarray  # 0 for a single segment, which has no label
  label: np.ndarray  # 1 = B is from another document, or comes before A; 0 = B follows A, or no B

  @property
  def has_b(self) -> np.ndarray:
    return self.b_length > 0

  @property
  def size(self) -> np.ndarray:
    """Tokens, special ones included; 0 where a row has no pair."""
    return np.where(self.a_length > 0, self.a_length + self.b_length + 2 + self.has_b, 0)

  def take(self, index: np.ndarray) -> 'Pairs':
    """The pairs that a boolean mask or an array of numbers selects."""
    return Pairs(*(field[index] for field in self))


class Window(NamedTuple):
  """The sentences of some blocks, on a token axis of their own."""

  bounds: np.ndarray  # [S + 1] start of each sentence on that axis, and the end of the last
  segments: np.ndarray  # [E + 1] first sentence of each segment, and S (see `_segments`)
  document: np.ndarray  # [E] number of the document in the corpus
  offset: np.ndarray  # [E] position in the corpus minus position on the axis


def _read_window(records: Records, blocks: np.ndarray, layout: RowLayout) -> Window:
  """Reads the index of some blocks.

  A sentence that is longer than a row is cut into pieces, and each piece stands alone. So does the
  first sentence of a document for sentence_order: its style would give away that it comes first.
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
  # The sentences are numbered anew: each piece of a long one counts.
  renumbered = np.concatenate([[0], np.cumsum(pieces)])
  document_starts = renumbered[np.concatenate(firsts)]
  stands_alone = np.repeat(pieces > 1, pieces)
  if layout.sequences == 'sentence_order':
    stands_alone[renumbered[np.concatenate(opening)]] = True
  segments = _segments(document_starts, stands_alone)
  source = np.searchsorted(document_starts, segments[:-1], side='right') - 1
  return Window(bounds=np.concatenate([[0], np.cumsum(length)]), segments=segments,
                document=np.concatenate(documents)[source],
                offset=np.concatenate(offsets)[source])


def _segments(document_starts: np.ndarray, stands_alone: np.ndarray) -> np.ndarray:
  """The first sentence of each segment, and the number of sentences: [E + 1] int64.

  Chunks are cut from segments. A segment begins with a document, with a sentence that stands
  alone, and behind such a sentence. Two documents of three and two sentences, of which the second
  sentence stands alone:

    sentence             0   1   2   3   4
    document starts      0           3
    stands alone             1
    behind it                    2
    segments             0   1   2   3       and 5, the number of sentences

  Args:
    document_starts: first sentence of each document.
    stands_alone: [S] bool.
  """
  alone = np.flatnonzero(stands_alone)
  return np.unique(np.concatenate([document_starts, alone, alone + 1, [len(stands_alone)]]))


def _chunks(window: Window, layout: RowLayout,
            rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts segments into runs of sentences that fit into a row; a single sentence always fits.

  Each pass cuts one chunk from every segment. The first chunk of a segment has a random length, so
  that the cuts differ between epochs. It is at least as long as the remainder at the end would be,
  so it adds no chunk. The sentence behind a chunk tends to be long, or it would belong to the
  chunk: every second segment is therefore cut from its end, and lengths do not tell the order.

  Returns:
    First sentence, last sentence + 1 and segment of each chunk, in order: [C] int64 each.
  """
  bounds = window.bounds
  first, last = window.segments[:-1].copy(), window.segments[1:].copy()
  longest = layout.max_len - layout.special
  tokens = bounds[last] - bounds[first]
  typical = max(int(_TYPICAL_FILL * longest), 1)
  remainder = tokens - np.maximum(-(-tokens // typical) - 1, 0) * typical
  budget = rng.integers(np.minimum(remainder, longest), longest, endpoint=True)
  backward = rng.random(len(first)) < 0.5
  alive = np.flatnonzero(first < last)
  chunks = []
  while len(alive):
    low, high, back = first[alive], last[alive], backward[alive]
    short = rng.integers(1, longest, len(alive), endpoint=True)
    room = np.where(rng.random(len(alive)) < SHORT_SHARE, short, budget[alive])
    ahead = np.searchsorted(bounds, bounds[low] + room, side='right') - 1
    behind = np.searchsorted(bounds, bounds[high] - room)
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


def _labelled(records: Records, window: Window, layout: RowLayout, classes: np.ndarray | None,
              rng: np.random.Generator) -> Pairs:
  """Cuts the chunks of two sentences or more into A and B, and labels them."""
  first, last, segment = _chunks(window, layout, rng)
  if layout.pairs > 1:  # equally long chunks are packed in random order
    order = rng.permutation(len(first))
    first, last, segment = first[order], last[order], segment[order]
  has_b = (last - first > 1) & (layout.sequences != 'full_sentences')
  middle = np.where(has_b, rng.integers(first + 1, np.maximum(last, first + 2)), last)
  start, middle, end = (window.bounds[x] + window.offset[segment] for x in (first, middle, last))
  pairs = Pairs(a_start=start, a_length=middle - start, b_start=middle, b_length=end - middle,
                label=np.zeros_like(first))
  index = np.flatnonzero(has_b)
  if layout.sequences == 'sentence_order':
    swapped = index[rng.random(len(index)) < 0.5]
    for a, b in ((pairs.a_start, pairs.b_start), (pairs.a_length, pairs.b_length)):
      a[swapped], b[swapped] = b[swapped], a[swapped]
    pairs.label[swapped] = 1
  else:
    asked = pairs.take(index)
    style = None
    if layout.negatives != 'other_document':
      style = negatives.styles(records, classes, asked.b_start, asked.b_length)
    source = index[negatives.exchange(
        asked.a_length, asked.b_length, window.document[segment[index]],
        layout.max_len - layout.special, rng, layout.negatives, style)]
    pairs.label[index] = source != index
    for field in (pairs.b_start, pairs.b_length):
      field[index] = field[source]
  return pairs


def _rows_to_keep(pairs: Pairs, row: np.ndarray, space: np.ndarray, rows: int | None,
                  layout: RowLayout) -> int:
  """The number of rows that keep their pairs, so that the text of the others fits into the gaps.

  `space` [R] counts the tokens that each row has left for a piece, 0 where it takes none. With
  `rows` None there are as few rows as keep all pairs.
  """
  count = len(space)
  # A poured text brings its own [CLS] and [SEP].
  text = np.bincount(row, pairs.a_length + pairs.b_length + 2, count)
  text = text.sum() - np.concatenate([[0], np.cumsum(text)])
  room = np.concatenate([[0], np.cumsum(space)])
  if rows is None:
    return int(np.argmax(room >= text))
  keep = np.arange(min(count, rows) + 1)
  fits = room[keep] + (rows - keep) * layout.max_len >= text[keep]
  return int(np.flatnonzero(fits).max(initial=0))


def _stretches(pairs: Pairs, segment_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Start and end of the text of some pairs, neighbors in a segment joined: [T] int64 each.

  Texts [0, 5), [5, 9) and [12, 15) become the stretches [0, 9) and [12, 15), unless a segment
  begins at 5.
  """
  start = np.concatenate([pairs.a_start, pairs.b_start])
  end = start + np.concatenate([pairs.a_length, pairs.b_length])
  order = np.argsort(start)
  order = order[(end > start)[order]]  # without the empty B of single segments
  start, end = start[order], end[order]
  joins = np.zeros(len(order), bool)  # True = the text before it belongs to the same stretch
  joins[1:] = (start[1:] == end[:-1]) & ~np.isin(start[1:], segment_starts)
  is_last = ~np.roll(joins, -1)  # of its stretch: the next text does not join it
  return start[~joins], end[is_last]


def make_pairs(records: Records, blocks: np.ndarray, layout: RowLayout, key: tuple[int, ...],
               rows: int | None = None,
               classes: np.ndarray | None = None) -> tuple[Pairs, np.ndarray, int]:
  """Makes the pairs of a window.

  Args:
    blocks: [blocks] int64, the numbers of the window's blocks.
    key: seeds the generator.
    rows: of the window; None = as few as keep most pairs. Fewer rows pour more text; 0 pours all
      text, which gives the same pairs for every key.
    classes: [V], `negatives.token_classes`, unless false next sentences are of any other document.

  Returns:
    The pairs [C], the row of each [C], and the number of rows that they need.
  """
  rng = np.random.default_rng(key)
  window = _read_window(records, np.sort(blocks), layout)
  segment_starts = window.bounds[window.segments[:-1]] + window.offset
  pairs = _labelled(records, window, layout, classes, rng)
  row, count = packing.pack(pairs.size, layout.max_len, layout.pairs)
  if layout.pairs > 1:  # rows without a label get the last numbers: they are poured first
    has_b = np.bincount(row, pairs.b_length, count) > 0
    order = np.lexsort((rng.random(count), ~has_b))
    row = np.argsort(order)[row]  # argsort gives the place of each row in that order
  space = layout.max_len - np.bincount(row, pairs.size, count)
  usable = (space >= packing.SHORTEST_PIECE + 2) & (np.bincount(row) < layout.pairs)
  keep = _rows_to_keep(pairs, row, space * usable, rows, layout)
  least = 0  # `keep` stops shrinking there
  if rows is None:  # rows of P short texts are not full: some longer texts in them help
    rows = int(pairs.size.sum() / _FULL / layout.max_len) + 1
    least = keep * 7 // 8 if layout.pairs > 1 else keep

  # The pairs beyond the first `keep` rows are poured into gaps, then into new rows. If that takes
  # too many rows, fewer rows keep their pairs.
  while True:
    is_kept = row < keep
    left = layout.max_len - np.bincount(row[is_kept], pairs.size[is_kept], keep).astype(np.int64)
    slots = layout.pairs - np.bincount(row[is_kept], minlength=keep)
    start, length, into, needed = packing.pour(
        *_stretches(pairs.take(~is_kept), segment_starts), space=left, slots=slots,
        max_len=layout.max_len, max_items=layout.pairs)
    if needed <= rows or keep == least:
      zeros = np.zeros_like(start)
      pieces = Pairs(start, length, zeros, zeros, label=zeros)
      fields = zip(pairs.take(is_kept), pieces)
      return Pairs(*map(np.concatenate, fields)), np.concatenate([row[is_kept], into]), needed
    keep = max(keep - 2 * (needed - rows) - keep // 64, least)
