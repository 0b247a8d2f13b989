from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model.modern import Modern, ModernConfig
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import transforms
from bert_jax.training.optimizer import OptimizerConfig


def test_schedule_at_its_corners():
  config = OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000)
  rate = optimizer_lib.learning_rate(config, 1_000_000)
  expected = {0: 0.0, 1: 1e-8, 5_000: 5e-5, 10_000: 1e-4, 505_000: 5e-5, 999_999: 1e-4 / 990_000,
              1_000_000: 0.0}
  for t, value in expected.items():
    np.testing.assert_allclose(float(rate(t)), value, rtol=1e-6)


def test_schedule_without_warmup():
  rate = optimizer_lib.learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=0), 4)
  assert [float(rate(t)) for t in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize('decay, shares', [
    ('linear', {60: 1.0, 70: 0.75, 90: 0.25}), ('1-sqrt', {60: 1.0, 70: 0.5, 90: 1 - 0.75**0.5})])
def test_warmup_stable_decay(decay, shares):
  config = OptimizerConfig(learning_rate=2.0, warmup_steps=20, decay=decay, decay_ratio=0.5)
  rate = optimizer_lib.learning_rate(config, 100)
  for t, share in {0: 0.0, 5: 0.25, 20: 1.0, 40: 1.0, 100: 0.0, **shares}.items():
    np.testing.assert_allclose(float(rate(t)), 2 * share, atol=1e-6)


@pytest.mark.parametrize('ratio, steps, warmup', [
    (0.29, 100, 29), (0.57, 100, 57), (0.58, 100, 58), (0.07, 100, 7), (0.1, 29, 2),
    (0.06, 1150, 69), (0.1, 1_000_000, 100_000), (1e-6, 3_000_000, 3)])
def test_a_warmup_ratio_loses_no_step(ratio, steps, warmup):
  rate = optimizer_lib.learning_rate(
      OptimizerConfig(learning_rate=1.0, warmup_steps=0, warmup_ratio=ratio), steps)
  assert float(rate(warmup)) == 1.0
  np.testing.assert_allclose(float(rate(warmup - 1)), (warmup - 1) / warmup, rtol=1e-6)


def test_steps_beyond_31_bits_are_refused():
  optimizer_lib.learning_rate(OptimizerConfig(), 2**31 - 1)
  with pytest.raises(UserError, match='would have 2,147,483,648 steps, and can have 2,147,483,647'):
    optimizer_lib.learning_rate(OptimizerConfig(), 2**31)


def test_warmup_must_end_before_the_run():
  with pytest.raises(UserError, match='warmup_steps=10'):
    optimizer_lib.learning_rate(OptimizerConfig(warmup_steps=10), 10)


PARAMS = {'dense': {'kernel': jnp.array([[1.0, -2.0]]), 'bias': jnp.array([0.5])},
          'norm': {'scale': jnp.array([1.0]), 'bias': jnp.array([0.25])},
          'attention': {'qkv_kernel': jnp.array([3.0]), 'qkv_bias': jnp.array([0.1])}}


def test_everything_but_biases_and_norms_decays():
  assert optimizer_lib.has_weight_decay(PARAMS) == {
      'dense': {'kernel': True, 'bias': False}, 'norm': {'scale': False, 'bias': False},
      'attention': {'qkv_kernel': True, 'qkv_bias': False}}


def _reference(config, grads_of_steps, corrected):
  """AdamW by its formulas, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), PARAMS)
  m = v = jax.tree.map(np.zeros_like, params)
  decays = optimizer_lib.has_weight_decay(PARAMS)
  for t, grads in enumerate(grads_of_steps):
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * min(1.0, config.clip_norm / norm), grads)
    m = jax.tree.map(lambda m, g: config.b1 * m + (1 - config.b1) * g, m, grads)
    v = jax.tree.map(lambda v, g: config.b2 * v + (1 - config.b2) * g**2, v, grads)
    c1, c2 = (1 - config.b1**(t + 1), 1 - config.b2**(t + 1)) if corrected else (1, 1)
    rate = config.learning_rate * min(t / config.warmup_steps, (6 - t) / (6 - config.warmup_steps))
    params = jax.tree.map(
        lambda p, m, v, d: p - rate * (m / c1 / (np.sqrt(v / c2) + config.eps)
                                       + config.weight_decay * d * p), params, m, v, decays)
  return params


@pytest.mark.parametrize('name, eps', [('adamw', 1e-8), ('bert_adamw', 1e-6)])
def test_updates_follow_the_formulas(name, eps):
  config = OptimizerConfig(name=name, eps=eps, learning_rate=0.1, warmup_steps=2, weight_decay=0.5)
  optimizer = optimizer_lib.make_optimizer(config, 6)
  rng = np.random.default_rng(0)
  steps = [jax.tree.map(lambda x: rng.normal(size=x.shape) * 3, PARAMS) for _ in range(5)]
  params, state = PARAMS, optimizer.init(PARAMS)
  for grads in steps:
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  expected = _reference(config, steps, corrected=name == 'adamw')
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


def stacked_params():
  """Two stacked layers and a head; and the same parameters with separate layers."""
  draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)
  layers = {'up': {'kernel': draw(2, 8, 6), 'bias': draw(2, 6)}, 'norm': {'scale': draw(2, 6)}}
  layers['up']['kernel'] *= jnp.array([0.1, 10.0])[:, None, None]  # unlike each other
  head = {'kernel': draw(6, 3), 'bias': draw(3)}
  apart = {str(i): jax.tree.map(lambda x, i=i: x[i], layers) for i in range(2)}
  return {'layers': layers, 'head': head}, {**apart, 'head': head}


def stepped(optimizer, params, count=3):
  """The parameters after `count` updates, whose gradients are a function of the parameters."""
  state = optimizer.init(params)
  for i in range(count):
    grads = jax.tree.map(lambda x, i=i: jnp.sin(5 * x + i) * 3**i, params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


def assert_layers_equal(stacked, apart):
  stacked = {**{str(i): jax.tree.map(lambda x, i=i: x[i], stacked['layers']) for i in range(2)},
             'head': stacked['head']}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), stacked, apart)


PLAIN = dict(learning_rate=0.1, warmup_steps=0, clip_norm=0.0, weight_decay=0.3)


@pytest.mark.parametrize('more', [{}, {'frozen_layers': 1, 'layer_decay': 0.5}])
@pytest.mark.parametrize('name', optimizer_lib.NAMES)
def test_a_skipped_step_moves_only_the_schedule(name, more):
  """Every optimizer must keep the schedule as the last part of its chain."""
  params, _ = stacked_params()
  optimizer = optimizer_lib.make_optimizer(OptimizerConfig(name, **PLAIN, **more), 10)
  before = optimizer.init(params)
  _, after = optimizer.update(params, before, params)
  assert isinstance(before[-1], optax.ScaleByScheduleState)
  skipped = optimizer_lib.after_skipped_step(before, after)
  assert skipped[-1].count == 1 and skipped[:-1] == before[:-1]


def test_lamb_scales_each_layer_separately():
  stacked, apart = stacked_params()
  rate = optimizer_lib.learning_rate(OptimizerConfig(**PLAIN), 10)
  expected = optax.chain(
      optax.scale_by_adam(), optax.add_decayed_weights(0.3, optimizer_lib.has_weight_decay),
      optax.masked(optax.scale_by_trust_ratio(), optimizer_lib.has_weight_decay),
      optax.scale_by_learning_rate(rate))
  lamb = optimizer_lib.make_optimizer(OptimizerConfig('lamb', **PLAIN), 10)
  assert_layers_equal(stepped(lamb, stacked), stepped(expected, apart))


def test_stable_adamw_follows_its_algorithm_for_each_layer():
  stacked, apart = stacked_params()
  config = OptimizerConfig('stable_adamw', **PLAIN, b2=0.5)
  updated = stepped(optimizer_lib.make_optimizer(config, 10), stacked)
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), apart)
  decays, slowed = optimizer_lib.has_weight_decay(params), []
  m = v = jax.tree.map(np.zeros_like, params)
  for t in range(3):
    grads = jax.tree.map(lambda x, t=t: np.sin(5 * x + t) * 3**t, params)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.5 * v + 0.5 * g * g, v, grads)

    def update(p, m, v, g, decayed, t=t):
      m, v = m / (1 - 0.9**(t + 1)), v / (1 - 0.5**(t + 1))
      slowed.append(max(1, np.sqrt(np.mean(g * g / np.maximum(v, 1e-16)))))
      rate = 0.1 * (10 - t) / 10 / slowed[-1]
      return p - rate * (0.3 * decayed * p + m / (np.sqrt(v) + 1e-8))

    params = jax.tree.map(update, params, m, v, grads, decays)
  assert max(slowed) > 1.2 and min(slowed) == 1
  assert_layers_equal(updated, params)


def test_muon_orthogonalizes_the_matrices_of_each_layer():
  stacked, _ = stacked_params()
  config = OptimizerConfig('muon', **PLAIN | dict(weight_decay=0.0))
  updated = stepped(optimizer_lib.make_optimizer(config, 10), stacked, count=1)
  adam = stepped(optimizer_lib.make_optimizer(
      OptimizerConfig('adamw', **PLAIN | dict(weight_decay=0.0)), 10), stacked, count=1)
  moved = np.asarray(stacked['layers']['up']['kernel'] - updated['layers']['up']['kernel'])
  for layer in moved:
    values = np.linalg.svd(layer, compute_uv=False) / (0.1 * 0.2 * np.sqrt(8))
    assert values.min() > 0.6 and values.max() < 1.3  # after 5 steps of Newton and Schulz
  for name in ('head', 'layers'):
    left, right = updated[name], adam[name]
    if name == 'layers':
      left, right = ({**x, 'up': x['up']['bias']} for x in (left, right))
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_matrices_of_one_shape_are_orthogonalized_together():
  rng = np.random.default_rng(0)
  shapes = {'up': (2, 8, 24), 'down': (2, 24, 8), 'first': (8, 24), 'square': (3, 8, 8)}
  updates = {name: jnp.asarray(rng.normal(size=shape), jnp.float32)
             for name, shape in shapes.items()}
  together = transforms._orthogonalize_all(jnp.dtype('float32'), updates)
  for name, shape in shapes.items():
    for x, y in zip(updates[name].reshape(-1, *shape[-2:]),
                    together[name].reshape(-1, *shape[-2:])):
      u, _, v = np.linalg.svd(x, full_matrices=False)
      # The same singular vectors; the values are close to 1.
      values = np.diag(u.T @ np.asarray(y) @ v.T)
      assert values.min() > 0.6 and values.max() < 1.3
      np.testing.assert_allclose(u * values @ v, y, atol=2e-4)
  text = jax.jit(lambda x: transforms._orthogonalize_all(jnp.dtype('float32'), x)).lower(
      updates).as_text()
  assert text.count('dot_general') == 2 * 5 * 3  # two shapes, five steps, three products


def test_muon_computes_in_bfloat16_on_accelerators(monkeypatch):
  """Like the published code. The result differs from float32 by 2 to 4%."""
  x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 192)), jnp.float32)
  exact = transforms._orthogonalize(jnp.dtype('float32'), x)
  monkeypatch.setattr(transforms.products, 'activation_dtype', lambda dtype: dtype)
  rounded = transforms._orthogonalize(jnp.dtype('bfloat16'), x)
  assert rounded.dtype == jnp.float32
  distance = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
  assert 0.001 < distance < 0.05
  values = np.linalg.svd(rounded, compute_uv=False)
  assert values.min() > 0.6 and values.max() < 1.3


def test_normuon_gives_neurons_updates_of_similar_size():
  """Three updates of two stacked layers and of a single matrix, against NumPy."""
  rng = np.random.default_rng(0)
  shapes = {'up': (2, 8, 6), 'first': (8, 24)}
  scale = {name: rng.lognormal(size=shape[-1]) for name, shape in shapes.items()}
  transform = transforms._equalize_neurons()
  state = transform.init({name: jnp.zeros(shape) for name, shape in shapes.items()})
  means = {name: 0.0 for name in shapes}
  for _ in range(3):
    updates = {name: rng.normal(size=shape) * scale[name] for name, shape in shapes.items()}
    results, state = transform.update(
        {name: jnp.asarray(x, jnp.float32) for name, x in updates.items()}, state)
    for name, x in updates.items():
      means[name] = 0.95 * means[name] + 0.05 * (x**2).mean(-2, keepdims=True)
      expected = x / np.sqrt(means[name])
      sizes = [np.sqrt((y**2).sum((-2, -1), keepdims=True)) for y in (x, expected)]
      np.testing.assert_allclose(results[name], expected * sizes[0] / sizes[1], rtol=1e-4)
      np.testing.assert_allclose(state.second[name], means[name], rtol=1e-5)
  # The sizes of the neurons' updates differed by their scale; now they are alike.
  before, after = (np.sqrt((np.asarray(x['first'])**2).mean(0)) for x in (updates, results))
  assert before.max() / before.min() > 5 and after.max() / after.min() < 3


def test_normuon_equals_muon_with_updates_scaled_by_neuron():
  stacked, _ = stacked_params()
  muon, normuon = (stepped(optimizer_lib.make_optimizer(
      OptimizerConfig(name, **PLAIN | dict(weight_decay=0.0)), 10), stacked, count=1)
                   for name in ('muon', 'normuon'))
  moved, scaled = (np.asarray(stacked['layers']['up']['kernel'] - x['layers']['up']['kernel'])
                   for x in (muon, normuon))
  expected = moved / np.sqrt((moved**2).mean(-2, keepdims=True))
  expected *= np.sqrt((moved**2).sum((-2, -1), keepdims=True)
                      / (expected**2).sum((-2, -1), keepdims=True))
  np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-6)
  for tree in (muon, normuon):
    tree['layers'] = {**tree['layers'], 'up': tree['layers']['up']['bias']}
  jax.tree.map(np.testing.assert_array_equal, muon, normuon)


@pytest.mark.parametrize('layer', ['first', 'last_0'])
def test_muon_also_updates_the_single_layers_of_modernbert(layer):
  config = ModernConfig(vocab_size=50, hidden_size=16, num_layers=5, num_heads=2,
                        intermediate_size=24, max_positions=16)
  tokens = jnp.zeros((1, 8), jnp.int32)
  params = nn.unbox(jax.jit(Modern(config).init)(
      jax.random.key(0), Tokens(*[tokens] * 4), tokens[:, :1]))['params']
  config = OptimizerConfig('muon', **PLAIN | dict(weight_decay=0.0))
  updated = stepped(optimizer_lib.make_optimizer(config, 10), params, count=1)
  moved = jax.tree.map(lambda a, b: np.asarray(a - b), params, updated)
  matrices = [moved[layer][part][name] for part, name in
              (('attention', 'qkv_kernel'), ('attention', 'out_kernel'))]
  matrices += [moved[layer]['feed_forward'][name]['kernel'] for name in ('up', 'gate', 'down')]
  for matrix in matrices:
    values = np.linalg.svd(matrix, compute_uv=False) / (0.1 * 0.2 * np.sqrt(max(matrix.shape)))
    assert values.min() > 0.6 and values.max() < 1.3
  np.testing.assert_allclose(np.abs(moved['pooler']['dense']['kernel']), 0.1, rtol=1e-3)  # Adam's


@pytest.mark.parametrize('wrong', [dict(name='sgd'), dict(decay='cosine'), dict(decay_ratio=0.0),
                                   dict(decay_ratio=1.5), dict(learning_rate=0.0), dict(b2=1.0),
                                   dict(warmup_steps=-1), dict(accumulation=0)])
def test_wrong_optimizers_are_refused(wrong):
  with pytest.raises(UserError, match=next(iter(wrong))):
    OptimizerConfig(**wrong)
