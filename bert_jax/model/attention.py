"""Scaled dot-product multi-head self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import kernels
from bert_jax.model.config import BertConfig
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
    # One product of width 3D reads x once; 'qkv' is never sharded, so each chip of the model axis
    # holds the query, key and value of its own heads. Rows and positions are one axis in the
    # projections: XLA's CPU backend runs products of two axes faster than of three.
    init = truncated_normal(c.initializer_range, 'embed', 'qkv', 'heads', 'kv')
    kernel = self.param('qkv_kernel', init, (d, 3, h, k)).astype(x.dtype)
    shift = self.param('qkv_bias', zeros('qkv', 'heads', 'kv'), (3, h, k)).astype(x.dtype)
    qkv = jnp.einsum('nd,dchk->nchk', x.reshape(-1, d), kernel) + shift
    qkv = qkv.reshape(*x.shape[:2], 3, h, k)  # [B, L, 3, H, K]
    qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'qkv', 'heads', 'kv'))
    dropout = nn.Dropout(c.attention_dropout, deterministic=deterministic)

    def drop(weights):
      self.sow('intermediates', 'weights', weights)  # [B, H, L, L], kept for those who ask
      return dropout(weights)

    if bias is None:
      rate = 0.0 if deterministic else c.attention_dropout
      random = jax.random.key_data(self.make_rng('dropout')) if rate else None
      out = kernels.attend(c, qkv, pair_index, rate, random)
    else:
      out = dot_product_attention(*jnp.unstack(qkv, axis=2), bias, drop)  # [B, L, H, K]

    init = truncated_normal(c.initializer_range, 'heads', 'kv', 'embed')
    kernel = self.param('out_kernel', init, (h, k, d)).astype(x.dtype)
    shift = self.param('out_bias', zeros('embed'), (d,)).astype(x.dtype)
    out = out.reshape(-1, h, k)  # [B * L, H, K]
    return (jnp.einsum('nhk,hkd->nd', out, kernel) + shift).reshape(x.shape)
