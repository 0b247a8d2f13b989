"""Multi-head self-attention in XLA (Vaswani et al. 2017, arXiv:1706.03762).

An encoder chooses once how it attends (`attention_kernels.choose`) and passes the choice,
an `Attend`, to the attention of all its layers. This file has full attention, which
materializes the [L, L] weights, and local attention, which materializes only the weights
near the diagonal. The kernels materialize none.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import MASKED, Biased, truncated_normal, zeros
from bert_jax.model.products import product, product_with_transposed
from bert_jax.model.rotary import rotate


class Mask(NamedTuple):
  """A token sees its own text; in a causal row, only itself and the tokens before it."""

  text_ids: jax.Array  # [B, L] int32, 0 on padding, 1..P on the tokens of each text
  bias: jax.Array | None  # [B, 1 or H, L, L], added to the scores; None for a kernel
  causal: jax.Array | None  # [B] bool, see `Tokens`
  visible_ids: jax.Array  # [B, L] int32, `text_ids` with 0 on hidden tokens


class Heads(NamedTuple):
  """Query, key and value of every head."""

  # Query and key are rotated if there are angles.
  query: jax.Array  # [B, L, H, K]
  key: jax.Array  # [B, L, H, K]
  value: jax.Array  # [B, L, H, K]
  # Before the rotation: [B, L, H * 3 * K], with the three vectors of a head side by side.
  projected: Biased
  angles: jax.Array | None = None  # [2, B, L, 1, K / 2], of `rotary`

  def side_by_side(self) -> jax.Array:
    """Query, key and value in the order of `projected`: [B, L, H * 3 * K]."""
    if self.angles is None:
      return self.projected.sum()
    parts = jnp.stack([self.query, self.key, self.value], axis=3)  # [B, L, H, 3, K]
    return parts.reshape(*self.query.shape[:2], -1)


class Dropout(NamedTuple):
  """Dropout of the attention weights."""

  rate: float  # share of dropped weights; 0 outside of training
  drop: Callable[[jax.Array], jax.Array]  # for attention in XLA: [..., L] -> [..., L]
  key: Callable[[], jax.Array]  # for kernels: makes the key of the bits that they draw


def visible_ids(tokens: Tokens) -> jax.Array:
  """The text ids [B, L] int32, with 0 on padding and on hidden tokens."""
  return (tokens.text_ids if tokens.hidden is None
          else jnp.where(tokens.hidden, 0, tokens.text_ids))


def attention_bias(tokens: Tokens) -> jax.Array:
  """The additive mask: a token attends only to the visible tokens of its text.

  Returns:
    [B, 1, L, L] float32, 0 where the query (axis 2) may see the key (axis 3), else -1e9.
  """
  keys = visible_ids(tokens)[:, None, :]  # [B, 1, L]
  visible = (tokens.text_ids[:, :, None] == keys) & (keys > 0)  # [B, L, L]
  if tokens.causal is not None:
    at = jnp.arange(tokens.text_ids.shape[1])
    visible &= (at[:, None] >= at[None, :]) | ~tokens.causal[:, None, None]
  return jnp.where(visible, 0.0, MASKED)[:, None]  # [B, 1, L, L]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(scores: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """softmax over the last axis in float32, returned in `dtype`: [..., L] -> [..., L].

  The backward pass needs only the weights, in `dtype`. Autodiff would also keep a copy in
  float32, the largest array of a layer.
  """
  return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_forward(scores, dtype):
  weights = softmax(scores, dtype)
  return weights, weights


def _softmax_backward(_, weights, gradient):
  weights, gradient = weights.astype(jnp.float32), gradient.astype(jnp.float32)
  return (weights * (gradient - (weights * gradient).sum(-1, keepdims=True)),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def keep_all(weights: jax.Array) -> jax.Array:
  """Keeps all weights: no dropout."""
  return weights


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None,
    drop: Callable[[jax.Array], jax.Array] = keep_all) -> tuple[jax.Array, jax.Array]:
  """softmax(Q K^T / sqrt(K) + bias) V for each head, the softmax in float32.

  Args:
    query: [B, L, H, K].
    key: [B, L, H, K].
    value: [B, L, H, K].
    bias: broadcastable to [B, H, L, L], added to the scaled scores.
    drop: dropout of the attention weights [B, H, L, L].

  Returns:
    ([B, L, H, K] in the dtype of `query`, the weights [B, H, L, L] before `drop`).
  """
  query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  # With heads before tokens, XLA:CPU calls its matmul library: up to twice as fast.
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, H, L, K]
  scores = product_with_transposed(query, key, query.dtype)  # [B, H, L, L] float32
  if bias is not None:
    scores = scores + bias  # [B, H, L, L]
  weights = softmax(scores, query.dtype)  # [B, H, L, L]
  out = product(drop(weights), value, query.dtype).astype(query.dtype)
  return out.swapaxes(1, 2), weights  # [B, L, H, K]


def local_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                    mask: Mask, reach: int,
                    drop: Callable[[jax.Array], jax.Array] = keep_all) -> jax.Array:
  """Attention to the visible tokens of the same text that are at most `reach` away.

  The blocks have max(`reach`, 1) tokens. A block sees itself and its two neighbors: the
  cost is linear in L. A token that sees no key, such as a hidden token far from visible
  tokens, gets zeros as in transformers: a softmax over masked keys would mix the texts.

  Args:
    query: [B, L, H, K].
    key: [B, L, H, K].
    value: [B, L, H, K].
    mask: from `Attend.mask`.
    reach: visible tokens on either side.
    drop: dropout of the attention weights.

  Returns:
    [B, L, H, K] in the dtype of `query`.
  """
  rows, length = mask.text_ids.shape
  size = max(reach, 1)
  blocks = -(-length // size)

  def in_blocks(x):
    """[B, L, ...] -> [B * blocks, size, ...]."""
    x = jnp.pad(x, [(0, 0), (0, blocks * size - length), *[(0, 0)] * (x.ndim - 2)])
    return x.reshape(rows * blocks, size, *x.shape[2:])

  def around(x):
    """[B, L, ...] -> [B * blocks, 3 * size, ...]: each block between its neighbors."""
    after = (blocks + 1) * size - length
    x = jnp.pad(x, [(0, 0), (size, after), *[(0, 0)] * (x.ndim - 2)])
    parts = [x[:, i * size:(i + blocks) * size].reshape(rows, blocks, size, *x.shape[2:])
             for i in range(3)]
    return jnp.concatenate(parts, axis=2).reshape(rows * blocks, 3 * size, *x.shape[2:])

  query_ids = in_blocks(mask.text_ids)[:, :, None]
  key_ids = around(mask.visible_ids)[:, None, :]
  # A query of index i in its block has index size + i among the keys.
  distance = jnp.arange(size)[:, None] + size - jnp.arange(3 * size)[None, :]
  # Both pads have text id 0, so their keys are invisible too.
  visible = (query_ids == key_ids) & (key_ids > 0) & (jnp.abs(distance) <= reach)
  if mask.causal is not None:
    visible &= (distance >= 0) | ~jnp.repeat(mask.causal, blocks)[:, None, None]
  bias = jnp.where(visible, 0.0, MASKED)[:, None]  # [B * blocks, 1, size, 3 * size]
  out, _ = dot_product_attention(in_blocks(query), around(key), around(value), bias, drop)
  out = jnp.where(visible.any(-1)[:, :, None, None], out, 0)
  return out.reshape(rows, blocks * size, *out.shape[2:])[:, :length]


@dataclasses.dataclass(frozen=True)
class Attend:
  """How all layers of an encoder attend; has no arrays, so it can be a module field."""

  # (heads, text ids, dropout[, reach][, causal]) -> [B, L, H * K] or [B, L, H, K]
  kernel: Callable[..., jax.Array] | None = None  # None = XLA
  kernel_has_windows: bool = False  # the kernel takes `reach`
  keeps_weights: bool = False  # returns the weights too, which no kernel can

  def mask(self, tokens: Tokens) -> Mask:
    """Makes the mask once for all layers."""
    bias = None if self.kernel else attention_bias(tokens)
    return Mask(tokens.text_ids, bias, tokens.causal, visible_ids(tokens))

  def __call__(self, heads: Heads, mask: Mask, dropout: Dropout,
               reach: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Attends within the texts.

    Args:
      heads: query, key and value.
      mask: from `mask`.
      dropout: dropout of the weights.
      reach: visible tokens on either side of a token; None = its whole text.

    Returns:
      ([B, L, H * K] or [B, L, H, K] in the dtype of the query, the weights [B, H, L, L]
      before dropout if `keeps_weights`).
    """
    query, key, value, *_ = heads
    if self.kernel and (reach is None or self.kernel_has_windows):
      options = {'reach': reach, 'causal': mask.causal}  # only some kernels take these
      return self.kernel(heads, mask.text_ids, dropout, **{
          name: x for name, x in options.items() if x is not None}), None
    if reach is None:
      out, weights = dot_product_attention(query, key, value, mask.bias, dropout.drop)
      return out, weights if self.keeps_weights else None
    length = query.shape[1]
    # Blocks compute 3 * reach weights per token, which saves work only in longer rows.
    # In an exported program the length is symbolic and cannot be split into blocks.
    saves_work = isinstance(length, int) and length > 3 * reach
    # With a kernel for the other layers, the mask has no bias: only blocks remain.
    if self.kernel or saves_work and not self.keeps_weights:
      return local_attention(query, key, value, mask, reach, dropout.drop), None
    at = jnp.arange(length)
    is_near = jnp.abs(at[:, None] - at[None, :]) <= reach  # [L, L]
    bias = jnp.where(is_near, mask.bias, MASKED)
    out, weights = dot_product_attention(query, key, value, bias, dropout.drop)
    sees = bias.max(-1)[:, 0] > MASKED / 2  # [B, L], see `local_attention`
    out = jnp.where(sees[:, :, None, None], out, 0)
    return out, weights if self.keeps_weights else None


class SelfAttention(nn.Module):
  """Multi-head self-attention with one projection to query, key and value."""

  config: BertConfig
  attend: Attend
  reach: int | None = None  # see `Attend`
  out_stddev: float | None = None  # of the output projection; None = initializer_range
  output_dropout: float = 0.0  # drops no bias, so only for models without biases

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask, *, deterministic: bool,
               angles: jax.Array | None = None
               ) -> tuple[Biased, jax.Array | None]:
    """Attends within the texts; the layer adds the result to `x`.

    Args:
      x: [B, L, D].
      mask: from `Attend.mask`.
      deterministic: no dropout.
      angles: [2, B, L, 1, K / 2], of `rotary`; None = no rotary positions.

    Returns:
      ([B, L, D], the weights [B, H, L, L] if `attend` keeps them).
    """
    c = self.config
    width = c.num_heads * c.head_size
    # One product of width 3D reads x once. Query, key and value of a head are adjacent:
    # the fused kernel reads this layout, and each chip of the model axis holds whole
    # heads. The heads and K are one axis: a TPU pads a last axis of K = 64 to 128, and
    # XLA:CPU multiplies matrices faster than three-dimensional arrays.
    projected = self._project('qkv', x, 3 * width, c.initializer_range,
                              ('embed', 'heads'))  # [B, L, H * 3 * K]

    def in_parts(qkv):
      qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'heads'))
      return qkv.astype(c.compute_dtype)

    # Linen numbers unnamed modules and derives their keys from the numbers. This dropout
    # is always the first, even where nothing uses it, so that the keys stay the same.
    drop = nn.Dropout(c.attention_dropout, deterministic=deterministic)
    dropout = Dropout(0.0 if deterministic else c.attention_dropout, drop,
                      functools.partial(self.make_rng, 'dropout'))
    # The gradient of a split is one concatenation; slices would add three padded arrays.
    qkv = in_parts(projected.sum()).reshape(*x.shape[:2], c.num_heads, 3, c.head_size)
    parts = jnp.split(qkv, 3, axis=3)
    query, key, value = (part.squeeze(3) for part in parts)  # [B, L, H, K]
    projected = projected._replace(product=in_parts(projected.product))
    if angles is not None:
      query, key = rotate(query, angles), rotate(key, angles)
    out, weights = self.attend(Heads(query, key, value, projected, angles), mask, dropout,
                               self.reach)
    out_stddev = c.initializer_range if self.out_stddev is None else self.out_stddev
    out = out.reshape(*x.shape[:2], width)
    out = self._project('out', out, c.hidden_size, out_stddev, ('heads', 'embed'))
    drop = nn.Dropout(self.output_dropout, deterministic=deterministic)
    return out._replace(product=drop(out.product)), weights

  def _project(self, name: str, x: jax.Array, size: int, stddev: float,
               axes: tuple[str, str]) -> Biased:
    """A dense layer that leaves its bias to the caller: [B, L, in] -> [B, L, size]."""
    init = truncated_normal(stddev, *axes)
    kernel = self.param(f'{name}_kernel', init, (x.shape[-1], size))
    # XLA:CPU multiplies matrices faster than three-dimensional arrays.
    y = product(x.reshape(-1, x.shape[-1]), kernel, self.config.compute_dtype)
    bias = None
    if self.config.has_biases:
      bias = self.param(f'{name}_bias', zeros(axes[1]), (size,)).astype(y.dtype)
    return Biased(y.reshape(*x.shape[:2], size), bias)
