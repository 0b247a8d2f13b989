import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.objectives import losses


def test_cross_entropy_by_hand():
  logits = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]))
  loss, right = losses.cross_entropy(logits + 3.0, jnp.array([0, 1]))
  np.testing.assert_allclose(loss, [-np.log(0.7), -np.log(0.1)], rtol=1e-6)
  assert right.tolist() == [True, False]


def test_the_gradient_of_a_logit_is_p_minus_one_hot():
  logits = jax.random.normal(jax.random.key(0), (4, 7)) * 3
  labels = jnp.array([0, 3, 6, 2])
  grads = jax.grad(lambda x: losses.cross_entropy(x, labels)[0].sum())(logits)
  np.testing.assert_allclose(grads, jax.nn.softmax(logits) - np.eye(7)[labels], atol=1e-6)


def test_huge_logits_stay_finite():
  logits = jnp.array([[1e4, -1e9, 0.0]])
  loss, _ = losses.cross_entropy(logits, jnp.array([2]))
  np.testing.assert_allclose(loss, [1e4], rtol=1e-6)


def test_total_is_the_weighted_sum_of_means_not_a_mean_of_means():
  metrics = {'a_loss': (jnp.float32(6), jnp.float32(3)), 'b_loss': (jnp.float32(5), jnp.float32(0)),
             'accuracy': (jnp.float32(1), jnp.float32(3))}
  assert float(losses.total_loss(metrics, {'a_loss': 1.0, 'b_loss': 2.0})) == 2.0 + 2 * 5.0
  total, count = losses.weighted(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 0.0, 1.0]))
  assert (float(total), float(count)) == (5.0, 2.0)
