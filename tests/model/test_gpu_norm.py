"""The Triton kernel of norms with dropout and residual, interpreted, against the plain path."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model import dropout_bits, gpu_norm, layers
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.modern import Modern, ModernConfig
from bert_jax.parallel import sharding
from tests import conftest
from tests.model import test_kernels


def inputs(width, rows=3, length=5, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  x, y, bias = (jnp.asarray(rng.normal(size=shape), dtype)
                for shape in ((rows, length, width), (rows, length, width), (width,)))
  scale, shift = jnp.asarray(rng.normal(size=(2, width)), jnp.float32)
  return x, y, bias, scale, shift


class _Plain(nn.Module):
  """LayerNorm(x + dropout(y + bias)) in float32, and the sum."""

  rate: float

  @nn.compact
  def __call__(self, x, y, bias, scale, shift):
    total = x.astype(jnp.float32)
    if y is not None:
      y = y.astype(jnp.float32) + (0 if bias is None else bias.astype(jnp.float32))
      total += nn.Dropout(self.rate, deterministic=not self.rate)(y)
    centered = total - total.mean(-1, keepdims=True)
    out = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-12) * scale
    return (out if shift is None else out + shift).astype(x.dtype), total.astype(x.dtype)


KEY = dropout_bits.key_of(jax.random.key(3))


@pytest.mark.medium
@pytest.mark.parametrize('width', [64, 96, 768])
@pytest.mark.parametrize('rate, absent, returns_sum', [
    (0.1, (), False), (0.0, (), True), (0.1, ('bias', 'shift'), True), (0.0, ('y', 'bias'), True),
    (0.0, ('y', 'bias', 'shift'), False)])
def test_the_kernel_computes_what_the_plain_path_computes(width, rate, absent, returns_sum):
  names = ('x', 'y', 'bias', 'scale', 'shift')
  arguments = [None if name in absent else x for name, x in zip(names, inputs(width))]

  def by_kernel(*arguments):
    out, total = gpu_norm.norm(*arguments, epsilon=1e-12, rate=rate, random=KEY,
                               returns_sum=returns_sum)
    return (out, total) if returns_sum else (out,)

  def plain(*arguments):
    # A module folds its path into the key. The kernel gets KEY itself, so the module must too.
    with_key = nn.Dropout.make_rng
    try:
      nn.Dropout.make_rng = lambda *_: KEY
      out, total = _Plain(rate).apply({}, *arguments)
    finally:
      nn.Dropout.make_rng = with_key
    return (out, total) if returns_sum else (out,)

  expected, of_plain = jax.vjp(plain, *arguments)
  actual, of_kernel = jax.vjp(by_kernel, *arguments)
  for a, b in zip(actual, expected):
    np.testing.assert_allclose(a, b, atol=2e-6)
  for a, b in zip(*(jax.tree.leaves(of(jax.tree.map(jnp.cos, expected)))
                    for of in (of_kernel, of_plain))):
    assert jnp.linalg.norm(a - b) < 1e-6 * jnp.linalg.norm(b) + 1e-6


@pytest.mark.parametrize('shape', [(2, 1), (4, 1), (8, 1)])
def test_every_mesh_drops_the_same_activations(shape):
  arguments = inputs(64, rows=8)

  def loss(*arguments):
    def total(*arguments):
      out, _ = gpu_norm.norm(*arguments, epsilon=1e-12, rate=0.1, random=KEY)
      return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out
    return jax.value_and_grad(total, tuple(range(5)), has_aux=True)(*arguments)

  (_, alone), gradients = jax.jit(loss)(*arguments)
  (_, out), split = sharding.with_mesh(loss, conftest.sub_mesh(*shape), 'dp')(*arguments)
  np.testing.assert_array_equal(out, alone)
  for a, b in zip(split, gradients):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_large_widths_and_a_model_axis_exclude_the_kernel(monkeypatch):
  monkeypatch.setattr(sharding, 'has_triton', lambda: True)
  assert gpu_norm.can_run(768) and not gpu_norm.can_run(8193)
  with sharding.in_context(conftest.sub_mesh(2, 2), 'tp'):
    assert not gpu_norm.can_run(768)


@pytest.mark.parametrize('attention, uses', [('auto', True), ('triton', True), ('xla', False)])
def test_attention_xla_turns_the_norm_kernel_off_too(attention, uses, monkeypatch):
  """Exports set attention=xla, because they must run everywhere."""
  monkeypatch.setattr(sharding, 'has_triton', lambda: True)
  monkeypatch.setattr(gpu_norm, 'norm', lambda x, *_, **__: (jnp.zeros_like(x), None))
  config = BertConfig(hidden_size=32, num_heads=4, attention=attention)
  norm, x = layers.LayerNorm(config), jnp.ones((2, 3, 32)).at[0].set(jnp.arange(32))
  params = norm.init(jax.random.key(0), x)
  assert bool(jnp.any(norm.apply(params, x) != 0)) != uses


@pytest.mark.medium
@pytest.mark.parametrize('kind, config', [
    (Encoder, BertConfig(vocab_size=50, hidden_size=32, num_layers=2, num_heads=4,
                         intermediate_size=64, max_positions=128)),
    (Modern, ModernConfig(vocab_size=50, hidden_size=32, num_layers=4, num_heads=4,
                          intermediate_size=64, dropout=0.1))])
def test_a_model_trains_the_same_with_the_kernel(kind, config, monkeypatch):
  """The same parameters, the same dropped activations, and the same gradients."""
  batch, encoder = test_kernels.packed_rows(), kind(config)
  params = jax.jit(encoder.init)(jax.random.key(0), batch, np.zeros((4, 1), np.int32))

  def loss(params):
    hidden = encoder.apply(params, batch, deterministic=False, method='encode',
                           rngs={'dropout': dropout_bits.key_of(jax.random.key(5))})
    hidden = jnp.where(jnp.asarray(batch.text_ids > 0)[..., None], hidden, 0)
    return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape)), hidden

  def run():
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

  (_, expected), of_plain = run()
  calls = []
  norm = gpu_norm.norm
  monkeypatch.setattr(layers, '_has_norm_kernel', lambda module, x: not module.is_initializing())
  monkeypatch.setattr(gpu_norm, 'norm', lambda *a, **k: calls.append(1) or norm(*a, **k))
  (_, actual), gradients = run()
  assert calls
  np.testing.assert_allclose(actual, expected, atol=2e-5)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(of_plain))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6 * scale),
               gradients, of_plain)
