"""Digests of batches on the host. The split of the rows over processes has no effect."""

import collections
from collections.abc import Sequence
import hashlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np


def batch_digest(batch: Any) -> int:
  """The sum of the hashes of a batch's rows; each row contains its row number.

  The batch is a tree of host arrays [B, ...], the share of one process; arrays of equal B
  are hashed together.
  """
  groups = collections.defaultdict(list)
  for leaf in jax.tree.leaves(batch):
    groups[len(leaf)].append(np.ascontiguousarray(leaf))
  rows = (b''.join(leaf[i].tobytes() for leaf in leaves)
          for size, leaves in groups.items() for i in range(size))
  # A sum, so that neither the order of the rows nor their split over processes matters.
  return sum(int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), 'little')
             for row in rows) % 2**64


def global_digests(digests: Sequence[int], first: bool) -> list[str]:
  """The digests of whole batches, in hexadecimal; all processes must call it.

  `digests` are the digests of this process's shares; `first` is True in the first of the
  processes that have the same share.
  """
  mine = np.array(digests, np.uint64) * np.uint64(first)
  # As 32-bit halves, because JAX has no 64-bit integers by default.
  if jax.process_count() > 1:
    halves = multihost_utils.process_allgather(mine.view(np.uint32))
    mine = np.asarray(halves).reshape(jax.process_count(), -1).view(np.uint64).sum(0)
  return [f'{int(digest):016x}' for digest in mine]
