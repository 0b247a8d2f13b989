"""Distillation: losses by hand, and no loss for a student that equals its teacher."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from bert_jax.data.rows import Rows
from bert_jax.model import heads
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import distillation, losses
from bert_jax.objectives.distillation import Distillation
from bert_jax.objectives.masking import Masked
from bert_jax.objectives.objective import Keys
from tests.interop import torch_bert

CONFIG = BertConfig(vocab_size=100, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64,
                    max_positions=32, dropout=0.0, attention_dropout=0.0)
KEYS = Keys(None, jax.random.key(0))


def example():
  batch = torch_bert.make_batch(100, 3, 16, padded=True)
  positions = np.array([[1, 2], [1, 2], [1, 2]], np.int32)
  masked = Masked(batch.ids, positions, batch.ids[:, 1:3], np.array([[1, 1], [1, 0], [1, 1]], 'f4'))
  one = np.zeros((3, 1), np.int32)
  return Rows(batch, one, one, one, np.arange(3)), masked


def initial(objective, seed):
  return nn.unbox(jax.jit(objective.init)(jax.random.key(seed)))


def make(student=CONFIG):
  objective = Distillation(heads.BertForPreTraining(student), heads.BertForPreTraining(CONFIG))
  teacher = dataclasses.replace(objective, model=objective.teacher)
  return objective, initial(teacher, 1)


def test_soft_and_cosine_losses_by_hand():
  student, teacher = np.random.default_rng(0).normal(size=(2, 5, 7)) * 3
  p, q = special.softmax(teacher / 2, -1), special.softmax(student / 2, -1)
  expected = 4 * np.sum(p * (np.log(p) - np.log(q)), -1)
  np.testing.assert_allclose(losses.soft_divergence(jnp.asarray(student), teacher, 2.0),
                             expected, rtol=1e-5)
  a, b = jnp.array([[1.0, 0.0], [3.0, 4.0]]), jnp.array([[0.0, 2.0], [6.0, 8.0]])
  np.testing.assert_allclose(distillation.cosine_distance(a, b), [1.0, 0.0], atol=1e-6)


def test_a_student_that_equals_its_teacher_has_no_soft_or_cosine_loss():
  objective, params = make()
  loss = jax.jit(objective.loss)
  metrics = loss(params, params, *example(), KEYS)
  assert abs(metrics['soft_loss'][0]) < 1e-5 and abs(metrics['cosine_loss'][0]) < 1e-5
  assert metrics['mlm_loss'][1] == 5  # masked positions
  tokens = example()[0].tokens.text_ids.sum()  # all real tokens
  assert metrics['cosine_loss'][1] == metrics['soft_loss'][1] == tokens
  apart = loss(initial(objective, 2), params, *example(), KEYS)
  assert apart['soft_loss'][0] > 1e-3 and apart['cosine_loss'][0] / apart['cosine_loss'][1] > 0.1


@pytest.mark.medium
def test_the_soft_loss_covers_all_real_tokens_as_published():
  """Against the loss in NumPy's float64, and the gradient of all tokens at once."""
  objective, teacher = make(dataclasses.replace(CONFIG, initializer_range=0.3))
  params, (rows, masked) = initial(objective, 2), example()
  batch = rows.tokens
  assert batch.ids.shape[1] % masked.positions.shape[1] == 0
  # Three positions at a time: the last chunk has one.
  odd = Masked(masked.ids, *(np.pad(x, [(0, 0), (0, 1)]) for x in masked[1:]))
  every = np.broadcast_to(np.arange(16), batch.ids.shape)
  real = (batch.text_ids > 0).astype(np.float64)

  def logits(module, params):
    return module.apply(params, batch, every, None)[0]

  student, theirs = (np.asarray(logits(objective.model, p), np.float64)[..., :CONFIG.vocab_size]
                     for p in (params, teacher))
  p, q = special.softmax(theirs / 2, -1), special.softmax(student / 2, -1)
  expected = (4 * np.sum(p * (np.log(p) - np.log(q)), -1) * real).sum()

  @jax.jit
  @jax.grad
  def whole(params):
    soft = losses.soft_divergence(logits(objective.model, params),
                                     logits(objective.teacher, teacher), 2.0)
    return jnp.sum(soft * real)

  for given in (masked, odd):
    (total, count), grads = jax.jit(jax.value_and_grad(
        lambda params, given=given: objective.loss(params, teacher, rows, given, KEYS)['soft_loss'],
        has_aux=True))(params)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert count == real.sum()
    at_once = whole(params)
    rounding = 1e-6 * max(np.abs(x).max() for x in jax.tree.leaves(at_once))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=rounding), grads, at_once)


@pytest.mark.medium
@pytest.mark.parametrize('name', ['soft_loss', 'mlm_loss', 'cosine_loss'])
def test_a_smaller_student_lowers_each_loss(name):
  """Each loss alone: together they disagree, because the teacher knows nothing."""
  objective, teacher = make(dataclasses.replace(CONFIG, num_layers=1))
  params = initial(objective, 2)

  @jax.jit
  def step(params):
    def mean(params):
      total, count = objective.loss(params, teacher, *example(), KEYS)[name]
      return total / count
    value, grads = jax.value_and_grad(mean)(params)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

  values = []
  for _ in range(30):
    params, value = step(params)
    values.append(float(value))
  assert values[-1] < 0.8 * values[0]
