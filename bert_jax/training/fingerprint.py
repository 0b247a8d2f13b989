"""Fingerprints of arrays on devices and digests of batches on the host.

A fingerprint is equal on every mesh, and different after any change of a single element. Every
element is a word of 32 bits. It is mixed with its index in the whole array, and the mixed words are
summed modulo 2^32. Mixing is a bijection of the word: one changed word always shows, several
changed words escape with a chance of 2^-32. Hashes of files would change with the sharding.

A digest has 64 bits for a batch: equal digests mean equal rows, on any processes.
"""

import collections
from collections.abc import Sequence
import functools
import hashlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np


def _mixed_sum(x: jax.Array) -> jax.Array:
  words = jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(x.shape):
    index = index * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  # The finaliser of MurmurHash3.
  h = words.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
  h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
  h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
  h ^= h >> 16
  if x.ndim:  # XLA:CPU computes a sum over the first axis in vectors; the barrier keeps it apart
    h = jax.lax.optimization_barrier(jnp.sum(h, 0, dtype=jnp.uint32))
  return jnp.sum(h, dtype=jnp.uint32)


@functools.cache
def _summing(mesh: jax.sharding.Mesh | None):
  """The jitted sum over a whole array; every process gets the result."""
  everywhere = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(_mixed_sum, out_shardings=everywhere)


def named_leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths: {'params/bert/pooler/bias': leaf, ...}."""
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def of(tree: Any) -> dict[str, str]:
  """The fingerprint of each array of a tree, in hexadecimal; waits for them."""
  def fingerprint(x: Any) -> str:
    mesh = getattr(getattr(x, 'sharding', None), 'mesh', None)
    return f'{int(_summing(mesh)(x)):08x}'

  # One after another: many small collectives in flight starve each other on a CPU of few cores.
  return {name: fingerprint(x) for name, x in named_leaves(tree).items()}


def batch_digest(batch: Any) -> int:
  """The sum of the hashes of a batch's rows, which contain their own numbers.

  The batch is a tree of host arrays [B, ...], one process's share; arrays of equal B are joined.
  """
  groups = collections.defaultdict(list)
  for leaf in jax.tree.leaves(batch):
    groups[len(leaf)].append(np.ascontiguousarray(leaf))
  rows = (b''.join(leaf[i].tobytes() for leaf in leaves)
          for size, leaves in groups.items() for i in range(size))
  return sum(int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), 'little')
             for row in rows) % 2**64


def global_digests(digests: Sequence[int], first: bool) -> list[str]:
  """The digests of whole batches, in hexadecimal; all processes have to call it.

  `digests` are those of this process's shares, `first` is True in the first process of a share.
  """
  mine = np.array(digests, np.uint64) * np.uint64(first)
  if jax.process_count() > 1:  # as 32-bit halves: JAX has no 64-bit integers by default
    halves = multihost_utils.process_allgather(mine.view(np.uint32))
    mine = np.asarray(halves).reshape(jax.process_count(), -1).view(np.uint64).sum(0)
  return [f'{int(digest):016x}' for digest in mine]
