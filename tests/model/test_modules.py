import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from bert_jax.data.tokens import Tokens
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.heads import BertForPreTraining
from bert_jax.model.layers import LayerNorm, activation

CONFIG = BertConfig(vocab_size=50, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=32,
                    max_positions=16)


def _batch(rows=2, length=8, seed=0):
  ids = np.random.default_rng(seed).integers(5, 50, (rows, length)).astype(np.int32)
  type_ids = (np.arange(length) >= length // 2).astype(np.int32) * np.ones_like(ids)
  positions = np.arange(length, dtype=np.int32) * np.ones_like(ids)
  text_ids = np.ones_like(ids)
  text_ids[0, -2:] = 0
  return Tokens(ids, type_ids, positions, text_ids)


def _init(config, seed=0):
  model = BertForPreTraining(config)
  batch = _batch()
  at = np.array([[1, 2, 3], [4, 5, 6]])
  params = nn.unbox(jax.jit(model.init)(jax.random.key(seed), batch, at, at[:, :1] * 0))
  return jax.jit(model.apply, static_argnames=('deterministic',)), params, batch, at


def test_embeddings_equal_one_layer_on_one_hot_vectors():
  module = Embeddings(dataclasses.replace(CONFIG, dropout=0.0))
  batch = _batch()
  args = (batch.ids, batch.type_ids, batch.positions)
  params = nn.unbox(module.init(jax.random.key(0), *args, deterministic=True))
  tables = params['params']
  one_hots = np.concatenate([np.eye(128)[batch.ids], np.eye(16)[batch.positions],
                             np.eye(2)[batch.type_ids]], axis=-1)
  stacked = np.concatenate([tables['token'], tables['position'], tables['segment']])
  x = one_hots @ stacked
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
  np.testing.assert_allclose(module.apply(params, *args, deterministic=True), x, atol=2e-5)


def test_layer_norm_by_hand():
  x = jnp.array([[1.0, 2.0, 3.0, 6.0]])  # mean 3, variance 3.5
  module = LayerNorm(CONFIG)
  out = module.apply(module.init(jax.random.key(0), x), x)
  np.testing.assert_allclose(out, np.array([[-2, -1, 0, 3]]) / np.sqrt(3.5), rtol=1e-6)


def test_activations():
  x = np.linspace(-4, 4, 41, dtype=np.float32)
  np.testing.assert_allclose(activation('gelu')(x), x * special.ndtr(x), atol=2e-7)
  inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
  np.testing.assert_allclose(activation('gelu_tanh')(x), 0.5 * x * (1 + np.tanh(inner)), atol=5e-7)
  np.testing.assert_array_equal(activation('relu')(x), np.maximum(x, 0))
  np.testing.assert_allclose(activation('silu')(x), x / (1 + np.exp(-x)), atol=5e-7)


def test_initial_kernels_are_truncated_normal_and_biases_zero():
  _, params, _, _ = _init(dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=256))
  kernel = np.asarray(params['params']['bert']['layers']['feed_forward']['up']['kernel'])
  # A normal of 0.02, cut at two deviations, stays within 0.04 and has 0.8796 of its deviation.
  assert np.abs(kernel).max() <= 0.04
  assert abs(kernel.std() / (0.8796 * 0.02) - 1) < 0.01
  assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(
      {'qkv': params['params']['bert']['layers']['attention']['qkv_bias'],
       'mlm': params['params']['mlm_bias']}))


def test_mlm_head_is_tied_and_padding_is_never_predicted():
  apply, params, batch, at = _init(CONFIG)
  logits, _ = apply(params, batch, at, at[:, :1] * 0)
  assert logits.shape == (2, 3, 128) and logits.dtype == jnp.float32
  assert (logits[..., 50:] == -1e9).all() and (logits[..., :50] > -100).all()
  params['params']['bert']['embeddings']['token'] = (
      params['params']['bert']['embeddings']['token'].at[7].set(0.0))
  changed, _ = apply(params, batch._replace(ids=np.where(batch.ids == 7, 8, batch.ids)), at,
                     at[:, :1] * 0)
  assert (changed[..., 7] == 0).all()  # the entry's vector and bias are zero, so its logit is


def test_logits_at_some_positions_equal_the_logits_at_all():
  apply, params, batch, at = _init(CONFIG)
  everywhere = np.arange(8)[None] * np.ones((2, 1), int)
  every, _ = apply(params, batch, everywhere, at[:, :1] * 0)
  some, _ = apply(params, batch, at, at[:, :1] * 0)
  expected = np.take_along_axis(np.asarray(every), at[..., None], 1)
  np.testing.assert_allclose(some, expected, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize('change', [dict(scan_unroll=3), dict(remat='dots'), dict(remat='full')])
def test_unrolling_and_remat_change_no_number(change):
  _, params, batch, at = _init(CONFIG)

  def loss(config):
    def f(params):
      mlm, nsp = BertForPreTraining(config).apply(params, batch, at, at[:, :1] * 0)
      return (mlm[..., :50]**2).mean() + (nsp**2).mean()
    return jax.jit(jax.value_and_grad(f))(params)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7),
               loss(CONFIG), loss(dataclasses.replace(CONFIG, **change)))


def test_dropout_runs_only_on_request_and_differs_by_key():
  apply, params, batch, at = _init(CONFIG)
  cls = at[:, :1] * 0
  run = lambda seed: apply(params, batch, at, cls, deterministic=False,
                           rngs={'dropout': jax.random.key(seed)})[0]
  still = apply(params, batch, at, cls)[0]
  assert (run(0) == run(0)).all() and (run(0) != run(1)).any() and (run(0) != still).any()


def test_a_bfloat16_model_has_float32_parameters_and_logits():
  apply, params, batch, at = _init(CONFIG)
  half = BertForPreTraining(dataclasses.replace(CONFIG, dtype='bfloat16'))
  logits, nsp = jax.jit(half.apply)(params, batch, at, at[:, :1] * 0)
  assert logits.dtype == nsp.dtype == jnp.float32
  initial = jax.eval_shape(half.init, jax.random.key(0), batch, at, at[:, :1] * 0)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(initial))
  reference, _ = apply(params, batch, at, at[:, :1] * 0)
  np.testing.assert_allclose(logits[..., :50], reference[..., :50], atol=0.01)
