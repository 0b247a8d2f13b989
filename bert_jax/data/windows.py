"""The pairs of one window of an epoch: chunks of documents, next sentences, rows.

A window is a few thousand chunks from blocks all over the corpus. Its documents are cut into chunks
of whole sentences, each chunk into A and B between two sentences. Half of these pairs exchange
their B's with pairs of other documents whose B is about as long, so that length does not tell the
label. Pairs and sentences without a partner are packed into rows. The number of rows is known
beforehand (it follows from the window's token count): any row of any epoch is reachable at once.
The text of rows beyond that number fills the gaps in the others, in pieces that serve masked LM
only: cut inside a sentence, a pair would tell its label. Every token is used once.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import packing
from bert_jax.data.records import Records

_MOST_PAIRS = 8  # in a row
SEQUENCES = ('next_sentence', 'sentence_order', 'full_sentences')
SHORT_SHARE = 0.1  # of the chunks get a random length, as published (short_seq_prob)
_FULL = 0.98  # of the rows, where that costs an eighth of the pairs at most
_EXCHANGE_ROUNDS = 4  # partners of the same document are tried anew this often


class Layout(NamedTuple):
  """What rows look like."""

  max_len: int  # L
  pairs: int  # P, the most in a row; 1 = unpacked
  sequences: str = 'next_sentence'  # one of SEQUENCES

  @classmethod
  def create(cls, max_len: int, pack: bool, sequences: str) -> 'Layout':
    """Packed rows of up to 8 pairs, fewer in rows that are too short for them; or one in each."""
    return cls(max_len, max(min(_MOST_PAIRS, max_len // 8), 1) if pack else 1, sequences)

  @property
  def special(self) -> int:
    """Special tokens of a pair: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] for full sentences."""
    return 2 if self.sequences == 'full_sentences' else 3


class Window(NamedTuple):
  """The sentences of some blocks, on a token axis of their own."""

  bounds: np.ndarray  # [S + 1] where each sentence starts on that axis, and the end of the last
  segments: np.ndarray  # [E + 1] the sentence at which each document, or part of one, starts
  document: np.ndarray  # [E] which document of the corpus that is
  offset: np.ndarray  # [E] what to add to get a position in the corpus


class Pairs(NamedTuple):
  """The pairs of a window, and the rows that they are packed into. [C] int64 each."""

  a_start: np.ndarray  # position in the corpus
  a_length: np.ndarray
  b_start: np.ndarray
  b_length: np.ndarray  # 0 where there is only one segment, about which nothing is asked
  label: np.ndarray  # 1 = B is from another document, or comes before A; 0 = B follows A, or no B
  row: np.ndarray
  rows: int  # how many rows they need


def read_window(records: Records, blocks: np.ndarray, layout: Layout) -> Window:
  """Reads the index of some blocks.

  A sentence that is longer than a row becomes segments of its own. So does the first sentence of a
  document where the order of sentences is asked: how it is written tells that it comes first.
  """
  lengths, segments, documents, offsets, opening = [], [], [], [], []
  sentences = tokens = 0
  for number in blocks.tolist():
    block, starts, document = records.block(number)
    opening.append(starts + sentences)
    if not len(starts) or starts[0]:  # it begins inside a document
      starts = np.concatenate([[0], starts])
    lengths.append(block)
    segments.append(starts + sentences)
    documents.append(document + np.arange(len(starts)))
    offsets.append(np.full(len(starts), records.blocks[number, 0] - tokens))
    sentences += len(block)
    tokens += int(records.blocks[number + 1, 0] - records.blocks[number, 0])
  sentence, longest = np.concatenate(lengths).astype(np.int64), layout.max_len - 2
  pieces = -(-sentence // longest)
  first = np.concatenate([[0], np.cumsum(pieces)])
  length = np.full(first[-1], longest)
  length[first[1:] - 1] = sentence - (pieces - 1) * longest
  alone = np.repeat(pieces > 1, pieces)
  if layout.sequences == 'sentence_order':
    alone[first[np.concatenate(opening)]] = True
  of_document = first[np.concatenate(segments)]
  begins = np.zeros(len(length) + 1, bool)  # a segment
  begins[of_document] = True
  begins[:-1] |= alone
  begins[1:] |= alone
  begins[-1] = True
  begins = np.flatnonzero(begins)
  source = np.searchsorted(of_document, begins[:-1], side='right') - 1
  return Window(np.concatenate([[0], np.cumsum(length)]), begins,
                np.concatenate(documents)[source], np.concatenate(offsets)[source])


def _chunks(window: Window, layout: Layout,
            rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts segments into runs of sentences that fit into a row; a lone one always does.

  All segments advance by one chunk at a time together. The first chunk of each is shorter by
  chance, so that the cuts fall elsewhere every epoch, but no shorter than what would be left over
  at the end: the document takes no more chunks for it. The sentence behind a chunk is long, or it
  would be part of it: every second segment is cut from its end, so that the order of two sentences
  does not show in their lengths.

  Returns:
    First sentence, last sentence + 1 and segment of each chunk, in order: [C] int64 each.
  """
  bounds, first, last = window.bounds, window.segments[:-1].copy(), window.segments[1:].copy()
  longest = layout.max_len - layout.special
  tokens = bounds[last] - bounds[first]
  typical = max(int(0.88 * longest), 1)  # how full whole sentences make a chunk
  left_over = tokens - np.maximum(-(-tokens // typical) - 1, 0) * typical
  budget = rng.integers(np.minimum(left_over, longest), longest, endpoint=True)
  backward = rng.random(len(first)) < 0.5
  alive = np.flatnonzero(first < last)
  found = []
  while len(alive):
    low, high, back = first[alive], last[alive], backward[alive]
    short = rng.integers(1, longest, len(alive), endpoint=True)
    room = np.where(rng.random(len(alive)) < SHORT_SHARE, short, budget[alive])
    ahead = np.searchsorted(bounds, bounds[low] + room, side='right') - 1
    behind = np.searchsorted(bounds, bounds[high] - room)
    begin = np.where(back, np.clip(behind, low, high - 1), low)
    end = np.where(back, high, np.clip(ahead, low + 1, high))
    found.append((begin, end, alive))
    first[alive], last[alive] = np.where(back, low, end), np.where(back, begin, high)
    budget[alive] = longest
    alive = alive[first[alive] < last[alive]]
  begin, end, segment = (np.concatenate(parts) for parts in zip(*found))
  order = np.argsort(begin)
  return begin[order], end[order], segment[order]


def _exchange(a_length: np.ndarray, b_length: np.ndarray, document: np.ndarray, longest: int,
              rng: np.random.Generator) -> np.ndarray:
  """Which pair's B each pair gets: [C] int64, its own index where B stays.

  Pairs are sorted by the length of B, and neighbours of different documents become couples; as
  many couples, drawn by chance, swap their B's as make half of all pairs. Label and length are
  independent but for the few couples that would not fit into a row.

  Args:
    a_length, b_length, document: [C].
    longest: ordinary tokens of a pair.
    rng: decides.
  """
  count = len(b_length)
  couples = []
  single = np.arange(count)
  for _ in range(_EXCHANGE_ROUNDS):
    order = single[np.lexsort((rng.random(len(single)), b_length[single]))]
    left, right = order[0:len(order) - 1:2], order[1::2]
    fits = ((document[left] != document[right])
            & (a_length[left] + b_length[right] <= longest)
            & (a_length[right] + b_length[left] <= longest))
    couples.append(np.stack([left[fits], right[fits]], 1))
    single = np.concatenate([left[~fits], right[~fits], order[2 * len(left):]])
  couples = np.concatenate(couples)
  # An odd quarter is rounded up or down by chance: small windows are fair on average.
  swaps = min(int(count / 4 + rng.random()), len(couples))
  left, right = rng.permutation(couples)[:swaps].T
  source = np.arange(count)
  source[left], source[right] = right, left
  return source


class Chunks(NamedTuple):
  """The fields of `Pairs` before their rows are known, and the segments that they are from."""

  a_start: np.ndarray
  a_length: np.ndarray
  b_start: np.ndarray
  b_length: np.ndarray
  label: np.ndarray
  a_segment: np.ndarray
  b_segment: np.ndarray

  @property
  def size(self) -> np.ndarray:
    """Tokens with special ones: [C] int64."""
    return self.a_length + self.b_length + 2 + (self.b_length > 0)


def _labelled(window: Window, layout: Layout, rng: np.random.Generator) -> Chunks:
  """The chunks of a window, those of two sentences or more cut into A and B, with labels."""
  first, last, segment = _chunks(window, layout, rng)
  if layout.pairs > 1:  # equally long chunks are packed in random order
    order = rng.permutation(len(first))
    first, last, segment = first[order], last[order], segment[order]
  asks = (last - first > 1) & (layout.sequences != 'full_sentences')
  middle = np.where(asks, rng.integers(first + 1, np.maximum(last, first + 2)), last)
  start, middle, end = (window.bounds[x] + window.offset[segment] for x in (first, middle, last))
  a_start, a_length, b_start, b_length = start, middle - start, middle, end - middle
  label, b_segment = np.zeros_like(first), segment.copy()
  asked = np.flatnonzero(asks)
  if layout.sequences == 'sentence_order':
    swap = asked[rng.random(len(asked)) < 0.5]
    a_start[swap], b_start[swap] = b_start[swap], a_start[swap]
    a_length[swap], b_length[swap] = b_length[swap], a_length[swap]
    label[swap] = 1
  else:
    source = asked[_exchange(a_length[asked], b_length[asked], window.document[segment[asked]],
                             layout.max_len - layout.special, rng)]
    label[asked] = source != asked
    for field in (b_start, b_length, b_segment):
      field[asked] = field[source]
  return Chunks(a_start, a_length, b_start, b_length, label, segment, b_segment)


def _kept_rows(row: np.ndarray, tokens: np.ndarray, space: np.ndarray, rows: int | None,
               layout: Layout) -> int:
  """How many rows keep their pairs, so that the text of the others fits into the gaps.

  Args:
    row: [C] of each chunk.
    tokens: [C] of each chunk.
    space: [R] that each row has left for a piece, 0 where it has none.
    rows: that may be used; None = as few as keep all their pairs.
    layout: of the rows.
  """
  count = len(space)
  text = np.bincount(row, tokens + 2, count)  # what is poured brings its [CLS] and [SEP]
  text = text.sum() - np.concatenate([[0], np.cumsum(text)])
  room = np.concatenate([[0], np.cumsum(space)])
  if rows is None:
    return int(np.argmax(room >= text))
  kept = np.arange(min(count, rows) + 1)
  fits = room[kept] + (rows - kept) * layout.max_len >= text[kept]
  return int(np.flatnonzero(fits).max(initial=0))


def _stretches(chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
  """Where the text of some chunks starts and ends, neighbours joined: [T] int64 each."""
  start = np.concatenate([chunks.a_start, chunks.b_start])
  end = start + np.concatenate([chunks.a_length, chunks.b_length])
  segment = np.concatenate([chunks.a_segment, chunks.b_segment])
  order = np.argsort(start)
  order = order[(end > start)[order]]
  start, end, segment = start[order], end[order], segment[order]
  begins = np.ones(len(order), bool)
  begins[1:] = (start[1:] != end[:-1]) | (segment[1:] != segment[:-1])
  return start[begins], end[np.roll(begins, -1)]


def _fill(chunks: Chunks, row: np.ndarray, keep: int, layout: Layout) -> Pairs:
  """Keeps the chunks of the first `keep` rows, and pours the others into gaps, then new rows."""
  kept = row < keep
  space = layout.max_len - np.bincount(row[kept], chunks.size[kept], keep).astype(np.int64)
  slots = layout.pairs - np.bincount(row[kept], minlength=keep)
  start, end = _stretches(Chunks(*(x[~kept] for x in chunks)))
  piece, length, into, rows = packing.pour(start, end, space, slots, layout.max_len, layout.pairs)
  none = np.zeros_like(piece)
  parts = zip((*(x[kept] for x in chunks[:5]), row[kept]),
              (piece, length, none, none, none, into))
  return Pairs(*map(np.concatenate, parts), rows)


def make_pairs(records: Records, blocks: np.ndarray, layout: Layout, key: tuple[int, ...],
               rows: int | None = None) -> Pairs:
  """The pairs of a window.

  Args:
    records: the corpus.
    blocks: [] int64, the blocks of the window.
    layout: of the rows.
    key: seeds the generator.
    rows: that the window has; None = as few as keep most pairs. The fewer rows, the more text is
      poured; with 0 all of it is, the same way every time.
  """
  rng = np.random.default_rng(key)
  chunks = _labelled(read_window(records, np.sort(blocks), layout), layout, rng)
  row, count = packing.pack(chunks.size, layout.max_len, layout.pairs)
  if layout.pairs > 1:  # any row may be poured, but first those that ask about nothing
    pairs = np.bincount(row, chunks.b_length, count)
    row = np.argsort(np.lexsort((rng.random(count), pairs == 0)))[row]
  space = layout.max_len - np.bincount(row, chunks.size, count)
  usable = (space >= packing.SHORTEST_PIECE + 2) & (np.bincount(row) < layout.pairs)
  keep = _kept_rows(row, chunks.a_length + chunks.b_length, space * usable, rows, layout)
  least = 0
  if rows is None:  # rows of P short texts are not full: some long ones beside them help
    rows = int(chunks.size.sum() / _FULL / layout.max_len) + 1
    least = keep * 7 // 8 if layout.pairs > 1 else keep
  while True:
    pairs = _fill(chunks, row, keep, layout)
    if pairs.rows <= rows or keep == least:
      return pairs
    keep = max(keep - 2 * (pairs.rows - rows) - keep // 64, least)
