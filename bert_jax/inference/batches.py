"""Texts of mixed length -> packed batches of a few fixed shapes.

Short texts share a row, isolated from each other by the pair index, as in training: no padding to
speak of, and one compilation serves them all.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data import packing
from bert_jax.model.encoder import Batch

_TEXTS = 16  # P: texts in a row at most
_SHARED = 64  # texts up to this length share rows of this length
_SHORTEST = 32  # the shortest row


class Row(NamedTuple):
  """One text or pair, with the special tokens."""

  ids: Sequence[int]
  type_ids: Sequence[int]


class Packed(NamedTuple):
  """A batch of packed texts."""

  batch: Batch  # [R, L]
  starts: np.ndarray  # [R, P] int32 where each text begins; 0 where there is none
  index: np.ndarray  # [R, P] int64 which text it is; -1 where there is none


def _power(n: int) -> int:
  """The smallest power of two that is not below n."""
  return 1 << max(n - 1, 0).bit_length()


def _rows(n: int) -> int:
  """The rows of a last batch that has to hold n: a power of two, or a multiple of 8."""
  return 0 if not n else _power(n) if n <= 8 else -(-n // 8) * 8


def _placed(lengths: np.ndarray, longest: int) -> Iterator[
    tuple[int, np.ndarray, np.ndarray, int]]:
  """(row length, the texts in rows of it, the row of each, number of rows).

  Long rows first: what they leave free is filled with short texts.
  """
  left = np.arange(len(lengths))
  while left.size:
    power = min(_power(int(lengths[left].max())), longest)
    length = max(power, min(_SHORTEST, longest))
    row_of, count = packing.pack(lengths[left], length, _TEXTS,
                                 fillers=power // 2 if power > _SHARED else 0)
    yield length, left[row_of >= 0], row_of[row_of >= 0], count
    left = left[row_of < 0]


def pack(rows: Sequence[Row], pad_id: int, longest: int, tokens: int) -> Iterator[Packed]:
  """Packs texts into batches, in no particular order.

  Args:
    rows: of at least one token and at most `longest`.
    pad_id: what padding is.
    longest: the longest row that may be.
    tokens: of a batch at most, padding included.
  """
  lengths = np.array([len(row.ids) for row in rows])
  for length, members, row_of, count in _placed(lengths, longest):
    sizes = lengths[members]
    order = np.argsort(row_of, kind='stable')
    members, sizes, row_of = members[order], sizes[order], row_of[order]
    first = np.searchsorted(row_of, np.arange(count))  # [rows] the first text of each row
    slot = np.arange(len(members)) - first[row_of]
    before = np.cumsum(sizes) - sizes
    start = before - before[first][row_of]
    at = np.arange(sizes.sum()) + np.repeat(row_of * length + start - before, sizes)  # flat

    step = max(tokens // length, 1)
    padded = count - count % step + _rows(count % step)
    flat = np.zeros((4, padded * length), np.int32)
    flat[0] = pad_id
    flat[0, at] = np.concatenate([rows[i].ids for i in members])
    flat[1, at] = np.concatenate([rows[i].type_ids for i in members])
    flat[2, at] = np.arange(sizes.sum()) - np.repeat(before, sizes)
    flat[3, at] = np.repeat(slot + 1, sizes)
    arrays = flat.reshape(4, padded, length)
    starts = np.zeros((padded, _TEXTS), np.int32)
    index = np.full((padded, _TEXTS), -1, np.int64)
    starts[row_of, slot], index[row_of, slot] = start, members
    for i in range(0, padded, step):
      yield Packed(Batch(*arrays[:, i:i + step]), starts[i:i + step], index[i:i + step])
