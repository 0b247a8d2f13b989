"""Transformations of updates that optax lacks: LAMB, StableAdamW, Muon, rates by layer.

The layers of the encoder are stacked, [N, ...]. Each transformation treats every layer
separately: it maps over N, or its factors lie along N.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from bert_jax.errors import require
from bert_jax.model import parameters


def _is_within(path: tuple, *parts: str) -> bool:
  return any(key.key in parts for key in path if hasattr(key, 'key'))


def _each_layer(function: Callable[..., jax.Array], *trees: Any) -> Any:
  """Maps `function` over the leaves, and over each layer of stacked leaves."""

  def change(path, *leaves):
    return (jax.vmap(function) if _is_within(path, 'layers') else function)(*leaves)

  return jax.tree_util.tree_map_with_path(change, *trees)


class UncorrectedAdamState(NamedTuple):
  """Moments of Adam without a step count."""

  mu: optax.Updates
  nu: optax.Updates


def scale_by_uncorrected_adam(b1: float, b2: float,
                              eps: float) -> optax.GradientTransformation:
  """Adam without bias correction, as in google-research/bert `optimization.py`."""

  def init(params):
    return UncorrectedAdamState(optax.tree.zeros_like(params),
                                optax.tree.zeros_like(params))

  def update(grads, state, params=None):
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
    nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g * g, state.nu, grads)
    updates = jax.tree.map(lambda m, n: m / (jnp.sqrt(n) + eps), mu, nu)
    return updates, UncorrectedAdamState(mu, nu)

  return optax.GradientTransformation(init, update)


def trust_ratio() -> optax.GradientTransformation:
  """Scales updates to norms of parameters: LAMB (You et al. 2020, arXiv:1904.00962)."""

  def scale(update, param):
    return optax.scale_by_trust_ratio().update(update, optax.EmptyState(), param)[0]

  return optax.stateless(lambda updates, params: _each_layer(scale, updates, params))


def stable_adam(b1: float, b2: float, eps: float,
                decay: optax.GradientTransformation) -> optax.GradientTransformation:
  """Adam and decay, with smaller steps if Adam's second moment lags behind the gradient.

  Divides the update of each parameter by max(1, RMS(g / sqrt(v))): StableAdamW (Wortsman
  et al. 2023, arXiv:2304.13013, algorithm 2). It replaces clipping.
  """
  steps = optax.chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), decay)

  def update(grads, state, params):
    updates, state = steps.update(grads, state, params)
    second = optax.tree.bias_correction(state[0].nu, b2, state[0].count)

    def stabilize(update, g, v):
      rms = jnp.sqrt(jnp.mean(g * g / jnp.maximum(v, eps**2)))
      return update / jnp.maximum(1, rms)

    return _each_layer(stabilize, updates, grads, second), state

  return optax.GradientTransformation(steps.init, update)


def muon(adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """Orthogonalizes the updates of the layers' matrices; `adam` updates everything else.

  Muon (Jordan et al. 2024) through optax. Its updates are as large as Adam's, so that
  both take the same rate and decay (Liu et al. 2025, arXiv:2502.16982). Query, key and
  value are one matrix, as the model stores them.
  """

  def matrices(updates):
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), updates)

  def label(path, kind):
    # 'first' is ModernBERT's first layer, which is not among the stacked ones.
    in_layer = _is_within(path, 'layers', 'first')
    return 'muon' if in_layer and kind == parameters.Kind.MATRIX else 'adam'

  def labels(params):
    return jax.tree_util.tree_map_with_path(label, parameters.kinds(params))

  def to_size_of_adam(updates, _):
    return jax.tree.map(lambda x: 0.2 * max(x.shape[-2:])**0.5 * x, updates)

  orthogonal = optax.chain(contrib.scale_by_muon(weight_dimension_numbers=matrices),
                           optax.stateless(to_size_of_adam))
  return optax.partition({'muon': orthogonal, 'adam': adam}, labels)


def _by_depth(updates: Any, below: Callable, layers: Callable) -> Any:
  """Applies `layers` to the updates of the layers, and `below` to those below them.

  Below the layers are the embeddings, their projection and tables of relative positions.
  """

  def change(path, update):
    if _is_within(path, 'embeddings', 'projection', 'relative', 'relative_bias'):
      return below(update)
    return layers(update) if _is_within(path, 'layers') else update

  return jax.tree_util.tree_map_with_path(change, updates)


def _along_layers(factors: jax.Array, update: jax.Array) -> jax.Array:
  return update * factors.astype(update.dtype).reshape(-1, *[1] * (update.ndim - 1))


def freeze(layers: int) -> optax.GradientTransformation:
  """Zeroes the updates below the layers and of the first `layers` layers."""

  def zero_first(update: jax.Array) -> jax.Array:
    return _along_layers(jnp.arange(len(update)) >= layers, update)

  return optax.stateless(
      lambda updates, params: _by_depth(updates, jnp.zeros_like, zero_first))


def decay_rate(decay: float) -> optax.GradientTransformation:
  """Scales updates by depth, as google-research/electra's `_get_layer_lrs` does.

  Everything below the layers has depth 0 (`_by_depth`), the layers have 1 to N, and the
  head has N + 2. The factor of depth d is decay ** (N + 2 - d).
  """

  def scale(updates, _):
    layers = next((len(x) for path, x in jax.tree_util.tree_leaves_with_path(updates)
                   if _is_within(path, 'layers')), 0)
    require(layers, f'optimizer.layer_decay={decay} has no effect here: no layer is trained')
    factors = decay ** (layers + 1 - jnp.arange(layers))
    return _by_depth(updates, lambda x: x * decay ** (layers + 2),
                     functools.partial(_along_layers, factors))

  return optax.stateless(scale)
