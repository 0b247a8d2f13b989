"""Products in bfloat16 on a CPU: their values, gradients and dtypes, and how XLA reads them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bert_jax.interop import families, huggingface, layout
from bert_jax.model import products
from bert_jax.model.albert import AlbertConfig
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import BertForPreTraining
from bert_jax.model.modern import ModernConfig
from bert_jax.model.mpnet import MPNetConfig
from bert_jax.runtime import host
from tests.interop import torch_bert

SHAPES = [((5, 7), (7, 3)), ((4, 5, 7), (7, 3)), ((2, 3, 5, 7), (2, 3, 7, 4))]


def rounded(x):
  return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def random(seed, shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('with_transposed', [False, True])
@pytest.mark.parametrize('shapes', SHAPES)
def test_values_and_gradients_are_products_of_rounded_factors(shapes, with_transposed):
  x, y = random(0, shapes[0]), random(1, shapes[1])
  stored = y.swapaxes(-1, -2) if with_transposed else y
  multiply = products.product_with_transposed if with_transposed else products.product
  out, pull = jax.vjp(lambda x, y: multiply(x, y, jnp.dtype('bfloat16')), x, stored)
  np.testing.assert_allclose(out, rounded(x) @ rounded(y), rtol=1e-5, atol=1e-5)
  gradient = random(2, out.shape)
  x_gradient, y_gradient = pull(gradient)
  assert out.dtype == x_gradient.dtype == y_gradient.dtype == jnp.float32
  expected = rounded(gradient) @ rounded(y).swapaxes(-1, -2)
  np.testing.assert_allclose(x_gradient, expected, rtol=1e-5, atol=1e-5)
  rows, gradient = rounded(x), rounded(gradient)
  if y.ndim == 2:
    rows, gradient = (a.reshape(-1, a.shape[-1]) for a in (rows, gradient))
  expected = rows.swapaxes(-1, -2) @ gradient
  np.testing.assert_allclose(
      y_gradient, expected.swapaxes(-1, -2) if with_transposed else expected, rtol=1e-5, atol=1e-5)


def test_gradients_have_the_dtypes_of_the_factors():
  x, y = jnp.asarray(random(0, (5, 7)), jnp.bfloat16), random(1, (7, 3))

  def total(x, y):
    return products.product(x, y, jnp.dtype('bfloat16')).sum()

  gradients = jax.grad(total, (0, 1))(x, y)
  assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize('dtype, platform, expected', [
    ('bfloat16', 'cpu', 'float32'), ('bfloat16', 'tpu', 'bfloat16'),
    ('bfloat16', 'cuda', 'bfloat16'), ('float32', 'cpu', 'float32')])
def test_a_cpu_keeps_activations_in_float32(monkeypatch, dtype, platform, expected):
  config = BertConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2,
                      intermediate_size=32, dtype=dtype, attention='xla')
  monkeypatch.setattr('bert_jax.parallel.sharding.platform', lambda: platform)
  batch = torch_bert.make_batch(50, 2, 8, False)
  encoder = Encoder(config)
  shapes = jax.eval_shape(encoder.init, jax.random.key(0), batch, batch.positions[:, :1])
  hidden = jax.eval_shape(lambda p: encoder.apply(p, batch, method='encode'), shapes)
  assert hidden.dtype == expected


def _products(jaxpr):
  """Yields the dtypes of the factors of every product, also in nested programs."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield tuple(str(x.aval.dtype) for x in equation.invars)
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from _products(inner)


@pytest.mark.parametrize('make', [
    BertConfig, ModernConfig, AlbertConfig, DistilBertConfig, ElectraConfig, MPNetConfig])
def test_every_product_of_encoder_and_decoder_is_in_bfloat16(make):
  module = BertForPreTraining(make(
      vocab_size=50, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=32,
      dtype='bfloat16'))
  batch = torch_bert.make_batch(50, 2, 8, False)
  at = batch.positions[:, :3]
  shapes = jax.eval_shape(module.init, jax.random.key(0), batch, at, None)

  def loss(params):
    return module.apply(params, batch, at, None)[0].sum()

  factors = list(_products(jax.make_jaxpr(jax.grad(loss))(shapes).jaxpr))
  assert len(factors) >= 24 and set(factors) == {('bfloat16', 'bfloat16')}


@pytest.mark.skipif(not host.has_fast_bfloat16(), reason='XLA widens bfloat16 on this machine')
@pytest.mark.parametrize('with_transposed', [False, True])
@pytest.mark.parametrize('heads', [(), (2, 3)])
def test_no_transpose_is_folded_into_a_product(with_transposed, heads):
  multiply = products.product_with_transposed if with_transposed else products.product
  x, y = random(0, (*heads, 128, 64)), random(1, (*heads, 64, 64))

  def loss(x, y):
    # Heads before tokens, as in attention.
    turned = [a.swapaxes(0, 1) for a in (x, y)] if heads else (x, y)
    return (multiply(*turned, jnp.dtype('bfloat16')) ** 2).sum()

  text = jax.jit(jax.grad(loss, (0, 1))).lower(x, y).compile().as_text()
  dots = re.findall(r' dot\(.*', text)
  first = len(heads)
  axes = f'lhs_contracting_dims={{{first + 1}}}, ', f'rhs_contracting_dims={{{first}}}'
  assert len(dots) == 3 and all(part in dot for dot in dots for part in axes)
  # The factors of a product are parameters of its fusion.
  fusions = [part for part in text.split('\n\n') if ' dot(' in part]
  assert all(re.findall(r' = (\w+)\[\S+ parameter', part) == ['bf16'] * 2 for part in fusions)


def _distance(ours, reference):
  difference = sum(np.sum(np.square(ours[name] - x)) for name, x in reference.items())
  return np.sqrt(difference / sum(np.sum(np.square(x)) for x in reference.values()))


def test_gradients_are_about_as_exact_as_those_of_autocast(tmp_path):
  theirs = torch_bert.make('BertForMaskedLM', tmp_path, 'tiny')
  model = huggingface.load(tmp_path)
  batch = torch_bert.make_batch(model.config.vocab_size, 4, 32, False)
  targets = np.random.default_rng(0).integers(5, 900, batch.ids.shape)

  def torch_gradients(half):
    theirs.zero_grad()
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=half):
      loss = theirs(**torch_bert.inputs(batch), labels=torch.tensor(targets)).loss
    loss.backward()
    return {families.BERT.canonical(name): x.grad.float().numpy()
            for name, x in theirs.named_parameters()}

  def gradients(dtype):
    module = BertForPreTraining(dataclasses.replace(model.config, dtype=dtype))

    def loss(params):
      logits = module.apply(params, batch, batch.positions, None)[0]
      return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

    return layout.to_tensors(jax.jit(jax.grad(loss))(model.params), model.config)

  reference = torch_gradients(half=False)
  assert _distance(gradients('float32'), reference) < 1e-4
  ours = _distance(gradients('bfloat16'), reference)
  autocast = _distance(torch_gradients(half=True), reference)
  print('distance from float32:', ours, 'autocast:', autocast)
  assert ours <= 2 * autocast
