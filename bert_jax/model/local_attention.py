"""Attention to the neighbourhood of each token, linear in the length of the row."""

import jax
import jax.numpy as jnp

from bert_jax.model.dot_product import dot_product_attention
from bert_jax.model.kernels import MASKED


def local_attention(query: jax.Array, key: jax.Array, value: jax.Array, text_ids: jax.Array,
                    reach: int, drop=lambda weights: weights) -> jax.Array:
  """Attention to the tokens of the same pair that are at most `reach` away.

  In blocks of `reach` tokens (1 for 0), each of which sees itself and its two neighbours: linear in
  L.

  Args:
    query, key, value: [B, L, H, K].
    text_ids: [B, L] int32, as of `attention_bias`.
    reach: tokens to either side.
    drop: applied to the attention weights (dropout).

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  rows, length = text_ids.shape
  size = max(reach, 1)
  blocks = -(-length // size)

  def in_blocks(x):
    """[B, L, ...] -> [B * blocks, size, ...]."""
    x = jnp.pad(x, [(0, 0), (0, blocks * size - length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(rows * blocks, size, *x.shape[2:])

  def around(x):
    """[B, L, ...] -> [B * blocks, 3 * size, ...]: each block between its neighbours."""
    x = jnp.pad(x, [(0, 0), (size, (blocks + 1) * size - length), *[(0, 0)] * (x.ndim - 2)])
    parts = [x[:, i * size:(i + blocks) * size].reshape(rows, blocks, size, *x.shape[2:])
             for i in range(3)]
    return jnp.concatenate(parts, axis=2).reshape(rows * blocks, 3 * size, *x.shape[2:])

  of_query, of_key = in_blocks(text_ids), around(text_ids)
  distance = jnp.arange(size)[:, None] - (jnp.arange(3 * size)[None, :] - size)
  visible = ((of_query[:, :, None] == of_key[:, None, :]) & (of_key[:, None, :] > 0)
             & (jnp.abs(distance) <= reach))  # [B * blocks, size, 3 * size]
  bias = jnp.where(visible, 0.0, MASKED)[:, None]  # [B * blocks, 1, size, 3 * size]
  out = dot_product_attention(in_blocks(query), around(key), around(value), bias, drop)
  return out.reshape(rows, blocks * size, *out.shape[2:])[:, :length]
