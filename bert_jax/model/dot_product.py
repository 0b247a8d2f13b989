"""Scaled dot-product attention in XLA: to all of a pair, or to the neighbours of each token."""

import functools

import jax
import jax.numpy as jnp

from bert_jax.model.kernels import MASKED


def attention_bias(pair_index: jax.Array) -> jax.Array:
  """The additive mask: a token attends to the tokens of its own pair and to nothing else.

  Args:
    pair_index: [B, L] int32, 0 on padding, p = 1..P on the tokens of the p-th pair of the row.

  Returns:
    [B, 1, L, L] float32, 0 where the query (axis 2) may see the key (axis 3) and -1e9 elsewhere.
  """
  same = pair_index[:, :, None] == pair_index[:, None, :]  # [B, L, L]
  real = pair_index[:, None, :] > 0  # [B, 1, L]
  return jnp.where(same & real, 0.0, MASKED)[:, None]  # [B, 1, L, L]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """softmax over the last axis in float32, returned in `dtype`: [..., L] -> [..., L].

  The gradient needs only the weights, and keeps them in `dtype`. Autodiff would keep a second copy
  in float32, the largest array of a layer.
  """
  return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_forward(scores, dtype):
  weights = softmax(scores, dtype)
  return weights, weights


def _softmax_backward(dtype, weights, gradient):
  del dtype
  weights, gradient = weights.astype(jnp.float32), gradient.astype(jnp.float32)
  return (weights * (gradient - (weights * gradient).sum(-1, keepdims=True)),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                          bias: jax.Array | None = None, drop=lambda weights: weights) -> jax.Array:
  """softmax(Q K^T / sqrt(K) + bias) V for each head, the softmax in float32.

  Args:
    query, key, value: [B, L, H, K].
    bias: broadcastable to [B, H, L, L], added to the scaled scores.
    drop: applied to the attention weights [B, H, L, L] (dropout).

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  scores = jnp.einsum('blhk,bmhk->bhlm', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    scores = scores + bias  # [B, H, L, L]
  weights = drop(softmax(scores, query.dtype))  # [B, H, L, L]
  return jnp.einsum('bhlm,bmhk->blhk', weights, value)  # [B, L, H, K]


def local_attention(query: jax.Array, key: jax.Array, value: jax.Array, pair_index: jax.Array,
                    reach: int, drop=lambda weights: weights) -> jax.Array:
  """Attention to the tokens of the same pair that are at most `reach` away.

  In blocks of `reach` tokens, each of which sees itself and its two neighbours: linear in L.

  Args:
    query, key, value: [B, L, H, K].
    pair_index: [B, L] int32, as of `attention_bias`.
    reach: tokens to either side.
    drop: applied to the attention weights (dropout).

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  rows, length = pair_index.shape
  blocks = -(-length // reach)

  def in_blocks(x):
    """[B, L, ...] -> [B * blocks, reach, ...]."""
    x = jnp.pad(x, [(0, 0), (0, blocks * reach - length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(rows * blocks, reach, *x.shape[2:])

  def around(x):
    """[B, L, ...] -> [B * blocks, 3 * reach, ...]: each block between its neighbours."""
    x = jnp.pad(x, [(0, 0), (reach, (blocks + 1) * reach - length), *[(0, 0)] * (x.ndim - 2)])
    parts = [x[:, i * reach:(i + blocks) * reach].reshape(rows, blocks, reach, *x.shape[2:])
             for i in range(3)]
    return jnp.concatenate(parts, axis=2).reshape(rows * blocks, 3 * reach, *x.shape[2:])

  of_query, of_key = in_blocks(pair_index), around(pair_index)
  distance = jnp.arange(reach)[:, None] - (jnp.arange(3 * reach)[None, :] - reach)
  visible = ((of_query[:, :, None] == of_key[:, None, :]) & (of_key[:, None, :] > 0)
             & (jnp.abs(distance) <= reach))  # [B * blocks, reach, 3 * reach]
  bias = jnp.where(visible, 0.0, MASKED)[:, None]  # [B * blocks, 1, reach, 3 * reach]
  out = dot_product_attention(in_blocks(query), around(key), around(value), bias, drop)
  return out.reshape(rows, blocks * reach, *out.shape[2:])[:, :length]
