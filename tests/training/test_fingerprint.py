"""Fingerprints of arrays: by hand, on any mesh, after any change."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from bert_jax.training import fingerprint
from tests import conftest


def by_hand(x: np.ndarray) -> str:
  """The fingerprint in Python's integers, from words of a NumPy view."""
  total, mask = 0, 0xFFFFFFFF
  for i, word in enumerate(x.view(f'uint{8 * x.dtype.itemsize}').ravel().tolist()):
    h = word ^ (i * 0x9E3779B1 & mask)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    total += h ^ h >> 16
  return f'{total & mask:08x}'


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32'])
@pytest.mark.parametrize('shape', [(), (5,), (3, 4), (2, 3, 8)])
def test_a_fingerprint_by_hand(dtype, shape):
  x = jnp.asarray(np.random.default_rng(0).normal(0, 100, shape), dtype)
  assert fingerprint.of({'a': [x]}) == {'a/0': by_hand(np.asarray(x))}


def test_a_fingerprint_is_the_same_on_every_mesh():
  x = np.random.default_rng(0).normal(size=(16, 8, 24)).astype(np.float32)
  expected = fingerprint.of({'x': x})
  for shape in ((8, 1), (2, 4), (1, 8), (1, 1)):
    mesh = conftest.sub_mesh(*shape)
    for spec in (PartitionSpec(), PartitionSpec('data'), PartitionSpec(None, 'model'),
                 PartitionSpec('model', None, 'data'), PartitionSpec(('data', 'model'))):
      placed = jax.device_put(x, NamedSharding(mesh, spec))
      assert fingerprint.of({'x': placed}) == expected


def test_every_flipped_bit_changes_the_fingerprint():
  x = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
  expected, seen = fingerprint.of({'x': x}), set()
  for element in range(x.size):
    for bit in range(32) if element < 3 else (element % 32,):
      words = x.view(np.uint32).copy()
      words.ravel()[element] ^= 1 << bit
      seen.add(fingerprint.of({'x': words.view(np.float32)})['x'])
  assert len(seen) == 3 * 32 + 60 and expected['x'] not in seen


def test_moved_values_change_the_fingerprint():
  x = np.zeros((4, 64), np.float32)
  x[0, 0], x[1, 0] = 1, 2
  moved = x.copy()
  moved[[0, 1]] = moved[[1, 0]]
  different = (x, moved, x.T.reshape(4, 64), -x, x * 0, -0.0 * x)
  assert len({fingerprint.of({'x': y})['x'] for y in different}) == 6
