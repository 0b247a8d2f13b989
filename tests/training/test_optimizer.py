import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.errors import UserError
from bert_jax.training import optimizer as optimizer_lib
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


def test_warmup_must_end_before_the_run():
  with pytest.raises(UserError, match='warmup_steps=10'):
    optimizer_lib.learning_rate(OptimizerConfig(warmup_steps=10), 10)


PARAMS = {'dense': {'kernel': jnp.array([[1.0, -2.0]]), 'bias': jnp.array([0.5])},
          'norm': {'scale': jnp.array([1.0]), 'bias': jnp.array([0.25])},
          'attention': {'qkv_kernel': jnp.array([3.0]), 'qkv_bias': jnp.array([0.1])}}


def test_what_decays():
  assert optimizer_lib.decays(PARAMS) == {
      'dense': {'kernel': True, 'bias': False}, 'norm': {'scale': False, 'bias': False},
      'attention': {'qkv_kernel': True, 'qkv_bias': False}}


def _reference(config, grads_of_steps, corrected):
  """AdamW by its formulas, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), PARAMS)
  m = v = jax.tree.map(np.zeros_like, params)
  decays = optimizer_lib.decays(PARAMS)
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


@pytest.mark.parametrize('wrong', [dict(name='sgd'), dict(learning_rate=0.0), dict(b2=1.0),
                                   dict(warmup_steps=-1), dict(accumulation=0)])
def test_wrong_optimizers_are_refused(wrong):
  with pytest.raises(UserError, match=next(iter(wrong))):
    OptimizerConfig(**wrong)
