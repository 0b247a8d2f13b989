"""Fingerprints of arrays on devices.

A fingerprint is equal on every mesh, and differs after any change of a single element.
Every element is a word of up to 32 bits. Each word is mixed with its index in the whole
array, and the mixed words are summed modulo 2^32. Mixing is a bijection of the word: one
changed word always changes the sum, and several changed words go unnoticed with a
probability of 2^-32. Hashes of files would change with the sharding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def _mixed_sum(x: jax.Array) -> jax.Array:
  words = jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}'))
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(x.shape):
    index = index * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  # The finalizer of MurmurHash3.
  h = words.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
  h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
  h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
  h ^= h >> 16
  # XLA:CPU vectorizes a sum over the first axis; the barrier keeps the two sums separate.
  if x.ndim:
    h = jax.lax.optimization_barrier(jnp.sum(h, 0, dtype=jnp.uint32))
  return jnp.sum(h, dtype=jnp.uint32)


@functools.cache
def _summing(mesh: jax.sharding.Mesh | None):
  """The jitted sum over a whole array; every process gets the result."""
  replicated = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(_mixed_sum, out_shardings=replicated)


def named_leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their paths: {'params/bert/pooler/bias': leaf, ...}."""
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def of(tree: Any) -> dict[str, str]:
  """The fingerprint of each array of a tree, in hexadecimal; waits for them."""

  def fingerprint(x: Any) -> str:
    mesh = getattr(getattr(x, 'sharding', None), 'mesh', None)
    return f'{int(_summing(mesh)(x)):08x}'

  # One at a time: small collectives in flight starve each other on a CPU with few cores.
  return {name: fingerprint(x) for name, x in named_leaves(tree).items()}
