"""Multi-head self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

`attend` takes one of five paths: plain XLA, a local window in XLA, or a kernel that never holds the
[L, L] weights (fused, splash, cudnn). Only the plain, the local and the fused path can drop
attention weights.
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import attention_paths, dot_product, kernels
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal, zeros
from bert_jax.model.kernels import MASKED
from bert_jax.model.local_attention import local_attention


def _path(module: nn.Module, length: int) -> str:
  """The path of `module`: xla on the short rows of init, and where a caller asks for weights."""
  if module.is_initializing():
    return 'xla'
  path, _ = attention_paths.choose_path(module.config, length)
  return 'xla' if module.is_mutable_collection('intermediates') else path


class Mask(NamedTuple):
  """Visibility within a row: the tokens of one pair see each other."""

  text_ids: jax.Array  # [B, L] int32, 0 on padding, 1..P on the tokens of each pair
  bias: jax.Array | None  # [B, 1 or H, L, L], added to the scores; None = a kernel computes it


def make_mask(module: nn.Module, text_ids: jax.Array) -> Mask:
  """Makes the mask once for all layers of the encoder `module`; `text_ids` is [B, L]."""
  plain = _path(module, text_ids.shape[1]) == 'xla'
  return Mask(text_ids, dot_product.attention_bias(text_ids) if plain else None)


def attend(module: nn.Module, qkv: jax.Array, mask: Mask, *, deterministic: bool,
           rotate: Callable[[jax.Array], jax.Array] | None = None,
           reach: int | None = None) -> jax.Array:
  """Attention within the pairs, on the path that suits the config, the shapes and the platform.

  Args:
    module: gives the config and the dropout key, and keeps the weights for callers that ask for
      intermediates.
    qkv: [B, L, H * 3 * K]; query, key and value of a head stand side by side.
    mask: from `make_mask`.
    deterministic: no dropout.
    rotate: applied to query and key, [B, L, H, K] each.
    reach: how many tokens to either side a token sees; None = its whole pair.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  c, path = module.config, _path(module, qkv.shape[1])
  flat = (*qkv.shape[:2], -1)
  dropout = nn.Dropout(c.attention_dropout, deterministic=deterministic)

  def keep_and_drop(weights):
    module.sow('intermediates', 'weights', weights)  # [B, H, L, L]
    return dropout(weights)

  # One reshape for each part: XLA adds up their gradients in the shape of `qkv`.
  of_heads = (*qkv.shape[:2], c.num_heads, 3, c.head_size)
  query, key, value = (qkv.reshape(of_heads)[:, :, :, i] for i in range(3))  # [B, L, H, K]
  if rotate:
    query, key = rotate(query), rotate(key)
  # The blocks compute 3 * reach weights for each token, which saves work only in longer rows. The
  # kernels have no window. An exported program is for rows of all lengths: it has no blocks.
  length, is_local = qkv.shape[1], reach is not None
  in_blocks = is_local and (
      path != 'xla' or (isinstance(length, int) and length > 3 * reach))
  if in_blocks and not module.is_mutable_collection('intermediates'):
    return local_attention(query, key, value, mask.text_ids, reach, dropout).reshape(flat)
  if path == 'xla':
    bias = mask.bias
    if is_local:
      at = jnp.arange(length)
      is_near = jnp.abs(at[:, None] - at[None, :]) <= reach  # [L, L]
      bias = jnp.where(is_near, bias, MASKED)
    return dot_product.dot_product_attention(query, key, value, bias, keep_and_drop).reshape(flat)
  if path == 'fused':
    from bert_jax.model import fused_attention  # imports Pallas, which is slow

    if rotate:
      qkv = jnp.stack([query, key, value], axis=3).reshape(flat)
    random = None if deterministic or not c.attention_dropout else module.make_rng('dropout')
    return fused_attention.attend(qkv, mask.text_ids, c.head_size, c.attention_dropout, random)
  kernel = {'splash': kernels.splash, 'cudnn': kernels.cudnn}[path]
  return kernel(query, key, value, mask.text_ids).reshape(flat)


class SelfAttention(nn.Module):
  """Multi-head self-attention with one projection to query, key and value."""

  config: BertConfig
  reach: int | None = None  # as of `attend`
  out_stddev: float | None = None  # of the output projection; None = initializer_range
  output_dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask, *, deterministic: bool,
               rotate: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """[B, L, D] -> [B, L, D], before the residual; the other arguments as of `attend`."""
    c = self.config
    width = c.num_heads * c.head_size
    # One product of width 3D reads x once. Query, key and value of a head are adjacent: the fused
    # kernel reads this layout, and each chip of the model axis holds whole heads. Both axes are
    # merged: a TPU pads a last axis of K = 64 to 128, and XLA's CPU backend multiplies matrices
    # faster than three-dimensional arrays.
    qkv = self._project('qkv', x, 3 * width, c.initializer_range, ('embed', 'heads'))
    qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'heads'))  # [B, L, H * 3 * K]
    out = attend(self, qkv, mask, deterministic=deterministic, rotate=rotate,
                 reach=self.reach)  # [B, L, H * K]
    out_stddev = c.initializer_range if self.out_stddev is None else self.out_stddev
    out = self._project('out', out, c.hidden_size, out_stddev, ('heads', 'embed'))
    return nn.Dropout(self.output_dropout, deterministic=deterministic)(out)

  def _project(self, name: str, x: jax.Array, size: int, stddev: float,
               axes: tuple[str, str]) -> jax.Array:
    """A dense layer: [B, L, ...] -> [B, L, size]."""
    init = truncated_normal(stddev, *axes)
    kernel = self.param(f'{name}_kernel', init, (x.shape[-1], size)).astype(x.dtype)
    y = x.reshape(-1, x.shape[-1]) @ kernel  # [B * L, size]
    if self.config.has_biases:
      y += self.param(f'{name}_bias', zeros(axes[1]), (size,)).astype(x.dtype)
    return y.reshape(*x.shape[:2], size)
