"""Scaled dot-product multi-head self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import kernels
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros

# Finite, so that a row of nothing but padding gives a uniform softmax and not NaN.
MASKED = -1e9


def attention_bias(pair_index: jax.Array) -> jax.Array:
  """The additive mask: a token attends to the tokens of its own pair and to nothing else.

  Args:
    pair_index: [B, L] int32, 0 on padding, p = 1..P on the tokens of the p-th pair of the row.

  Returns:
    [B, 1, L, L] float32, 0 where the query (axis 2) may see the key (axis 3) and -1e9 elsewhere.
  """
  same = pair_index[:, :, None] == pair_index[:, None, :]  # [B, L, L]
  real = pair_index[:, None, :] > 0  # [B, 1, L]
  return jnp.where(same & real, 0.0, MASKED)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """softmax over the last axis, in float32; the weights are given in `dtype`.

  So are they kept for the gradient, which needs nothing else: autodiff would keep a second copy in
  float32, the largest array of a layer.
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
    drop: applied to the attention weights (dropout).

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  scores = jnp.einsum('blhk,bmhk->bhlm', query, key, preferred_element_type=jnp.float32)
  if bias is not None:
    scores = scores + bias
  weights = drop(softmax(scores, query.dtype))  # [B, H, L, L]
  return jnp.einsum('bhlm,bmhk->blhk', weights, value)


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

  mine, theirs = in_blocks(pair_index), around(pair_index)
  at = jnp.arange(reach)[:, None] - (jnp.arange(3 * reach)[None, :] - reach)
  seen = ((mine[:, :, None] == theirs[:, None, :]) & (theirs[:, None, :] > 0)
          & (jnp.abs(at) <= reach))
  bias = jnp.where(seen, 0.0, MASKED)[:, None]
  out = dot_product_attention(in_blocks(query), around(key), around(value), bias, drop)
  return out.reshape(rows, blocks * reach, *out.shape[2:])[:, :length]


class SelfAttention(nn.Module):
  """Multi-head self-attention with one fused projection to query, key and value."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None, *,
               deterministic: bool) -> jax.Array:
    """Attends within the pairs.

    Args:
      x: [B, L, D].
      pair_index: [B, L] int32.
      bias: [B, 1, L, L] that `attention_bias` makes of it; None = a kernel does the attention.
      deterministic: no dropout.

    Returns:
      [B, L, D] before the residual and its dropout.
    """
    c = self.config
    d, h, k = c.hidden_size, c.num_heads, c.head_size
    # One product of width 3D reads x once. The query, key and value of a head stand side by side:
    # so the fused kernel reads them, and each chip of the model axis has those of its own heads.
    # All axes are as wide as they can be: a TPU pads a last one of K = 64 to 128, or transposes,
    # and XLA's CPU backend runs products of two axes faster than of three.
    init = truncated_normal(c.initializer_range, 'embed', 'heads')
    kernel = self.param('qkv_kernel', init, (d, h * 3 * k)).astype(x.dtype)
    shift = self.param('qkv_bias', zeros('heads'), (h * 3 * k,)).astype(x.dtype)
    qkv = x.reshape(-1, d) @ kernel + shift
    qkv = qkv.reshape(*x.shape[:2], -1)  # [B, L, H * 3 * K]
    qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'heads'))

    path = kernels.chosen(c, x.shape[1])[0] if bias is None else 'xla'
    if path == 'fused':
      random = None if deterministic or not c.attention_dropout else self.make_rng('dropout')
      out = kernels.fused(qkv, pair_index, k, c.attention_dropout, random)
    else:
      query, key, value = (qkv.reshape(*x.shape[:2], h, 3, k)[:, :, :, i] for i in range(3))
      if path == 'xla':
        out = dot_product_attention(query, key, value, bias, self._dropout(deterministic))
      else:
        kernel_of = {'splash': kernels.splash, 'cudnn': kernels.cudnn}[path]
        out = kernel_of(query, key, value, pair_index)  # [B, L, H, K]

    init = truncated_normal(c.initializer_range, 'heads', 'embed')
    kernel = self.param('out_kernel', init, (h * k, d)).astype(x.dtype)
    shift = self.param('out_bias', zeros('embed'), (d,)).astype(x.dtype)
    return (out.reshape(-1, h * k) @ kernel + shift).reshape(x.shape)

  def _dropout(self, deterministic: bool):
    """What is done to the attention weights [B, H, L, L]."""
    dropout = nn.Dropout(self.config.attention_dropout, deterministic=deterministic)

    def drop(weights):
      self.sow('intermediates', 'weights', weights)  # kept for those who ask
      return dropout(weights)

    return drop
