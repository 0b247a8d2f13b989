"""The Triton kernels of attention, interpreted, against attention in XLA."""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.model import attention, attention_kernels, dropout_bits, gpu_attention
from bert_jax.model.attention import Dropout, Heads
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.layers import Biased
from bert_jax.model.modern import Modern, ModernConfig
from bert_jax.model.rotary import rotary, rotate
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runtime import platforms
from tests import conftest
from tests.model import test_kernels

KEY = jax.random.key(7)


def inputs(rows, length, heads, width, dtype=jnp.float32):
  """qkv [B, L, H, 3, K], its bias, and text ids with one, two or three texts and padding."""
  rng = np.random.default_rng(0)
  text_ids = np.zeros((rows, length), np.int32)
  for row, ids in enumerate(text_ids):
    cuts = sorted(rng.integers(1, length, 2))
    ids[:cuts[0]], ids[cuts[0]:cuts[1]] = 1, 2
    ids[cuts[1]:] = 3 if row == 0 else 0
  qkv = jnp.asarray(0.7 * rng.normal(size=(rows, length, heads, 3, width)), dtype)
  return qkv, jnp.asarray(0.1 * rng.normal(size=(heads, 3, width)), dtype), jnp.asarray(text_ids)


def by_kernel(qkv, bias, text_ids, rate, reach, angles=None, causal=None):
  """The kernels rotate, so they need no rotated query and key."""
  flat = qkv.reshape(*qkv.shape[:2], -1)
  heads = Heads(*jnp.unstack(qkv, axis=3), Biased(flat, bias.reshape(-1)), angles)
  dropout = Dropout(rate, None, lambda: KEY)
  return gpu_attention.attend(heads, text_ids, dropout, reach, causal)


def kept(qkv, rate):
  """[B, H, L, L] bool."""
  rows, length, heads = qkv.shape[:3]
  row, head = (jnp.arange(n, dtype=jnp.uint32) for n in (rows, heads))
  at = jnp.arange(length)
  return dropout_bits.keeps_weight(
      jax.random.key_data(KEY), row[:, None, None, None], head[:, None, None], at[:, None],
      at[None, :], rate)


def plain(qkv, bias, text_ids, rate, reach, angles=None, causal=None):
  mask = attention.attention_bias(Tokens(None, None, None, text_ids, causal))
  if reach is not None:
    at = jnp.arange(qkv.shape[1])
    mask = jnp.where(jnp.abs(at[:, None] - at[None, :]) <= reach, mask, attention.MASKED)
  drop = attention.keep_all
  if rate:
    drop = lambda weights: jnp.where(kept(qkv, rate), weights / (1 - rate), 0)  # noqa: E731
  query, key, value = jnp.unstack(qkv + bias, axis=3)
  if angles is not None:
    query, key = rotate(query, angles), rotate(key, angles)
  return attention.dot_product_attention(query, key, value, mask, drop)[0]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def out_and_gradients(function, qkv, bias, text_ids, rate, reach, angles=None,
                      causal=None):
  """The output of real tokens, and the gradients of a weighted sum of it."""

  def total(qkv, bias):
    out = function(qkv, bias, text_ids, rate, reach, angles, causal)
    out = jnp.where((text_ids > 0)[:, :, None, None], out, 0)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

  (_, out), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(qkv, bias)
  return out, gradients


CASES = [
    *itertools.product([(16, 32), (64, 64), (128, 128)], [0.0, 0.1], [None, 8]),
    *itertools.product([(128, 64), (192, 64)], [0.1], [None, 16]),
    ((512, 64), 0.1, None), ((1000, 32), 0.1, None), ((1000, 64), 0.0, 64), ((100, 64), 0.1, 0)]


@pytest.mark.medium
@pytest.mark.parametrize('shape, rate, reach', [
    *CASES, pytest.param((8192, 64), 0.1, None, marks=pytest.mark.slow)])
def test_the_kernels_compute_what_the_plain_path_computes(shape, rate, reach):
  length, width = shape
  arguments = inputs(1, length, 1, width) if length > 512 else inputs(2, length, 2, width)
  check(arguments, rate, reach)


def check(arguments, *more):
  expected, expected_gradients = out_and_gradients(plain, *arguments, *more)
  actual, gradients = out_and_gradients(by_kernel, *arguments, *more)
  np.testing.assert_allclose(actual, expected, atol=1e-6)
  of_qkv, of_bias = expected_gradients
  assert jnp.linalg.norm(gradients[0] - of_qkv) < 1e-5 * jnp.linalg.norm(of_qkv)
  # The gradient of the bias sums over all tokens, and its terms cancel: for keys, to rounding.
  terms = jnp.linalg.norm(jnp.abs(of_qkv).sum((0, 1)))
  assert jnp.linalg.norm(gradients[1] - of_bias) < 1e-6 * terms


@pytest.mark.medium
@pytest.mark.parametrize('length, width, reach', [
    (16, 32, None), (64, 64, 8), (100, 64, None), (192, 64, None), (192, 64, 16),
    (128, 128, None)])
def test_the_kernels_rotate_as_the_plain_path_does(length, width, reach):
  arguments = inputs(2, length, 2, width)
  positions = np.random.default_rng(2).integers(0, 8192, (2, length), np.int32)
  check(arguments, 0.1, reach, rotary(positions, width, 160_000.0))


@pytest.mark.medium
@pytest.mark.parametrize('length, reach', [(16, None), (100, 8), (192, None), (192, 16)])
def test_causal_rows_see_only_earlier_tokens(length, reach):
  arguments, causal = inputs(3, length, 2, 32), jnp.array([True, False, True])
  check(arguments, 0.1, reach, None, causal)
  qkv, bias, text_ids = arguments
  changed = qkv.at[:, 10:].add(1.0)
  before, after = (by_kernel(x, bias, text_ids, 0.0, reach, None, causal)[:, :10]
                   for x in (qkv, changed))
  np.testing.assert_array_equal(before[::2], after[::2])
  assert jnp.abs(before[1] - after[1]).max() > 0.01


def test_bfloat16_kernels_are_as_exact_as_the_plain_path():
  arguments = inputs(2, 192, 2, 64, jnp.bfloat16)
  angles = rotary(jnp.arange(384).reshape(2, 192), 64, 10_000.0)
  exact, _ = out_and_gradients(plain, *inputs(2, 192, 2, 64), 0.1, None, angles)
  errors = [jnp.linalg.norm(out_and_gradients(path, *arguments, 0.1, None, angles)[0] - exact)
            for path in (by_kernel, plain)]
  assert errors[0] < 1.2 * errors[1]


def test_gradients_equal_finite_differences():
  qkv, bias, text_ids = inputs(1, 16, 1, 32)
  rng = np.random.default_rng(1)
  step = jnp.asarray(rng.normal(size=qkv.shape), jnp.float32)

  def total(t):
    out = by_kernel(qkv + t * step, bias, text_ids, 0.1, None)
    return jnp.sum(jnp.sin(out[text_ids > 0]))

  numeric = (total(1e-2) - total(-1e-2)) / 2e-2
  np.testing.assert_allclose(jax.grad(total)(0.0), numeric, rtol=2e-3)


@pytest.mark.parametrize('length', [64, 192])
def test_rows_of_padding_give_no_nan(length):
  qkv, bias, _ = inputs(2, length, 2, 64)
  no_text = jnp.zeros((2, length), jnp.int32)

  def total(qkv, bias):
    return jnp.sum(by_kernel(qkv, bias, no_text, 0.1, None) ** 2)

  values = total(qkv, bias), *jax.grad(total, (0, 1))(qkv, bias)
  assert all(bool(jnp.isfinite(x).all()) for x in values)


@pytest.mark.medium
@pytest.mark.parametrize('preset, shape', [
    ('dp', (2, 1)), ('tp', (1, 2)), ('tp', (2, 2)), ('fsdp_tp', (4, 2))])
@pytest.mark.parametrize('rotates', [False, True])
def test_every_mesh_drops_the_same_weights(preset, shape, rotates):
  arguments = inputs(4, 64, 2, 32)
  angles = rotary(jnp.arange(256).reshape(4, 64), 32, 10_000.0) if rotates else None

  def loss(*arguments):
    return out_and_gradients(by_kernel, *arguments, 0.1, None, angles)

  alone, (of_qkv, of_bias) = loss(*arguments)
  out, gradients = sharding.with_mesh(loss, conftest.sub_mesh(*shape), preset)(*arguments)
  np.testing.assert_array_equal(out, alone)
  # Batches of other sizes sum in another order, and round differently.
  np.testing.assert_allclose(gradients[0], of_qkv, atol=1e-6)
  np.testing.assert_allclose(gradients[1], of_bias, atol=1e-5)


def test_tpu_and_gpu_drop_the_same_weights():
  qkv, _, text_ids = inputs(2, 128, 2, 64)
  heads = Heads(*jnp.unstack(qkv, axis=3), Biased(qkv.reshape(2, 128, -1), None))
  text_ids = jnp.ones_like(text_ids)  # the two treat padding differently
  of_tpu, of_gpu = (
      attention_kernels.ALL[name].attend(heads, text_ids, Dropout(0.1, None, lambda: KEY))
      for name in ('fused', 'triton'))
  np.testing.assert_allclose(of_gpu, of_tpu.reshape(of_gpu.shape), atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize('kind, fields', [
    (Encoder, {}), (Modern, {'num_layers': 4, 'local_window': 16, 'global_every': 3})])
def test_models_compute_the_same_with_the_kernels(kind, fields):
  config = (ModernConfig if kind is Modern else BertConfig)(**{
      'vocab_size': 50, 'hidden_size': 64, 'num_layers': 2, 'num_heads': 2,
      'intermediate_size': 64, 'max_positions': 128, 'initializer_range': 0.1, **fields})
  batch = test_kernels.packed_rows()
  params = jax.jit(kind(config).init)(jax.random.key(0), batch, np.zeros((4, 1), np.int32))
  real = jnp.asarray(batch.text_ids > 0)[..., None]

  def loss(params, path):
    encoder = kind(dataclasses.replace(config, attention=path))
    hidden = jnp.where(real, encoder.apply(params, batch, method='encode'), 0)
    return jnp.sum(jnp.square(hidden) * jnp.cos(jnp.arange(64))), hidden

  results = [jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(params, path)
             for path in ('xla', 'triton')]
  np.testing.assert_allclose(results[1][0][1], results[0][0][1], atol=3e-5)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(results[0][1]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6 * scale),
               results[1][1], results[0][1])


def test_a_model_that_cannot_use_the_kernels_gets_the_reason(monkeypatch):
  config = test_kernels.CONFIG
  assert gpu_attention.obstacle(config, 128, 4) == 'heads are 8 wide, not 32 or 64 or 128'
  wide = dataclasses.replace(config, hidden_size=128)
  assert gpu_attention.obstacle(wide, 8, 4) == (
      'rows of 8 tokens are not within [16, 8192]')
  assert gpu_attention.obstacle(wide, 16, 4) == ''
  monkeypatch.setattr(platforms, 'compute_capability', lambda: 7.5)
  assert attention_kernels.choose_path(wide, 128, 'gpu') == (
      'xla', 'compute capability 7.5 is below 8.0')
  monkeypatch.undo()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  assert attention_kernels.choose_path(wide, 128, 'gpu')[1].endswith('has no Triton kernels')


def test_a_local_layer_reads_only_its_window():
  """The work of a long row grows with its length, not with its square."""
  shape = gpu_attention.Shape(8192, 64, 0.0, 64, True)
  first, end = shape.visited(jnp.int32(4096), 128, 64)
  assert (int(first), int(end)) == (63, 67)  # 4032 to 4287
  assert [int(x) for x in shape.visited(jnp.int32(0), 128, 64)] == [0, 3]
  assert [int(x) for x in shape.visited(jnp.int32(8064), 128, 64)] == [125, 128]


def test_the_kernels_compile_for_a_gpu():
  topology = pytest.importorskip('bert_jax.parallel.gpu_topology')
  if topology.missing():
    pytest.skip(topology.missing())
  mesh = mesh_lib.make_mesh(devices=topology.get('h100:2'))
  place = mesh_lib.batch_sharding(mesh)
  for length in (100, 128, 512, 1000):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
              for x in inputs(2, length, 2, 64, jnp.bfloat16)[::2]]

    def gradient(qkv, text_ids):
      def total(qkv):
        bias = jnp.ones((2, 3, 64), jnp.bfloat16)
        angles = rotary(jnp.arange(2 * length).reshape(2, length), 64, 10_000.0)
        sums = [by_kernel(qkv, bias, text_ids, 0.1, None, x).astype(jnp.float32).sum()
                for x in (None, angles)]
        return sums[0] + sums[1]
      return jax.grad(total)(qkv)

    text = sharding.with_mesh(gradient, mesh, 'dp').lower(*shapes).compile().as_text()
    assert 'triton' in text and f'[1,{length},2,3,64]' in text  # each card gets one row
