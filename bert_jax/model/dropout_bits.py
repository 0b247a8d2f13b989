"""Random bits for dropout: a hash of a key and a position, much cheaper than threefry.

Dropout draws a 32-bit word for every activation, and draws it again where the backward
pass recomputes the activation. The words need not be cryptographically strong. A word
depends only on the key and on its position: every mesh drops the same activations, and
each chip draws only its own share.
"""

import functools

import jax
from jax.extend import random as extend
import jax.numpy as jnp
import numpy as np


def mix(x: jax.Array) -> jax.Array:
  """Hashes uint32 words one-to-one; an input bit flips each output bit half the time.

  Two multiplications and three shifts, the least biased hash that a search found:
  `lowbias32` by Chris Wellons, https://nullprogram.com/blog/2018/07/31/.
  """
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
  return x ^ (x >> np.uint32(16))


def hash_index(index: jax.Array, word: jax.Array) -> jax.Array:
  """Hashes uint32 indices with one word of a key."""
  return mix(index ^ word)


def words(key: tuple[jax.Array, jax.Array], outer: jax.Array,
          inner: jax.Array) -> jax.Array:
  """Computes a uint32 word for each position (outer, inner); the two arrays broadcast."""
  return mix(hash_index(inner, key[0]) + hash_index(outer, key[1]))


def keeps_weight(key: tuple[jax.Array, jax.Array], row: jax.Array, head: jax.Array,
                 query: jax.Array, key_index: jax.Array, rate: float) -> jax.Array:
  """True for the attention weights that dropout keeps, in the kernels.

  They depend only on the key and on the indices of row, head, query and key in the batch:
  every mesh and every kernel drops the same weights.

  Args:
    key: the two uint32 words of a key.
    row: uint32 index, counted over all devices.
    head: uint32 index, counted over all devices.
    query: int32 places in the row: [queries, 1].
    key_index: int32 places in the row: [1, keys].
    rate: share of dropped weights.

  Returns:
    [queries, keys] bool.
  """
  of_query = mix((row * np.uint32(1 << 16) + head) ^ key[1])
  of_key = mix(of_query ^ key[0])
  # Hash each query once, each key once, and each sum of the two once. Two hashes for each
  # weight would take a quarter of a kernel's time.
  query, key_index = (x.astype(jnp.uint32) for x in (query, key_index))
  drawn = mix(mix(query ^ of_query) + mix(key_index ^ of_key))
  # A TPU compares only signed words.
  return drawn.astype(jnp.int32) <= np.int32(int((1 - rate) * 2**32) - 2**31 - 1)


def keeps_activation(of_row: jax.Array, of_place: jax.Array, rate: float) -> jax.Array:
  """For kernels: True for the activations that `nn.Dropout` keeps with a key of `key_of`.

  Args:
    of_row: `hash_index` of the rows, counted over all devices, with the key's second
      word.
    of_place: `hash_index` of the places in a row, numbered over all its axes, with the
      key's first word. A kernel computes it once for all rows.
    rate: share of dropped activations.
  """
  # `jax.random.bernoulli` compares the upper 23 bits as a fraction with a float32.
  kept = int(np.ceil(np.float32(1 - rate) * 2**23))
  return mix(of_place + of_row) <= np.uint32((kept << 9) - 1)


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  if width != 32:
    raise NotImplementedError(f'{width} bits: dropout draws words of 32 bits')
  outer, *rest = shape or (1,)
  # Two indices, because a single 32-bit index over the whole batch could overflow.
  inner = jnp.zeros((1, *rest), jnp.uint32)
  for axis, size in enumerate(rest, 1):
    inner = (inner * np.uint32(size)
             + jax.lax.broadcasted_iota(jnp.uint32, (1, *rest), axis))
  outer = jax.lax.broadcasted_iota(jnp.uint32, (outer, *[1] * len(rest)), 0)
  return words((key[0], key[1]), outer, inner).reshape(shape)


def _by_threefry(function, key: jax.Array, *arguments) -> jax.Array:
  """Derives keys by threefry: derivations are rare and must be strong."""
  return jax.random.key_data(
      function(jax.random.wrap_key_data(key, impl='threefry2x32'), *arguments))


_HASH = extend.define_prng_impl(
    key_shape=(2,), split=functools.partial(_by_threefry, jax.random.split),
    fold_in=functools.partial(_by_threefry, jax.random.fold_in),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl='threefry2x32')),
    random_bits=_random_bits, name='place_hash', tag='place')


def key_of(key: jax.Array) -> jax.Array:
  """Converts a threefry key to a dropout key, whose bits come from the hash."""
  return jax.random.wrap_key_data(jax.random.key_data(key), impl=_HASH)


def microbatch_key(key: jax.Array, row: jax.Array) -> jax.Array:
  """Returns the dropout key of a microbatch.

  Args:
    key: the threefry key of the step, the same for all of its microbatches.
    row: [R] int32, the row numbers of the microbatch; the lowest one identifies it.
  """
  # row[0] is the same number, but reading one element of a sharded array costs several
  # messages between chips.
  return key_of(jax.random.fold_in(key, jnp.min(row)))
