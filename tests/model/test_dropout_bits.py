"""Dropout's bits depend only on key and place, and have no detectable pattern."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest
from scipy import stats

from bert_jax.model import dropout_bits
from bert_jax.parallel import mesh as mesh_lib

SHAPE = (64, 128, 64)


def key(i: int = 0):
  return dropout_bits.key_of(jax.random.fold_in(jax.random.key(0), i))


@pytest.fixture(scope='module')
def bits():
  return np.asarray(jax.random.bits(key(), SHAPE, 'uint32'))


def mixed(x):
  """The hash in Python's integers."""
  x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
  x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
  return x ^ x >> 16


def test_the_hash_is_the_published_one():
  """Against the same hash in Python's integers."""
  for x in (0, 1, 2**31, 2**32 - 1, 123456789):
    assert int(dropout_bits.mix(jnp.uint32(x))) == mixed(x)
  k = np.asarray(jax.random.key_data(key()))
  drawn = jax.random.bits(key(), (3, 4, 5), 'uint32')
  assert int(drawn[2, 1, 3]) == mixed(
      (mixed((1 * 5 + 3) ^ int(k[0])) + mixed(2 ^ int(k[1]))) & 0xFFFFFFFF)


def test_flipping_an_input_bit_flips_each_output_bit_half_the_time():
  """The strict avalanche criterion, for the bits of the place and of the key."""
  rng = np.random.default_rng(0)
  args = [rng.integers(0, 2**32, 4000, np.uint32) for _ in range(4)]
  base = np.asarray(dropout_bits.words((args[0], args[1]), args[2], args[3]))
  for i in range(4):
    for bit in range(32):
      flipped = [x ^ np.uint32(1 << bit) if j == i else x for j, x in enumerate(args)]
      changed = base ^ np.asarray(dropout_bits.words((flipped[0], flipped[1]), *flipped[2:]))
      share = np.unpackbits(changed.view(np.uint8)).reshape(4000, 32).mean(0)
      assert np.abs(share - 0.5).max() < 0.05  # 6 deviations of 0.008


def test_bytes_are_uniform(bits):
  for shift in (0, 8, 16, 24):
    counts = np.bincount((bits >> shift & 255).reshape(-1), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize('axis', [0, 1, 2])
def test_neighbors_and_lines_are_independent(bits, axis):
  drop = (bits.astype(np.float64) / 2**32 < 0.1).astype(np.float64)
  others = tuple(i for i in range(3) if i != axis)
  lines = drop.sum(others)  # the dropped bits of every slice along the axis
  n = drop.size / len(lines)
  assert stats.chisquare(lines, np.full(len(lines), lines.mean())).pvalue > 1e-4
  assert np.abs(lines / n - 0.1).max() < 5.5 * np.sqrt(0.09 / n)
  uniform = bits / 2**32 - 0.5
  for lag in (1, 2, 3, 7, 16, 31):
    a, b = np.split(np.moveaxis(uniform, axis, 0), [lag])[1], np.moveaxis(uniform, axis, 0)[:-lag]
    assert abs(np.mean(a * b)) * 12 * np.sqrt(a.size) < 5


def test_keys_are_independent(bits):
  uniform = bits.reshape(-1) / 2**32 - 0.5
  for i in range(1, 30):
    other = np.asarray(jax.random.bits(key(i), SHAPE, 'uint32')).reshape(-1) / 2**32 - 0.5
    assert abs(np.mean(uniform * other)) * 12 * np.sqrt(uniform.size) < 5
  data = np.asarray(jax.random.key_data(key()))
  for near in (data ^ np.uint32([1, 0]), data ^ np.uint32([0, 1]), data[::-1]):
    near_key = dropout_bits.key_of(jax.random.wrap_key_data(jnp.asarray(near), impl='threefry2x32'))
    other = jax.random.bits(near_key, SHAPE, 'uint32')
    other = np.asarray(other).reshape(-1) / 2**32 - 0.5
    assert abs(np.mean(uniform * other)) * 12 * np.sqrt(uniform.size) < 5


def test_every_mesh_draws_the_same(bits):
  mesh = mesh_lib.make_mesh(1, 4, 2)
  split = NamedSharding(mesh, PartitionSpec('data', None, 'model'))
  draw = jax.jit(lambda k: jax.random.bits(k, SHAPE, 'uint32'), out_shardings=split)
  np.testing.assert_array_equal(draw(key()), bits)
  text = draw.lower(key()).compile().as_text()
  assert 'all-' not in text and 'u32[64,128,64]' not in text  # each device draws its own share


def test_split_and_fold_in_give_the_keys_of_threefry():
  start = jax.random.key(3, impl='threefry2x32')
  ours = dropout_bits.key_of(start)
  for a, b in ((jax.random.split(ours, 3), jax.random.split(start, 3)),
               (jax.random.fold_in(ours, 5), jax.random.fold_in(start, 5))):
    np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))


def kept(words, rows=2, heads=4, length=256, rate=0.1):
  """The weights that dropout keeps: [rows, heads, L, L] bool."""
  row, head = (np.arange(n, dtype=np.uint32) for n in (rows, heads))
  at = np.arange(length, dtype=np.int32)
  return np.asarray(dropout_bits.keeps_weight(
      words, jnp.asarray(row[:, None, None, None]), jnp.asarray(head[:, None, None]),
      jnp.asarray(at[:, None]), jnp.asarray(at), rate))


def test_a_weight_is_drawn_from_the_hashes_of_its_query_and_key():
  """Against Python's integers: row 3, head 5, query 7, key 11."""
  words = jnp.uint32([123, 456])
  of_query = mixed((3 << 16) + 5 ^ 456)
  of_key = mixed(of_query ^ 123)
  drawn = mixed(mixed(7 ^ of_query) + mixed(11 ^ of_key) & 0xFFFFFFFF)
  drawn = (drawn + 2**31) % 2**32  # a signed word, counted from the lowest
  for share, keeps in ((drawn / 2**32, False), ((drawn + 1) / 2**32, True)):
    assert bool(dropout_bits.keeps_weight(
        words, jnp.uint32(3), jnp.uint32(5), jnp.int32(7), jnp.int32(11), 1 - share)) == keeps


def test_dropped_weights_have_no_pattern():
  drops = []
  for i in range(8):
    words = jax.random.key_data(jax.random.fold_in(jax.random.key(1), i))
    drops.append(~kept((words[0], words[1])))
  drops = np.stack(drops).astype(np.float64)  # [keys, rows, heads, L, L]
  for axis in range(5):
    # Every slice along the axis drops as many weights as independent draws would.
    lines = drops.mean(tuple(i for i in range(5) if i != axis))
    assert np.abs(lines - 0.1).max() < 5 * np.sqrt(0.09 * len(lines) / drops.size)
  for axis in (3, 4):  # each query and each key, whose weights share a hash
    counts = drops.sum(axis).ravel()
    assert abs(counts.var() / (256 * 0.09) - 1) < 5 * np.sqrt(2 / counts.size)
  noise = drops - 0.1
  for axis in range(5):
    for lag in (1, 2, 3, 64):
      if lag < drops.shape[axis]:
        a, b = np.split(np.moveaxis(noise, axis, 0), [lag])[1], np.moveaxis(noise, axis, 0)[:-lag]
        assert abs(np.mean(a * b)) / 0.09 * np.sqrt(a.size) < 5
  # The sums of the hashes at the corners of a rectangle depend on each other. The weights
  # must not.
  for down, right in ((1, 1), (2, 1), (1, 4), (64, 64), (128, 3)):
    corners = (noise[..., :-down, :-right] * noise[..., down:, :-right]
               * noise[..., :-down, right:] * noise[..., down:, right:])
    assert abs(corners.mean()) / 0.09**2 * np.sqrt(corners.size) < 5
  # A query and a key are not exchangeable.
  above, below = np.triu_indices(256, 1)
  pairs = noise[..., above, below] * noise[..., below, above]
  assert abs(pairs.mean()) / 0.09 * np.sqrt(pairs.size) < 5
