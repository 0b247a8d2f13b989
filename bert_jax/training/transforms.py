"""LAMB, StableAdamW, Muon and rates by layer, for the stacked layers of the encoder.

The layers of the encoder are stacked, [N, ...]. Each transformation treats every layer
separately: it maps over N, or its factors lie along N.
"""

from collections.abc import Callable
import functools
import itertools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
from optax import contrib

from bert_jax.errors import require
from bert_jax.model import parameters, products


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
  """Scales the update of each layer's array to the array's norm: LAMB (arXiv:1904.00962)."""

  def scale(update, param):
    return optax.scale_by_trust_ratio().update(update, optax.EmptyState(), param)[0]

  return optax.stateless(lambda updates, params: _each_layer(scale, updates, params))


def stable_adam(b1: float, b2: float, eps: float,
                decay: optax.GradientTransformation) -> optax.GradientTransformation:
  """Adam and decay; takes a smaller step where the gradient outgrows the second moment.

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


# Coefficients of the polynomial whose iteration moves all singular values close to 1.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_SMALL = 1e-8  # added to divisors, which are 0 for a zero update


def _orthogonalize(dtype: jnp.dtype, x: jax.Array) -> jax.Array:
  """Approximates U V^T of x = U S V^T, [M, N], by five Newton-Schulz steps."""
  # Except on CPUs, arrays between products have `dtype` too, as in the published code.
  kept = products.activation_dtype(dtype)
  x = (x / (jnp.linalg.norm(x) + _SMALL)).astype(kept)
  for _ in range(5):
    a = products.product_with_transposed(x, x, dtype).astype(kept)
    b = _CUBIC * a + _QUINTIC * products.product(a, a, dtype)
    x = _LINEAR * x + products.product(b, x, dtype)
  return x.astype(jnp.float32)


def _orthogonalize_all(dtype: jnp.dtype, updates: Any) -> Any:
  """Orthogonalizes every [..., M, N] matrix. Matrices of one shape share a batch.

  Batches matter on GPUs: the products of a small model take less time than their launch.
  """
  leaves, tree = jax.tree.flatten(updates)

  def is_tall(x):
    return x.shape[-2] > x.shape[-1]

  wide = [x.swapaxes(-1, -2) if is_tall(x) else x for x in leaves]
  batches = {}
  for i, x in enumerate(wide):
    batches.setdefault(x.shape[-2:], []).append(i)
  for shape, members in batches.items():
    stacks = [wide[i].reshape(-1, *shape) for i in members]
    batch = jax.vmap(functools.partial(_orthogonalize, dtype))(jnp.concatenate(stacks))
    ends = list(itertools.accumulate(len(stack) for stack in stacks))[:-1]
    for i, x in zip(members, jnp.split(batch, ends)):
      wide[i] = x.reshape(wide[i].shape)
  return tree.unflatten(
      x.swapaxes(-1, -2) if is_tall(leaf) else x for leaf, x in zip(leaves, wide))


class NeuronState(NamedTuple):
  """Running means of squared updates, one for each output of a matrix: [..., 1, N]."""

  second: optax.Updates


def _equalize_neurons(b2: float = 0.95) -> optax.GradientTransformation:
  """Equalizes the updates of the N outputs of each [..., M, N] matrix; keeps its norm.

  NorMuon (Li et al. 2025, arXiv:2510.05491): orthogonal updates still differ in size from
  neuron to neuron.
  """

  def squares(x):
    return jnp.mean(x * x, -2, keepdims=True)

  def init(params):
    # Unboxed, without logical axes: the means are small and have no axis M to shard.
    return NeuronState(optax.tree.zeros_like(jax.tree.map(squares, nn.unbox(params))))

  def update(updates, state, params=None):
    second = jax.tree.map(lambda old, x: b2 * old + (1 - b2) * squares(x),
                          state.second, updates)

    def scale(x, mean):
      scaled = x / (jnp.sqrt(mean) + _SMALL)
      before, after = (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True)
                       for y in (x, scaled))
      return scaled * (before / (after + _SMALL))

    return jax.tree.map(scale, updates, second), NeuronState(second)

  return optax.GradientTransformation(init, update)


def muon(adam: optax.GradientTransformation, dtype: jnp.dtype, *,
         by_neuron: bool = False) -> optax.GradientTransformation:
  """Orthogonalizes the updates of the layers' matrices; `adam` updates everything else.

  Muon (Jordan et al. 2024) through optax. Its updates are as large as Adam's, so that
  both take the same rate and decay (Liu et al. 2025, arXiv:2502.16982). Query, key and
  value are one matrix, as the model stores them. `by_neuron` makes it NorMuon.
  """

  def matrices(updates):
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), updates)

  def label(path, kind):
    # The first layer of ModernBERT and DeBERTa v2 and the last ones of ModernBERT are not
    # stacked.
    in_layer = _is_within(path, 'layers', 'first') or any(
        str(getattr(key, 'key', '')).startswith('last_') for key in path)
    return 'muon' if in_layer and kind == parameters.Kind.MATRIX else 'adam'

  def labels(params):
    return jax.tree_util.tree_map_with_path(label, parameters.kinds(params))

  def orthogonalize(updates, _):
    updates = _orthogonalize_all(jnp.dtype(dtype), updates)
    return jax.tree.map(lambda x: 0.2 * max(x.shape[-2:])**0.5 * x, updates)

  # With these arguments, optax computes only the momentum.
  momentum = contrib.scale_by_muon(ns_steps=0, preconditioning='aol',
                                   weight_dimension_numbers=matrices)
  steps = [momentum, optax.stateless(orthogonalize)]
  if by_neuron:
    steps.append(_equalize_neurons())
  orthogonal = optax.chain(*steps)
  return optax.partition({'muon': orthogonal, 'adam': adam}, labels)


def _by_depth(updates: Any, below: Callable, layers: Callable) -> Any:
  """Applies `layers` to the updates of the layers, and `below` to all updates below them.

  Below the layers are the embeddings, their projection and tables of relative positions.
  """

  def change(path, update):
    # A head may have one of these names, as the projection of late interaction.
    if _is_within(path, 'bert') and _is_within(
        path, 'embeddings', 'projection', 'relative', 'relative_bias'):
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


def scale_by_depth(decay: float) -> optax.GradientTransformation:
  """Scales updates by depth, as google-research/electra's `_get_layer_lrs` does.

  Everything below the layers has depth 0 (`_by_depth`), the layers have 1 to N, and the
  head has N + 2. The factor of depth d is decay ** (N + 2 - d).
  """

  def scale(updates, _):
    depth = next((len(x) for path, x in jax.tree_util.tree_leaves_with_path(updates)
                   if _is_within(path, 'layers')), 0)
    require(depth,
            f'optimizer.layer_decay={decay} has no effect here: no layer is trained')
    factors = decay ** (depth + 1 - jnp.arange(depth))
    return _by_depth(updates, lambda x: x * decay ** (depth + 2),
                     functools.partial(_along_layers, factors))

  return optax.stateless(scale)
