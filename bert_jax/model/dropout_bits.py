"""Random bits for dropout: a hash of a key and a position, which is much cheaper than threefry.

Dropout draws a 32-bit word for every activation, and again where the backward pass recomputes it.
The words need not be cryptographically strong. A word depends on the key and its position alone:
every mesh drops the same activations, and each chip draws only its own share.
"""

import jax
from jax.extend import random as extend
import jax.numpy as jnp
import numpy as np


def mix(x: jax.Array) -> jax.Array:
  """Permutes the 32-bit words; any bit changes each bit of the result half the time.

  Two multiplications and three shifts, found by a search for the least bias: `lowbias32` by Chris
  Wellons, https://nullprogram.com/blog/2018/07/31/.
  """
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
  return x ^ (x >> np.uint32(16))


def words(key: tuple[jax.Array, jax.Array], outer: jax.Array, inner: jax.Array) -> jax.Array:
  """Computes a uint32 word for each place; a place is two 32-bit numbers, which broadcast."""
  return mix(mix(inner ^ key[0]) + mix(outer ^ key[1]))


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  if width != 32:
    raise NotImplementedError(f'{width} bits: dropout takes words of 32')
  outer, *rest = shape or (1,)
  inner = jnp.zeros((1, *rest), jnp.uint32)
  for axis, size in enumerate(rest, 1):
    inner = inner * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, (1, *rest), axis)
  outer = jax.lax.broadcasted_iota(jnp.uint32, (outer, *[1] * len(rest)), 0)
  return words((key[0], key[1]), outer, inner).reshape(shape)


def _as_threefry(function):
  """Derives keys from keys as threefry does: that is rare, and has to be good."""
  return lambda key, *arguments: jax.random.key_data(
      function(jax.random.wrap_key_data(key, impl='threefry2x32'), *arguments))


_HASH = extend.define_prng_impl(
    key_shape=(2,), split=_as_threefry(jax.random.split), fold_in=_as_threefry(jax.random.fold_in),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl='threefry2x32')),
    random_bits=_random_bits, name='place_hash', tag='place')


def key_of(key: jax.Array) -> jax.Array:
  """Returns the dropout key of a model, with the data of a threefry key."""
  return jax.random.wrap_key_data(jax.random.key_data(key), impl=_HASH)


def microbatch_key(key: jax.Array, row: jax.Array) -> jax.Array:
  """Returns the dropout key of a microbatch.

  Args:
    key: the threefry key of the step, the same for all of its microbatches.
    row: [R] int32, the numbers of the rows of the microbatch: the first tells it apart.
  """
  # row[0] is the same number, but takes the chips several messages to learn.
  return key_of(jax.random.fold_in(key, jnp.min(row)))
