"""Exact search equals a whole sort on any blocks and devices, ties included."""

import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.inference import search
from bert_jax.parallel import mesh as mesh_lib


def make(path, count: int, dtype) -> tuple[np.ndarray, np.ndarray]:
  """Vectors of small whole numbers, whose products are exact and often equal; queries."""
  rng = np.random.default_rng(count)
  vectors = rng.integers(-2, 3, (count, 6)).astype(dtype)
  np.save(path, vectors)
  return vectors.astype(np.float32), rng.integers(-2, 3, (37, 6)).astype(np.float32)


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('count, dtype', [(50, 'float32'), (5001, 'float16')])
def test_hits_equal_a_stable_sort(tmp_path, monkeypatch, devices, count, dtype):
  make_mesh = mesh_lib.make_mesh
  monkeypatch.setattr(mesh_lib, 'make_mesh', lambda: make_mesh(devices=jax.devices()[:devices]))
  monkeypatch.setattr(search, '_BLOCK', 1024)  # five blocks, the last one not full
  monkeypatch.setattr(search, '_QUERIES', 10)  # four parts, the last one not full
  vectors, queries = make(tmp_path / 'x.npy', count, dtype)
  hits = search.search(queries, tmp_path / 'x.npy', 100)
  scores = queries @ vectors.T
  order = np.argsort(-scores, axis=1, kind='stable')[:, :100]
  assert hits.numbers.shape == (37, min(count, 100))
  np.testing.assert_array_equal(hits.numbers, order)
  np.testing.assert_array_equal(hits.scores, np.take_along_axis(scores, order, 1))
  # Ties cross the bounds of groups, blocks and devices: another rule for ties would fail.
  assert (np.diff(hits.scores) == 0).mean() > 0.5


def test_mistakes(tmp_path):
  vectors, queries = make(tmp_path / 'x.npy', 10, 'float32')
  np.save(tmp_path / 'whole.npy', vectors.astype(np.int64))
  np.save(tmp_path / 'none.npy', vectors[:0])
  (tmp_path / 'text.npy').write_text('no array')
  for name, width, message in (
      ('x', 5, 'holds 10 vectors of 6: vectors of 5 are needed'),
      ('none', 6, 'holds 0 vectors of 6'),
      ('whole', 6, r'holds int64\[10, 6\]: vectors \[n, D\] of float32 or float16'),
      ('text', 6, 'cannot be read as an array'), ('nowhere', 6, 'cannot be read as an array')):
    with pytest.raises(UserError, match=message):
      search.search(queries[:, :width], tmp_path / f'{name}.npy', 3)
