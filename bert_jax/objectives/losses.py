"""Losses and metrics as (sum, count), never as a mean.

A mean of means is wrong when counts differ between devices or microbatches
(huggingface/transformers#18297). Therefore sums and counts are added over all devices and
microbatches before the division.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Computes cross-entropy and correctness in one pass over the logits.

  Args:
    logits: [..., V] float32.
    labels: [...] int32.

  Returns:
    (-log softmax(logits)[label] in nats, True where the label has the highest logit):
    [...] float32 and [...] bool.
  """
  # A comparison picks the label's logit: the gradient of a gather is a scatter into
  # [..., V].
  chosen = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1)
  # The shift by the maximum prevents overflow and cancels out: it needs no gradient.
  highest = jax.lax.stop_gradient(logits.max(-1))
  log_partition = jnp.log(jnp.exp(logits - highest[..., None]).sum(-1)) + highest
  return log_partition - chosen, chosen >= highest


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Cross-entropy of the sigmoid of logits, in nats, in a form that does not overflow."""
  return jnp.logaddexp(0, logits) - targets * logits


def soft_divergence(student: jax.Array, teacher: jax.Array,
                       temperature: float) -> jax.Array:
  """T^2 KL(teacher || student) of logits / T, with T = `temperature`: [..., V] -> [...].

  Hinton et al. 2015, section 2: T^2 keeps the size of the gradients independent of T.
  """
  student, teacher = (jax.nn.log_softmax(x / temperature) for x in (student, teacher))
  return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def weighted(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (sum of values * weights, sum of weights) of two arrays of equal shape."""
  return jnp.sum(values * weights), jnp.sum(weights)


def classification(logits: jax.Array, labels: jax.Array, weights: jax.Array,
                   prefix: str = '') -> Metrics:
  """Computes `prefix` + 'loss' (cross-entropy in nats) and `prefix` + 'accuracy'.

  Args:
    logits: [..., V] float32.
    labels: [...] int32.
    weights: [...] float32, 0 on unused labels.
    prefix: the start of both names, such as 'mlm_'.
  """
  loss, is_right = cross_entropy(logits, labels)
  return {f'{prefix}loss': weighted(loss, weights),
          f'{prefix}accuracy': weighted(is_right, weights)}


def token_count(text_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the metric 'tokens', the number of real tokens; `text_ids` is [B, L]."""
  return jnp.sum(text_ids > 0).astype(jnp.float32), jnp.float32(1)


def total_loss(metrics: Metrics, loss_weights: Mapping[str, float]) -> jax.Array:
  """Returns the loss to minimize, the weighted sum of the means: a float32 scalar.

  A loss whose count is 0 contributes 0.
  """
  return sum(weight * (metrics[name][0] / jnp.maximum(metrics[name][1], 1))
             for name, weight in loss_weights.items())


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
  """Computes the mean of each metric on the host; None where the count is 0."""
  return {
      name: float(total / count) if count else None
      for name, (total, count) in sums.items()
  }


def mean_loss(sums: Mapping[str, tuple[float, float]],
              loss_weights: Mapping[str, float]) -> float | None:
  """Computes `total_loss` on the host; None where all counts are 0."""
  parts = [weight * sums[name][0] / sums[name][1] for name, weight in loss_weights.items()
           if sums[name][1]]
  return float(sum(parts)) if parts else None
