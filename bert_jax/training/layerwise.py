"""Learning rates by layer: frozen layers, and rates that fall towards the embeddings.

The layers of the encoder are stacked, [N, ...]: a layer's rate is a factor along N.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def _by_part(updates: Any, embeddings: Callable, layers: Callable) -> Any:
  """Applies `embeddings` to updates of the embeddings and their projection, `layers` to layers'."""

  def change(path, update):
    parts = [key.key for key in path]
    if 'embeddings' in parts or 'projection' in parts:
      return embeddings(update)
    return layers(update) if 'layers' in parts else update

  return jax.tree_util.tree_map_with_path(change, updates)


def _along_layers(factors: jax.Array, update: jax.Array) -> jax.Array:
  return update * factors.astype(update.dtype).reshape(-1, *[1] * (update.ndim - 1))


def freeze(layers: int) -> optax.GradientTransformation:
  """Zeroes the updates of the embeddings, their projection and the first `layers` layers."""

  def frozen(update: jax.Array) -> jax.Array:
    return _along_layers(jnp.arange(len(update)) >= layers, update)

  return optax.stateless(lambda updates, params: _by_part(updates, jnp.zeros_like, frozen))


def decay_rate(decay: float) -> optax.GradientTransformation:
  """Scales updates by depth, as google-research/electra's `_get_layer_lrs`.

  The embeddings and their projection have depth 0, the layers 1 to N, and the head N + 2. The
  factor of depth d is decay ** (N + 2 - d).
  """

  def scale(updates, params):
    del params
    layers = next(len(x) for path, x in jax.tree_util.tree_leaves_with_path(updates)
                  if 'layers' in [key.key for key in path])
    return _by_part(updates, lambda x: x * decay ** (layers + 2),
                    lambda x: _along_layers(decay ** (layers + 1 - jnp.arange(layers)), x))

  return optax.stateless(scale)
