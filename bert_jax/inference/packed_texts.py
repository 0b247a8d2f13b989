"""Packs texts of mixed length into batches of a few fixed shapes.

Short texts share a row, isolated by their text ids, as in training. There is little
padding, and a few compilations serve all batches.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from bert_jax.data import inputs as inputs_lib
from bert_jax.data import packing

# Bounds on the slots of a row (P). A head computes empty slots too.
_FEWEST_SLOTS, _MOST_SLOTS = 4, 16
# A longer text gets a row of the next power of two, and short texts only fill its rest.
# Texts up to this length, in tokens, all share rows of one length.
_SHARED_LENGTH = 64
_SHORTEST_ROW = 32


def _power(n: int) -> int:
  """Returns the smallest power of two that is at least n."""
  return 1 << max(n - 1, 0).bit_length()


def _rows(n: int, most: int) -> int:
  """Rounds up the n rows of a batch of at most `most` rows.

  Small n become a power of two, others a multiple of an eighth of `most`. Each number of
  rows is another compilation, which takes longer than a few empty rows.
  """
  if not n:
    return 0
  unit = max(most // 8, 8)
  return min(_power(n) if n <= unit else -(-n // unit) * unit, most)


def pack(inputs: Sequence[inputs_lib.Input], pad_id: int, longest: int,
         most_tokens: int) -> Iterator[inputs_lib.InputRows]:
  """Packs texts into batches, in no particular order.

  Args:
    inputs: texts of at least one token and at most `longest`.
    pad_id: the token of padding.
    longest: upper bound on the length of a row.
    most_tokens: upper bound on the tokens of a batch, padding included.
  """
  lengths = np.array([len(text.ids) for text in inputs])
  hides = any(text.hidden for text in inputs)
  left = np.arange(len(inputs))
  # Long rows come first: short texts fill the rest of them.
  while left.size:
    power = min(_power(int(lengths[left].max())), longest)
    length = max(power, min(_SHORTEST_ROW, longest))
    row_of, count = packing.pack(lengths[left], length, _MOST_SLOTS,
                                 fillers=power // 2 if power > _SHARED_LENGTH else 0)
    members, left, row_of = left[row_of >= 0], left[row_of < 0], row_of[row_of >= 0]
    # Every batch but the last has `step` rows: few shapes, few compilations.
    step = max(most_tokens // length, 1)
    rows = count - count % step + _rows(count % step, step)
    slots = max(_power(int(np.bincount(row_of).max())), _FEWEST_SLOTS)
    placed = inputs_lib.place_in_rows(inputs, members, row_of, rows=rows, length=length,
                                      slots=slots, pad_id=pad_id, hides=hides)
    for i in range(0, rows, step):
      yield jax.tree.map(lambda x: x[i:i + step], placed)
