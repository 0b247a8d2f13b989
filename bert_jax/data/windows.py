"""The pairs of one window of an epoch: chunks of documents, next sentences, rows.

A window is a few thousand chunks from blocks all over the corpus. Its documents are cut into chunks
of whole sentences, every chunk into A and B; half of the chunks then exchange their B's with chunks
of other documents whose B is about as long, so that length does not tell the label and every
sentence is used once. What results is packed into a number of rows that is known beforehand (it
follows from the window's token count): that is what makes any row of any epoch reachable at once.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.data import packing
from bert_jax.data.records import Records

_MOST_PAIRS = 8  # in a row
SEQUENCES = ('next_sentence', 'sentence_order', 'full_sentences')
# Packed rows need short pairs to fill them up: at 128 every second cut, at 512 every fourth, leaves
# a chunk of at most _SHORT_LENGTH of a row (the original has its short_seq_prob of 0.1). Measured
# on Wikipedia: rows 97% and 99% full instead of 88% and 96%, at 10% and 5% shorter context.
# Unpacked rows hold the same pairs.
_SHORT_SHARE = 5.5  # divided by the root of max_len
_SHORT_LENGTH = 0.3
_SHORTEST = 4  # tokens, the least that a chunk is cut to by chance
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

  @property
  def longest(self) -> int:
    """Ordinary tokens that a row can hold in one pair."""
    return self.max_len - self.special


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
  b_length: np.ndarray  # 0 where there is only one segment
  label: np.ndarray  # 1 = B is from another document, or comes before A; 0 = B follows A
  row: np.ndarray
  rows: int  # how many rows they need


def read_window(records: Records, blocks: np.ndarray, longest: int) -> Window:
  """Reads the index of some blocks; sentences above `longest` become pieces of that length."""
  lengths, segments, documents, offsets = [], [], [], []
  sentences = tokens = 0
  for number in blocks.tolist():
    block, starts, document = records.block(number)
    if not len(starts) or starts[0]:  # it begins inside a document
      starts = np.concatenate([[0], starts])
    lengths.append(block)
    segments.append(starts + sentences)
    documents.append(document + np.arange(len(starts)))
    offsets.append(np.full(len(starts), records.blocks[number, 0] - tokens))
    sentences += len(block)
    tokens += int(records.blocks[number + 1, 0] - records.blocks[number, 0])
  length = np.concatenate(lengths).astype(np.int64)
  segments = np.append(np.concatenate(segments), sentences)
  pieces = -(-length // longest)
  if len(pieces) and pieces.max() > 1:
    first = np.concatenate([[0], np.cumsum(pieces)])
    rest = length - (pieces - 1) * longest
    length = np.full(first[-1], longest)
    length[first[1:] - 1] = rest
    segments = first[segments]
  return Window(np.concatenate([[0], np.cumsum(length)]), segments, np.concatenate(documents),
                np.concatenate(offsets))


def _chunks(bounds: np.ndarray, segments: np.ndarray, layout: Layout,
            rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Cuts segments into runs of units (sentences, or single tokens) that fit into a row.

  All segments advance by one chunk at a time together. The first chunk of each is shorter by
  chance, so that the cuts fall elsewhere every epoch, but no shorter than what would be left over
  at the end: the document takes no more chunks for it.

  Args:
    bounds: [U + 1] tokens at which units start.
    segments: [E + 1] units at which segments start.
    layout: of the rows.
    rng: decides.

  Returns:
    First token, last token + 1 and segment of each chunk, in order: [C] int64 each.
  """
  at, end = segments[:-1].copy(), segments[1:]
  longest = layout.longest
  shortest = min(_SHORTEST, longest)
  tokens = bounds[end] - bounds[at]
  typical = max(int(0.88 * longest), 1)  # how full whole sentences make a chunk
  left_over = tokens - np.maximum(-(-tokens // typical) - 1, 0) * typical
  budget = rng.integers(np.clip(left_over, shortest, longest), longest, endpoint=True)
  alive = np.flatnonzero(at < end)
  found = []
  while len(alive):
    here = at[alive]
    room = budget[alive]
    small = rng.integers(shortest, max(int(_SHORT_LENGTH * longest), shortest), len(alive),
                         endpoint=True)
    room = np.where(rng.random(len(alive)) < _SHORT_SHARE / layout.max_len**0.5, small, room)
    there = np.searchsorted(bounds, bounds[here] + room, side='right') - 1
    there = np.clip(there, here + 1, end[alive])
    found.append((bounds[here], bounds[there], alive))
    at[alive] = there
    budget[alive] = longest
    alive = alive[there < end[alive]]
  first, last, segment = (np.concatenate(parts) for parts in zip(*found))
  order = np.argsort(first)
  return first[order], last[order], segment[order]


def _lend_to_lone_tokens(first: np.ndarray, last: np.ndarray, segment: np.ndarray):
  """Gives chunks of one token a second one from a neighbour, in place: one token makes no pair."""
  same = segment[1:] == segment[:-1]
  lone = np.flatnonzero((last - first)[1:] == 1) + 1
  lone = lone[same[lone - 1] & ((last - first)[lone - 1] > 2)]
  first[lone] -= 1
  last[lone - 1] -= 1
  lone = np.flatnonzero((last - first)[:-1] == 1)
  lone = lone[same[lone] & ((last - first)[lone + 1] > 2)]
  last[lone] += 1
  first[lone + 1] += 1


def _middle(bounds: np.ndarray, first: np.ndarray, last: np.ndarray,
            rng: np.random.Generator) -> np.ndarray:
  """The token at which B begins: between two sentences, or in the middle third of a lone one."""
  low = np.searchsorted(bounds, first, side='right')  # the first bound inside the chunk
  high = np.searchsorted(bounds, last, side='left')  # the first bound that is not
  between = bounds[np.minimum(rng.integers(low, np.maximum(high, low + 1)), len(bounds) - 1)]
  margin = np.maximum((last - first) // 3, 1)  # two words say nothing about what follows
  inside = rng.integers(first + margin, np.maximum(last - margin, first + margin + 1))
  return np.where(high > low, between, inside)


def _exchange(a_length: np.ndarray, b_length: np.ndarray, document: np.ndarray, longest: int,
              equal: bool, rng: np.random.Generator) -> np.ndarray:
  """Which chunk's B each chunk gets: [C] int64, its own index where B stays.

  Chunks are sorted by the length of B, and neighbours of different documents become couples; as
  many couples, drawn by chance, swap their B's as make half of all chunks. Label and length are
  independent but for the few couples that would not fit into a row.

  Args:
    a_length, b_length, document: [C].
    longest: ordinary tokens in a row.
    equal: only couples with equally long B's.
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
    if equal:
      fits &= b_length[left] == b_length[right]
    couples.append(np.stack([left[fits], right[fits]], 1))
    single = np.concatenate([left[~fits], right[~fits], order[2 * len(left):]])
  couples = np.concatenate(couples)
  # An odd quarter is rounded up or down by chance: small windows are fair on average.
  swaps = min(int(count / 4 + rng.random()), len(couples))
  left, right = rng.permutation(couples)[:swaps].T
  source = np.arange(count)
  source[left], source[right] = right, left
  return source


def _pairs(window: Window, layout: Layout, inside: bool, rng: np.random.Generator) -> Pairs:
  """One way to cut and pack a window: between sentences, or also `inside` them.

  Cuts inside sentences leave nothing to chance: the same window needs the same rows every time.
  """
  bounds, segments = window.bounds, window.segments
  if inside:
    segments, units = bounds[segments], np.arange(bounds[-1] + 1)
  else:
    units = bounds
  cutting = np.random.default_rng(0) if inside else rng
  first, last, segment = _chunks(units, segments, layout, cutting)
  if layout.sequences != 'full_sentences':
    _lend_to_lone_tokens(first, last, segment)
    long_enough = last - first > 1  # all but documents of a single token
    first, last, segment = first[long_enough], last[long_enough], segment[long_enough]
  offset = window.offset[segment]
  label = np.zeros(len(first), np.int64)
  if layout.sequences == 'full_sentences':
    a_start, a_length = first + offset, last - first
    b_start, b_length = a_start + a_length, np.zeros_like(a_length)
  else:
    middle = _middle(bounds, first, last, rng)
    a_start, a_length = first + offset, middle - first
    b_start, b_length = middle + offset, last - middle
    if layout.sequences == 'sentence_order':
      swap = rng.random(len(first)) < 0.5
      a_start, b_start = np.where(swap, b_start, a_start), np.where(swap, a_start, b_start)
      a_length, b_length = np.where(swap, b_length, a_length), np.where(swap, a_length, b_length)
      label = swap.astype(np.int64)
    else:
      source = _exchange(a_length, b_length, window.document[segment], layout.longest,
                         inside, rng)
      b_start, b_length = b_start[source], b_length[source]
      label = (source != np.arange(len(source))).astype(np.int64)
  order = rng.permutation(len(first))  # equally long pairs are packed in random order
  parts = [x[order] for x in (a_start, a_length, b_start, b_length, label)]
  row, rows = packing.pack(parts[1] + parts[3] + layout.special, layout.max_len, layout.pairs)
  return Pairs(*parts, row, rows)


def make_pairs(records: Records, blocks: np.ndarray, layout: Layout, key: tuple[int, ...],
               rows: int | None = None, inside: bool = False) -> Pairs:
  """The pairs of a window.

  Args:
    records: the corpus.
    blocks: [] int64, the blocks of the window.
    layout: of the rows.
    key: seeds the generator.
    rows: that the window has; None = as many as it needs. Should it need more, it is cut by another
      chance, and then inside sentences.
    inside: cut inside sentences at once.
  """
  window = read_window(records, np.sort(blocks), layout.longest)
  for attempt in (2,) if inside else range(3):
    rng = np.random.default_rng((*key, attempt))
    pairs = _pairs(window, layout, attempt == 2, rng)
    if rows is None or pairs.rows <= rows:
      break
  return pairs
