"""Scaled dot-product attention in XLA, and the mask that isolates the pairs of a row."""

import functools

import jax
import jax.numpy as jnp

from bert_jax.model.kernels import MASKED


def attention_bias(text_ids: jax.Array) -> jax.Array:
  """The additive mask: a token attends to the tokens of its own pair and to nothing else.

  Args:
    text_ids: [B, L] int32, 0 on padding, p = 1..P on the tokens of the p-th pair of the row.

  Returns:
    [B, 1, L, L] float32, 0 where the query (axis 2) may see the key (axis 3) and -1e9 elsewhere.
  """
  same = text_ids[:, :, None] == text_ids[:, None, :]  # [B, L, L]
  real = text_ids[:, None, :] > 0  # [B, 1, L]
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
  # With heads before tokens XLA's CPU backend takes its library of products: up to twice as fast.
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, H, L, K]
  scores = jnp.einsum('bhlk,bhmk->bhlm', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    scores = scores + bias  # [B, H, L, L]
  weights = drop(softmax(scores, query.dtype))  # [B, H, L, L]
  return jnp.einsum('bhlm,bhmk->bhlk', weights, value).swapaxes(1, 2)  # [B, L, H, K]
