"""Multi-head self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

`attend` takes one of five paths: plain XLA, a local window in XLA, or a kernel that never holds the
[L, L] weights (fused, splash, cudnn). Only the plain, the local and the fused path can drop
attention weights.
"""

from collections.abc import Callable
from collections.abc import Iterable
import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.errors import UserError
from bert_jax.model import kernels
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros
from bert_jax.model.kernels import LANES
from bert_jax.model.kernels import MASKED
from bert_jax.parallel import sharding

# Shortest row for splash and cuDNN: below, the plain path is as fast and its weights are small.
_SHORTEST = 512
# Longest row for the fused kernel: its [L, L] weights fit several times into a TPU core's memory.
_LONGEST = 512
_BEST = {'tpu': ('fused', 'splash'), 'gpu': ('cudnn',), 'cuda': ('cudnn',)}
_PLATFORMS = {'fused': ('tpu', 'cpu'), 'splash': ('tpu', 'cpu'), 'cudnn': ('gpu', 'cuda', 'rocm')}


def _obstacle(config: BertConfig, kernel: str, length: int, platform: str) -> str:
  """Returns the reason why a kernel cannot be used; '' if it can."""
  heads = config.num_heads // sharding.parts('heads')
  if platform not in _PLATFORMS[kernel]:
    return f'{kernel} is not for {platform}'
  if kernel == 'fused' and length > _LONGEST:
    return f'{length} is above {_LONGEST}'
  if kernel in ('fused', 'splash') and length % LANES:
    return f'{length} is no multiple of {LANES}'
  if kernel == 'fused' and (not heads or LANES % config.head_size
                            or heads * config.head_size % LANES):
    return f'{heads} heads of {config.head_size} fill no blocks of {LANES}'
  if kernel != 'fused' and config.attention_dropout:
    return f'attention_dropout={config.attention_dropout} (0 allows {kernel})'
  if config.attention == 'auto' and kernel != 'fused' and length < _SHORTEST:
    return f'{kernel} gains nothing below {_SHORTEST}'
  if kernel == 'cudnn' and config.dtype == 'float32':
    return f'dtype={config.dtype} (bfloat16 allows {kernel})'
  return ''


def choose_path(config: BertConfig, length: int, platform: str = '') -> tuple[str, str]:
  """Chooses the path for rows of `length`.

  Args:
    config: its `attention` is auto or names a path.
    length: L.
    platform: the platform that it runs on; '' = the one of the current trace.

  Returns:
    (xla, fused, splash or cudnn; the reason).

  Raises:
    UserError: the kernel that `config.attention` names cannot be used.
  """
  platform, requested = platform or kernels.platform(), config.attention
  if requested == 'xla':
    return 'xla', 'asked for'
  if requested != 'auto':
    obstacle = _obstacle(config, requested, length, platform)
    if obstacle:
      raise UserError(f'model.attention={requested} cannot be had: {obstacle}')
    return requested, 'asked for'
  obstacle = f'there is no kernel for {platform}'
  for kernel in _BEST.get(platform, ()):
    obstacle = _obstacle(config, kernel, length, platform)
    if not obstacle:
      return kernel, 'it holds no weights'
  return 'xla', obstacle


def describe(config: BertConfig, lengths: Iterable[int], platform: str = '') -> str:
  """Returns the path and its reason for rows of each length, for people."""
  lengths_of = {}
  for length in dict.fromkeys(lengths):
    lengths_of.setdefault(choose_path(config, length, platform), []).append(str(length))
  return '; '.join(f'{path} for rows of {" and ".join(rows)}: {reason}'
                   for (path, reason), rows in lengths_of.items())


def _path(module: nn.Module, length: int) -> str:
  """Chooses the path for `module`: xla for init, whose rows are short, and to sow the weights."""
  if module.is_initializing():
    return 'xla'
  path, _ = choose_path(module.config, length)
  return 'xla' if module.is_mutable_collection('intermediates') else path


class Mask(NamedTuple):
  """Visibility within a row: the tokens of one pair see each other."""

  pair_index: jax.Array  # [B, L] int32, 0 on padding, 1..P on the tokens of each pair
  bias: jax.Array | None  # [B, 1, L, L] from `attention_bias`; None = a kernel computes it


def make_mask(module: nn.Module, pair_index: jax.Array) -> Mask:
  """Makes the mask once for all layers of the encoder `module`; `pair_index` is [B, L]."""
  plain = _path(module, pair_index.shape[1]) == 'xla'
  return Mask(pair_index, attention_bias(pair_index) if plain else None)


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


def attend(module: nn.Module, qkv: jax.Array, mask: Mask, *, deterministic: bool,
           rotate: Callable[[jax.Array], jax.Array] | None = None, reach: int = 0) -> jax.Array:
  """Attention within the pairs, on the path that suits the config, the shapes and the platform.

  Args:
    module: gives the config and the dropout key, and keeps the weights for callers that ask for
      intermediates.
    qkv: [B, L, H * 3 * K]; query, key and value of a head stand side by side.
    mask: from `make_mask`.
    deterministic: no dropout.
    rotate: applied to query and key, [B, L, H, K] each.
    reach: how many tokens to either side a token sees; 0 = its whole pair.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  c, path = module.config, _path(module, qkv.shape[1])
  flat = (*qkv.shape[:2], -1)
  dropout = nn.Dropout(c.attention_dropout, deterministic=deterministic)

  def keep_and_drop(weights):
    module.sow('intermediates', 'weights', weights)  # [B, H, L, L]
    return dropout(weights)

  # Reshaped for each part, so that their gradients add up in the wide shape of `qkv`.
  of_heads = (*qkv.shape[:2], c.num_heads, 3, c.head_size)
  query, key, value = (qkv.reshape(of_heads)[:, :, :, i] for i in range(3))  # [B, L, H, K]
  if rotate:
    query, key = rotate(query), rotate(key)
  if reach and not module.is_mutable_collection('intermediates'):
    return local_attention(query, key, value, mask.pair_index, reach, dropout).reshape(flat)
  if path == 'xla':
    bias = mask.bias
    if reach:
      at = jnp.arange(qkv.shape[1])
      is_near = jnp.abs(at[:, None] - at[None, :]) <= reach  # [L, L]
      bias = jnp.where(is_near, bias, MASKED)
    return dot_product_attention(query, key, value, bias, keep_and_drop).reshape(flat)
  if path == 'fused':
    from bert_jax.model import fused_attention  # imports Pallas, which is slow

    if rotate:
      qkv = jnp.stack([query, key, value], axis=3).reshape(flat)
    random = None if deterministic or not c.attention_dropout else module.make_rng('dropout')
    return fused_attention.attend(qkv, mask.pair_index, c.head_size, c.attention_dropout, random)
  kernel = {'splash': kernels.splash, 'cudnn': kernels.cudnn}[path]
  return kernel(query, key, value, mask.pair_index).reshape(flat)


class SelfAttention(nn.Module):
  """Multi-head self-attention with one projection to query, key and value."""

  config: BertConfig
  reach: int = 0  # as of `attend`
  out_stddev: float | None = None  # of the output projection; None = initializer_range
  output_dropout: float = 0.0

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask, *, deterministic: bool,
               rotate: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """[B, L, D] -> [B, L, D], before the residual; the other arguments as of `attend`."""
    c = self.config
    width = c.num_heads * c.head_size
    # One product of width 3D reads x once. The query, key and value of a head stand side by side:
    # so the fused kernel reads them, and each chip of the model axis has those of its own heads.
    # All axes are as wide as they can be: a TPU pads a last one of K = 64 to 128, or transposes,
    # and XLA's CPU backend runs products of two axes faster than of three.
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
