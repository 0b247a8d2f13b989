"""The Triton kernels of GELU, interpreted, against the plain path, and their assembly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from bert_jax.model import gpu_gelu, gpu_math, layers
from bert_jax.model.bert_config import BertConfig
from bert_jax.parallel import sharding
from tests import conftest


def inputs(rows=24, width=512):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape) * 2, jnp.float32)
          for shape in ((rows, width), (width,))]


def plain(x, bias):
  return layers.activation('gelu')(x + bias)


@pytest.mark.parametrize('rows', [1, 6, 24, 384])
def test_the_kernels_compute_what_the_plain_path_computes(rows):
  expected, of_plain = jax.vjp(plain, *inputs(rows))
  actual, of_kernel = jax.vjp(gpu_gelu.gelu, *inputs(rows))
  np.testing.assert_allclose(actual, expected, atol=1e-6)
  for a, b in zip(of_kernel(jnp.cos(expected)), of_plain(jnp.cos(expected))):
    assert jnp.linalg.norm(a - b) < 1e-6 * jnp.linalg.norm(b)


def _float(word: str) -> np.float32:
  return np.array([int(word[2:], 16)], np.uint32).view(np.float32)[0]


def _run(text: str, *arguments: np.ndarray) -> np.ndarray:
  """Computes $0 from $1 and $2: an interpreter of the few instructions that the kernels use."""
  values = {f'${i}': x for i, x in enumerate(arguments, 1)}
  operations = {
      'abs.f32': np.abs, 'mov.f32': lambda x: x, 'mul.f32': np.multiply,
      'sub.f32': np.subtract,
      'fma.rn.f32': lambda x, y, z: (x * y.astype(np.float64) + z).astype(np.float32),
      'rcp.approx.ftz.f32': np.reciprocal, 'setp.gt.f32': np.greater,
      'selp.f32': lambda x, y, chosen: np.where(chosen, x, y)}
  for line in re.findall(r'[^;{}]+;', text):
    name, target, *operands = re.split(r'[\s,]+', line.strip(' ;\n'))
    if name != '.reg':
      values[target] = operations[name](*(
          np.asarray(_float(x) if x.startswith('0f') else values[x]) for x in operands))
  return values['$0']


def test_the_assembly_computes_the_normal_distribution_function():
  x = np.linspace(-12, 12, 4001, dtype=np.float32)
  below = _run(gpu_math._ptx(), x, np.exp(-x * x / 2))
  np.testing.assert_allclose(below, special.ndtr(x.astype(np.float64)), atol=2e-7)


@pytest.mark.parametrize('shape', [(2, 1), (2, 2), (1, 2)])
def test_every_mesh_computes_the_same(shape):
  def loss(x, bias):
    out = gpu_gelu.gelu(x, bias)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

  step = jax.value_and_grad(loss, (0, 1), has_aux=True)
  (_, alone), gradients = jax.jit(step)(*inputs())
  (_, out), split = sharding.with_mesh(step, conftest.sub_mesh(*shape), 'tp')(*inputs())
  np.testing.assert_array_equal(out, alone)
  for a, b in zip(split, gradients):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('fields, uses', [
    ({}, True), ({'activation': 'relu'}, False), ({'attention': 'xla'}, False),
    ({'intermediate_size': 300}, False)])
def test_a_feed_forward_takes_the_kernel_where_it_can(fields, uses, monkeypatch):
  sizes = {'hidden_size': 32, 'num_heads': 4, 'intermediate_size': 256}
  layer = layers.FeedForward(BertConfig(**{**sizes, **fields}))
  x = jnp.ones((2, 8, 32)).at[0].set(jnp.arange(32) / 32)
  # A bias of 0 would hide a dropped bias.
  params = jax.tree.map(lambda x: x + 0.1, layer.init(jax.random.key(0), x))
  expected, calls = layer.apply(params, x), []
  gelu = gpu_gelu.gelu
  monkeypatch.setattr(gpu_gelu, 'gelu', lambda *a: calls.append(1) or gelu(*a))
  monkeypatch.setattr(layers.sharding, 'has_triton', lambda: True)
  monkeypatch.setattr(gpu_gelu, '_gelu', lambda _, *a: gpu_gelu._forward(True, *a)[0])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
               layer.apply(params, x), expected)
  assert bool(calls) == uses
