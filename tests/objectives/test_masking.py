import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest
from scipy import stats

from bert_jax.errors import UserError
from bert_jax.objectives import masking
from bert_jax.parallel import mesh as mesh_lib
from tests import conftest

V, SPECIAL, MASK = 1000, (0, 100, 101, 102, 103), 103
ORDINARY = np.setdiff1d(np.arange(V), SPECIAL)


def _rows(count=64, length=128, seed=0):
  """Rows [CLS] A [SEP] B [SEP] [PAD].. of random lengths: ids and pair index."""
  rng = np.random.default_rng(seed)
  ids, text_ids = np.zeros((2, count, length), np.int32)
  for row in range(count):
    n = rng.integers(8, length + 1)
    ids[row, :n] = rng.choice(ORDINARY, n)
    ids[row, [0, n // 2, n - 1]] = [101, 102, 102]
    text_ids[row, :n] = 1
  return ids, text_ids


@functools.partial(jax.jit, static_argnames=('config', 'pairs'))
def _mask(key, ids, text_ids, config=masking.MaskingConfig(), pairs=1, row=None):
  row = jnp.arange(len(ids)) if row is None else row
  return masking.mask(key, ids, text_ids, row, config,
                      masking.Vocabulary(V, SPECIAL, MASK), pairs=pairs)


def test_every_row_masks_its_exact_number_and_targets_are_the_originals():
  ids, text_ids = _rows()
  masked = jax.tree.map(np.asarray, _mask(jax.random.key(0), ids, text_ids))
  for row in range(len(ids)):
    ordinary = ((text_ids[row] > 0) & ~np.isin(ids[row], SPECIAL)).sum()
    count = int(masked.weights[row].sum())
    assert count == max(1, round(0.15 * ordinary))
    used = masked.positions[row, :count]
    assert (np.diff(used) > 0).all()  # drawn without replacement, in order
    assert (masked.weights[row, :count] == 1).all() and (masked.weights[row, count:] == 0).all()
    np.testing.assert_array_equal(masked.targets[row, :count], ids[row, used])
    elsewhere = np.setdiff1d(np.arange(ids.shape[1]), used)
    np.testing.assert_array_equal(masked.ids[row, elsewhere], ids[row, elsewhere])
    assert not np.isin(ids[row, used], SPECIAL).any()


def test_replacements_are_80_10_10_at_uniform_positions():
  ids, text_ids = _rows(count=2000, seed=1)
  masked = jax.tree.map(np.asarray, _mask(jax.random.key(1), ids, text_ids))
  used = masked.weights > 0
  new = np.take_along_axis(masked.ids, masked.positions, 1)[used]
  old = masked.targets[used]
  n = len(new)
  assert n > 15_000
  kept_by_chance = 0.1 / len(ORDINARY)  # a random replacement may be the token itself
  for count, p in (((new == MASK).sum(), 0.8), ((new == old).sum(), 0.1 + kept_by_chance)):
    assert stats.binomtest(int(count), n, p).pvalue > 1e-4
  random = new[(new != MASK) & (new != old)]
  assert not np.isin(random, SPECIAL).any()
  assert stats.chisquare(np.bincount(random, minlength=V)[ORDINARY]).pvalue > 1e-4
  # Every ordinary position of full rows is drawn equally often.
  full = np.flatnonzero(text_ids.sum(1) == 128)
  counts = np.bincount(masked.positions[full][used[full]], minlength=128)
  inside = counts[1:127][np.arange(1, 127) != 64]
  assert stats.chisquare(inside).pvalue > 1e-4


def test_the_config_sets_rate_split_and_most_predictions():
  ids, text_ids = _rows(count=400, seed=2)
  config = masking.MaskingConfig(rate=0.4, replace_mask=0.5, replace_random=0.5, max_predictions=10)
  masked = jax.tree.map(np.asarray, _mask(jax.random.key(2), ids, text_ids, config))
  assert masked.positions.shape == (400, 10)
  expected = [min(10, max(1, round(0.4 * ((text_ids[r] > 0) & ~np.isin(ids[r], SPECIAL)).sum())))
              for r in range(400)]
  np.testing.assert_array_equal(masked.weights.sum(1), expected)
  new = np.take_along_axis(masked.ids, masked.positions, 1)[masked.weights > 0]
  assert stats.binomtest(int((new == MASK).sum()), len(new), 0.5).pvalue > 1e-4


def test_each_packed_pair_has_its_own_number_of_predictions():
  ids, text_ids = _rows(count=1, length=128, seed=3)
  text_ids[0] = np.repeat([1, 2, 3, 0], [60, 10, 40, 18])
  masked = _mask(jax.random.key(3), ids, text_ids, pairs=3)
  used = np.asarray(masked.positions[0])[np.asarray(masked.weights[0]) > 0]
  for pair in (1, 2, 3):
    ordinary = ((text_ids[0] == pair) & ~np.isin(ids[0], SPECIAL)).sum()
    assert (text_ids[0, used] == pair).sum() == max(1, round(0.15 * ordinary))


def test_limited_predictions_are_spread_over_the_pairs():
  """Each pair gets its share of M, rounded up or down by chance, at any place in the row."""
  tokens, most = np.array([20, 20, 20, 20, 10, 34]), 11
  ids = np.full((4000, 128), 500, np.int32)
  text_ids = np.repeat(np.append(np.arange(1, 7), 0), [*tokens, 4])[None].repeat(4000, 0)
  config = masking.MaskingConfig(rate=0.2, max_predictions=most)
  masked = jax.tree.map(np.asarray, _mask(jax.random.key(7), ids, text_ids, config, pairs=6))
  assert masked.positions.shape == (4000, most) and (masked.weights == 1).all()
  of_pair = np.take_along_axis(text_ids, masked.positions, 1)
  counts = (of_pair[:, :, None] == np.arange(1, 7)).sum(1)
  share = np.array([4, 4, 4, 4, 2, 7]) * most / 25
  assert ((counts == np.floor(share)) | (counts == np.ceil(share))).all()
  up = counts.mean(0) - np.floor(share)
  assert (abs(up - share % 1) < 4 * np.sqrt(0.25 / 4000)).all()
  # With room for all predictions, each pair has the number of the rule.
  masked = _mask(jax.random.key(7), ids, text_ids, masking.MaskingConfig(
      rate=0.2, max_predictions=25), pairs=6)
  of_pair = np.take_along_axis(text_ids, np.asarray(masked.positions), 1)
  assert ((of_pair[:, :, None] == np.arange(1, 7)).sum(1) == [4, 4, 4, 4, 2, 7]).all()


def test_masks_depend_only_on_key_and_row():
  ids, text_ids = _rows(count=16)
  key = jax.random.key(4)
  whole = _mask(key, ids, text_ids)
  part = _mask(key, ids[5:9], text_ids[5:9], row=np.arange(5, 9))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[5:9], b), whole, part)
  other = _mask(jax.random.key(5), ids, text_ids)
  both = np.asarray(whole.weights * other.weights) > 0
  assert (np.asarray(whole.positions) != np.asarray(other.positions))[both].mean() > 0.7


@pytest.mark.parametrize('shape', [(8, 1), (4, 2), (2, 4)])
def test_every_mesh_draws_the_same_masks_without_collectives(shape):
  ids, text_ids = _rows(count=16)
  row = np.arange(16, dtype=np.int32)
  jitted = jax.jit(lambda ids, text_ids, row: _mask(jax.random.key(6), ids, text_ids, row=row))
  alone = jitted(ids, text_ids, row)
  mesh = conftest.sub_mesh(*shape)
  with jax.set_mesh(mesh):
    sharding = NamedSharding(mesh, PartitionSpec(mesh_lib.BATCH_AXES))
    args = jax.device_put((ids, text_ids, row), sharding)
    lowered = jax.jit(lambda *a: _mask(jax.random.key(6), a[0], a[1], row=a[2]),
                      out_shardings=sharding).lower(*args)
    compiled = lowered.compile()
    sharded = compiled(*args)
  jax.tree.map(np.testing.assert_array_equal, alone, sharded)
  text = compiled.as_text()
  assert not any(name in text for name in ('all-gather', 'all-reduce', 'all-to-all', 'permute'))


def test_rows_of_padding_have_nothing_to_predict():
  ids, text_ids = np.zeros((2, 2, 16), np.int32)
  masked = _mask(jax.random.key(0), ids, text_ids)
  assert float(masked.weights.sum()) == 0 and (masked.ids == ids).all()


def test_predictions_bound_every_row():
  for length in (16, 128, 512):
    for rate in (0.01, 0.15, 0.3):
      m = masking.MaskingConfig(rate=rate).predictions(length)
      assert m >= max(1, round(rate * (length - 3)))
  assert masking.MaskingConfig().predictions(128) == 20  # as published
  assert masking.MaskingConfig(max_predictions=76).predictions(512) == 76


@pytest.mark.parametrize('wrong', [dict(rate=0.0), dict(rate=1.0), dict(replace_mask=1.1),
                                   dict(replace_mask=0.95), dict(max_predictions=-1)])
def test_wrong_rules_are_refused(wrong):
  with pytest.raises(UserError, match='masking'):
    masking.MaskingConfig(**wrong)


def test_random_tokens_skip_the_special_ids():
  ids = np.asarray(masking.random_ordinary(
      jax.random.key(0), (20_000,), masking.Vocabulary(12, (0, 3, 4, 11), mask_id=4)))
  assert sorted(set(ids)) == [1, 2, 5, 6, 7, 8, 9, 10]
  assert stats.chisquare(np.bincount(ids)[[1, 2, 5, 6, 7, 8, 9, 10]]).pvalue > 1e-4
  assert jnp.issubdtype(ids.dtype, jnp.integer)
