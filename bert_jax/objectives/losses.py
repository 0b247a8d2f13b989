"""Losses and metrics as (sum, count), never as a mean.

Means of means are wrong as soon as counts differ between devices or microbatches
(huggingface/transformers#18297): sums and counts add up first.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count), float32 scalars


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy and whether the label has the highest logit, from one pass over the logits.

  Args:
    logits: [..., V] float32.
    labels: [...] int32.

  Returns:
    (-log softmax(logits)[label] in nat, right): [...] float32 and [...] bool.
  """
  # The label's logit by comparison: a gather's gradient would be a scatter into [..., V].
  chosen = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1)
  highest = jax.lax.stop_gradient(logits.max(-1))
  log_partition = jnp.log(jnp.exp(logits - highest[..., None]).sum(-1)) + highest
  return log_partition - chosen, chosen >= highest


def weighted(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(sum of values * weights, sum of weights)."""
  return jnp.sum(values * weights), jnp.sum(weights)


def classification(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Metrics:
  """The metrics 'loss' and 'accuracy' of logits [..., V], labels [...] and weights [...]."""
  values, right = cross_entropy(logits, labels)
  return {'loss': weighted(values, weights), 'accuracy': weighted(right, weights)}


def mean(metric: tuple[Any, Any]) -> Any:
  """sum / count, and 0 for a count of 0."""
  total, count = metric
  return total / jnp.maximum(count, 1)


def total_loss(metrics: Metrics, loss_weights: Mapping[str, float]) -> jax.Array:
  """The loss that is minimised: the weighted sum of the objectives' means. float32 scalar."""
  return sum(weight * mean(metrics[name]) for name, weight in loss_weights.items())


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
  """The mean of each metric, on the host; None where no position counts, which is no 0."""
  return {name: float(total / count) if count else None for name, (total, count) in sums.items()}


def mean_loss(sums: Mapping[str, tuple[float, float]],
              loss_weights: Mapping[str, float]) -> float | None:
  """`total_loss`, on the host; None where no position counts for any objective."""
  parts = [weight * sums[name][0] / sums[name][1] for name, weight in loss_weights.items()
           if sums[name][1]]
  return float(sum(parts)) if parts else None
