"""Fingerprints of arrays: the same on every mesh, another after any change of a single element.

Every element is a word of 32 bits, mixed with its index in the whole array; the words are summed,
which wraps around. Mixing is a bijection of the word, so that one changed word always shows, and
several escape with a chance of 2^-32. File hashes would not survive being resharded.
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
  # The finaliser of MurmurHash3.
  h = words.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
  h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
  h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
  h ^= h >> 16
  if x.ndim:  # rows first, which the cores of a CPU share, and not merged with what follows
    h = jax.lax.optimization_barrier(jnp.sum(h, -1, dtype=jnp.uint32))
  return jnp.sum(h, dtype=jnp.uint32)


@functools.cache
def _summing(mesh: jax.sharding.Mesh | None):
  """Compiled for each shape; of several processes each gets the sum of the whole array."""
  everywhere = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(_mixed_sum, out_shardings=everywhere)


def _name(path: tuple) -> str:
  return '/'.join(str(next(getattr(key, a) for a in ('key', 'name', 'idx') if hasattr(key, a)))
                  for key in path)


def named_leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by the names on the way to each, joined with slashes."""
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def of(tree: Any) -> dict[str, str]:
  """The fingerprint of each array of a tree, in hexadecimal; waits until they are computed."""
  leaves = named_leaves(tree)
  meshes = {name: getattr(getattr(x, 'sharding', None), 'mesh', None) for name, x in leaves.items()}
  # One after another: many small collectives in flight starve each other on a CPU of few cores.
  return {name: f'{int(_summing(meshes[name])(x)):08x}' for name, x in leaves.items()}
