"""Vectors in fewer bytes: int8 with a range for each entry, or one bit for each entry.

The arrays equal `quantize_embeddings` of sentence-transformers: int8 divides the
range of each entry into 255 steps; binary packs eight signs into a byte, minus 128.
"""

from collections.abc import Callable

import numpy as np

from bert_jax.errors import require

PRECISIONS = ('float32', 'int8', 'binary')


def check(precision: str, width: int):
  """Raises UserError if vectors of this width do not fit the precision."""
  require(precision != 'binary' or width % 8 == 0,
          f'--precision=binary packs eight entries into a byte: vectors of {width} do not fit')


def ranges_of(vectors: np.ndarray) -> np.ndarray:
  """Returns the smallest and the largest value of each entry: [n, D] -> [2, D]."""
  return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def quantize(vectors: np.ndarray, precision: str,
             ranges: np.ndarray | None = None) -> np.ndarray:
  """Quantizes vectors.

  Args:
    vectors: [n, D] float32.
    precision: one of PRECISIONS.
    ranges: [2, D], for int8.

  Returns:
    [n, D] int8, [n, D / 8] int8 for binary, or `vectors`.
  """
  if precision == 'float32':
    return vectors
  if precision == 'binary':
    return (np.packbits(vectors > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)
  assert ranges is not None, precision
  low, high = ranges
  steps = np.maximum((high - low) / 255, np.finfo(np.float32).tiny)
  # Values outside the ranges become the nearest int8 value.
  return np.clip(np.floor((vectors - low) / steps) - 128, -128, 127).astype(np.int8)


def restorer(precision: str,
             ranges: np.ndarray | None = None) -> Callable[[np.ndarray], np.ndarray]:
  """Returns a function from quantized vectors to float32 vectors [n, D].

  A bit becomes 1 or -1.
  """
  if precision == 'binary':
    return lambda x: 2 * np.unpackbits((x.astype(np.int16) + 128).astype(np.uint8),
                                       axis=-1).astype(np.float32) - 1
  assert ranges is not None, precision
  low, high = ranges
  return lambda x: ((x.astype(np.float32) + 128) * ((high - low) / 255) + low).astype(
      np.float32)
