"""The modern encoder's parts, by hand and against the plain path."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model import heads, parameters
from bert_jax.model.attention import (
  Attend,
  Dropout,
  Heads,
  dot_product_attention,
  keep_all,
  local_attention,
)
from bert_jax.model.modern import Modern, ModernConfig
from bert_jax.model.rotary import rotary, rotate

CONFIG = ModernConfig(vocab_size=60, hidden_size=16, num_layers=4, num_heads=2,
                      intermediate_size=24, max_positions=64, local_window=8)


def packed(seed=0, rows=2, length=40):
  """Two texts of 22 and 11 tokens in each row, then padding."""
  ids = np.random.default_rng(seed).integers(5, 60, (rows, length)).astype(np.int32)
  at = np.arange(length, dtype=np.int32) * np.ones_like(ids)
  text_ids = np.where(at < 22, 1, np.where(at < 33, 2, 0)).astype(np.int32)
  return Tokens(ids, np.zeros_like(ids), np.where(at < 22, at, at - 22), text_ids)


@functools.cache
def variables():
  init = jax.jit(Modern(CONFIG).init)
  return nn.unbox(init(jax.random.key(0), packed(), np.zeros((2, 1), np.int32)))


ENCODE = jax.jit(functools.partial(Modern(CONFIG).apply, method='encode'))


@pytest.mark.parametrize('length, reach', [(40, 4), (40, 7), (5, 8), (16, 16), (9, 0)])
@pytest.mark.parametrize('hides', [False, True])
def test_local_attention_equals_masked_attention(length, reach, hides):
  batch = packed(length=length)
  query, key, value = (jax.random.normal(jax.random.key(i), (2, length, 2, 8)) for i in range(3))
  near = np.abs(np.arange(length)[:, None] - np.arange(length)) <= reach
  if hides:
    batch = batch._replace(hidden=np.broadcast_to(np.arange(length) % 5 == 3, batch.ids.shape))
  mask = Attend().mask(batch)
  bias = jnp.where(near, mask.bias, -1e9)
  plain, _ = dot_product_attention(query, key, value, bias)
  actual = jax.jit(local_attention, static_argnames='reach')(query, key, value, mask, reach)
  real = np.asarray(((mask.bias == 0) & near).any(-1)[:, 0])
  assert real.sum() > length
  np.testing.assert_allclose(actual[real], plain[real], atol=2e-6)
  assert not np.any(actual[~real])  # a token that sees nothing
  heads = Heads(query, key, value, None)
  dense, _ = Attend(keeps_weights=True)(heads, mask, Dropout(0.0, keep_all, None), reach)
  np.testing.assert_allclose(dense[real], plain[real], atol=2e-6)
  assert not np.any(dense[~real])


def test_rotations_by_hand():
  positions = np.array([[0, 1, 3]], np.int32)
  angles = rotary(positions, 4, 100.0)  # frequencies 1 and 1 / 10
  x = np.array([1.0, 2.0, 3.0, 4.0])
  for i, p in enumerate((0, 1, 3)):
    c, s = np.cos([p, p / 10]), np.sin([p, p / 10])
    expected = [*(x[:2] * c - x[2:] * s), *(x[2:] * c + x[:2] * s)]
    actual = rotate(jnp.asarray(x, jnp.float32)[None, None, None], angles[:, :, i:i + 1])
    np.testing.assert_allclose(np.ravel(actual), expected, rtol=1e-6)


def test_the_output_of_a_text_does_not_depend_on_its_place_or_neighbors():
  batch = packed()
  other = batch.ids.copy()
  other[:, :22] = (other[:, :22] + 7) % 50 + 5
  a, b = (ENCODE(variables(), batch._replace(ids=ids)) for ids in (batch.ids, other))
  assert np.array_equal(a[:, 22:33], b[:, 22:33]) and not np.array_equal(a[:, :22], b[:, :22])
  alone = jax.tree.map(lambda x: x[:, 22:33],
                       batch._replace(text_ids=(batch.text_ids > 0) * 1))
  np.testing.assert_allclose(ENCODE(variables(), alone), a[:, 22:33], atol=2e-5)


@pytest.mark.parametrize('local', [
    (False, True, True, False), (False, True, True, False, True, True)])  # 2 after the group
def test_states_equal_encode_and_local_weights_stay_in_their_window(local):
  batch, model = packed(), Modern(dataclasses.replace(CONFIG, num_layers=len(local)))
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), batch, np.zeros((2, 1), np.int32)))
  hidden, actual = (jax.jit(functools.partial(model.apply, method=method))(params, batch)
                    for method in ('encode', 'states'))
  real = batch.text_ids > 0
  np.testing.assert_allclose(actual.hidden[-1][real], hidden[real], atol=2e-5)
  assert actual.hidden.shape == (len(local) + 1, 2, 40, 16)
  assert actual.attention.shape == (len(local), 2, 2, 40, 40)
  at = np.arange(40)
  far = np.abs(at[:, None] - at) > 4
  for layer, is_local in enumerate(local):
    weights = np.asarray(actual.attention[layer])[0, :, :22, :22]
    assert (weights[:, far[:22, :22]].max() == 0) == is_local
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def abstract(config):
  """The masked LM's parameters, boxed."""
  tokens = jnp.zeros((1, 8), jnp.int32)
  return jax.eval_shape(heads.BertForPreTraining(config).init, jax.random.key(0),
                        Tokens(*[tokens] * 4), tokens, None)


@pytest.mark.parametrize('sizes', [{}, {'num_layers': 10, 'hidden_size': 32}, {'num_layers': 6}])
def test_parameters_are_counted_without_the_padding(sizes):
  config = dataclasses.replace(CONFIG, **sizes)
  tree = abstract(config)
  stored = sum(x.size for x in jax.tree.leaves(nn.unbox(tree)))
  padding = (config.padded_vocab_size - 60) * (config.hidden_size + 1)
  assert stored - padding == parameters.count_parameters(tree, config)


def test_parameters_and_flops_of_modernbert_base():
  # ModernBERT-base has 149,655,232 parameters with its masked LM head, which has 50,368 entries.
  assert parameters.count_parameters(abstract(ModernConfig()), ModernConfig()) == 149_655_232
  # In rows of 8,192, 8 layers see 8,192 tokens and 14 see 129.
  attention = 12 * 768 * (8 * 8192 + 14 * 129)
  assert ModernConfig().flops_per_token(8192, 0) == attention + 6 * 22 * (
      4 * 768**2 + 3 * 768 * 1152)


@pytest.mark.parametrize('wrong, message', [
    ({'local_window': -1}, 'local_window=-1 must not be negative'),
    ({'classifier_pooling': 'max'}, "classifier_pooling='max' is unknown"),
    ({'conv_reach': 17}, 'conv_reach=17 must lie in'),
    ({'conv_reach': -1}, 'conv_reach=-1 must lie in'),
    ({'num_layers': 3}, 'num_layers=3 must be more than model.global_every=3'),
    ({'global_every': 1}, 'at least 2'), ({'global_every': 0}, 'at least 2'),
    ({'num_heads': 16}, 'a head of 1 cannot be rotated'),
    ({'local_theta': 0.0}, 'must be positive')])
def test_wrong_choices_are_refused(wrong, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(CONFIG, **wrong)
