"""Other learning rates for other layers: frozen ones, and rates that fall towards the embeddings.

The layers of the encoder are stacked, [N, ...]: what differs between them is a factor along N.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def _by_part(updates: Any, embeddings: Callable, layers: Callable) -> Any:
  """The updates, those of the embeddings and of the stacked layers changed."""

  def change(path, update):
    parts = [key.key for key in path]
    if 'embeddings' in parts:
      return embeddings(update)
    return layers(update) if 'layers' in parts else update

  return jax.tree_util.tree_map_with_path(change, updates)


def _along_layers(factors: jax.Array, update: jax.Array) -> jax.Array:
  return update * factors.astype(update.dtype).reshape(-1, *[1] * (update.ndim - 1))


def freeze(layers: int) -> optax.GradientTransformation:
  """No update for the embeddings and the first `layers` layers."""

  def frozen(update: jax.Array) -> jax.Array:
    return _along_layers(jnp.arange(len(update)) >= layers, update)

  return optax.stateless(lambda updates, params: _by_part(updates, jnp.zeros_like, frozen))


def decay_rate(decay: float) -> optax.GradientTransformation:
  """Updates times decay ** (layers above, the head being one): Clark et al. 2020, appendix A.

  Layer i of N (from 0) is scaled by decay ** (N - i), the embeddings by decay ** (N + 1). N is
  known from the layers themselves.
  """

  def scale(updates, params):
    del params
    layers = next(len(x) for path, x in jax.tree_util.tree_leaves_with_path(updates)
                  if 'layers' in [key.key for key in path])
    return _by_part(updates, lambda x: x * decay ** (layers + 1),
                    lambda x: _along_layers(decay ** (layers - jnp.arange(layers)), x))

  return optax.stateless(scale)
