"""Losses and metrics as (sum, count), never as a mean.

Means of means are wrong as soon as counts differ between devices or microbatches
(huggingface/transformers#18297): sums and counts add up first.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy, and whether the label has the highest logit, from one pass over the logits.

  Args:
    logits: [..., V] float32.
    labels: [...] int32.

  Returns:
    (-log softmax(logits)[label] in nat, is_right): [...] float32 and [...] bool.
  """
  # The label's logit by comparison: a gather's gradient would be a scatter into [..., V].
  chosen = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1)
  highest = jax.lax.stop_gradient(logits.max(-1))
  log_partition = jnp.log(jnp.exp(logits - highest[..., None]).sum(-1)) + highest
  return log_partition - chosen, chosen >= highest


def weighted(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(sum of values * weights, sum of weights)."""
  return jnp.sum(values * weights), jnp.sum(weights)


def classification(logits: jax.Array, labels: jax.Array, weights: jax.Array,
                   prefix: str = '') -> Metrics:
  """The metrics 'loss' and 'accuracy' of logits [..., V], labels [...] and weights [...].

  `prefix` comes before both names. The loss is in nat, the weights are 0 on unused labels.
  """
  loss, is_right = cross_entropy(logits, labels)
  return {f'{prefix}loss': weighted(loss, weights),
          f'{prefix}accuracy': weighted(is_right, weights)}


def token_count(text_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The metric 'tokens': the number of real tokens of a batch."""
  return jnp.sum(text_ids > 0).astype(jnp.float32), jnp.float32(1)


def total_loss(metrics: Metrics, loss_weights: Mapping[str, float]) -> jax.Array:
  """The loss that is minimised, a float32 scalar: the weighted sum of the means, 0 for no count."""
  means = {name: metrics[name][0] / jnp.maximum(metrics[name][1], 1) for name in loss_weights}
  return sum(weight * means[name] for name, weight in loss_weights.items())


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
  """Computes the mean of each metric on the host; None where the count is 0."""
  return {name: float(total / count) if count else None for name, (total, count) in sums.items()}


def mean_loss(sums: Mapping[str, tuple[float, float]],
              loss_weights: Mapping[str, float]) -> float | None:
  """Computes `total_loss` on the host; None where all counts are 0."""
  parts = [weight * sums[name][0] / sums[name][1] for name, weight in loss_weights.items()
           if sums[name][1]]
  return float(sum(parts)) if parts else None
