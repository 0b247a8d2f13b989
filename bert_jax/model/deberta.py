"""DeBERTa v2 and v3 (He et al. 2021, https://arxiv.org/abs/2006.03654 and 2111.09543).

Content and relative position have separate vectors. A token attends by content to
content, by content to position (c2p) and by position to content (p2c).
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require, require_choice
from bert_jax.model import attention, encoder
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import (
  Biased,
  LayerNorm,
  activation,
  dense,
  truncated_normal,
  zeros,
)
from bert_jax.model.products import activation_dtype, product
from bert_jax.model.short_convolution import neighbors


@dataclasses.dataclass(frozen=True)
class DebertaConfig(BertConfig):
  """Sizes of a DeBERTa, by default of the published v3 base."""

  architecture: str = 'deberta-v2'
  vocab_size: int = 128_100
  type_vocab_size: int = 0
  layer_norm_eps: float = 1e-7
  # Rows of the table on either side of distance 0. Half of them are for one distance
  # each, the others for ranges of distances. -1 = a row for each distance.
  position_buckets: int = 256
  max_relative_positions: int = -1  # larger distances share a row; -1 = max_positions
  pos_att_type: str = 'p2c|c2p'  # scores in addition to content: c2p, p2c or both
  share_att_key: bool = True  # positions use the projections of the content
  norm_rel_ebd: str = 'layer_norm'  # norm of the relative positions: layer_norm or none
  conv_kernel_size: int = 0  # tokens in the convolution of the first layer (v2); 0 = none
  conv_act: str = 'tanh'  # activation of the convolution: tanh, gelu, gelu_tanh or relu

  has_positions: ClassVar[bool] = False
  has_segments: ClassVar[bool] = False
  can_hide: ClassVar[bool] = False
  kernel_obstacle: ClassVar[str] = 'deberta-v2 adds scores of relative positions'
  pooler_activation: ClassVar[str] = 'gelu'

  def __post_init__(self):
    super().__post_init__()
    terms = self.pos_att_type.split('|')
    require(
        sorted(terms) in (['c2p'], ['p2c'], ['c2p', 'p2c']),
        f'model.pos_att_type={self.pos_att_type!r} is unknown: use c2p, p2c or c2p|p2c')
    require_choice('model.norm_rel_ebd', self.norm_rel_ebd, ('layer_norm', 'none'))
    require_choice('model.conv_act', self.conv_act, ('tanh', 'gelu', 'gelu_tanh', 'relu'))
    half = self.position_buckets // 2
    # The ranges cover distances from `half` to `farthest`. They matter only if a row has
    # distances above `half`.
    fits = half < self.farthest - 1 or half >= self.max_positions - 1
    require(
        self.position_buckets < 1 or half >= 2 and fits,
        f'model.position_buckets={self.position_buckets}: give at least 4, and less than '
        f'2 * ({self.farthest} - 1), or -1 for a row of the table for each distance')
    # The layers after the first one are scanned: at least one must remain.
    require(
        self.conv_kernel_size == 0
        or self.conv_kernel_size > 0 and self.conv_kernel_size % 2 and self.num_layers > 1,
        f'model.conv_kernel_size={self.conv_kernel_size} must be 0, or odd and positive in '
        'a model of at least 2 layers')

  @property
  def farthest(self) -> int:
    """The distance beyond which all distances share one row of the table."""
    if self.max_relative_positions < 1:
      return self.max_positions
    return self.max_relative_positions

  @property
  def span(self) -> int:
    """Rows of the table of relative positions on either side of distance 0."""
    return self.position_buckets if self.position_buckets > 0 else self.farthest

  @property
  def stacked_layers(self) -> int:
    return self.num_layers - bool(self.conv_kernel_size)

  @property
  def fewest_layers(self) -> tuple[int, int]:
    return 2, 4  # even, because the generator of an RTD run has half of the layers

  def generator(self) -> 'DebertaConfig':
    """Returns the config of the generator of an RTD run: as wide, half as deep."""
    return dataclasses.replace(self, num_layers=max(1, self.num_layers // 2),
                               conv_kernel_size=0)

  def flops_per_token(self, length: int, predictions: float) -> float:
    # A term computes 2 L scores for each token. Count the L scores that `skew` keeps.
    terms = len(self.pos_att_type.split('|'))
    return (super().flops_per_token(length, predictions)
            + 6 * terms * self.num_layers * self.hidden_size * length
            + 6 * self.conv_kernel_size * self.hidden_size**2)


@functools.lru_cache
def table_rows(config: DebertaConfig, length: int) -> np.ndarray:
  """Computes the row of the table for each distance i - j = -L..L of query i and key j.

  Each distance up to half of `position_buckets` has one row. Beyond it, the rows cover
  ranges that grow logarithmically.

  Returns:
    [2 L + 1] int32.
  """
  distance = np.arange(-length, length + 1)
  # In all other cases, each distance has its own row.
  if 0 < config.position_buckets < 2 * (config.farthest - 1):
    half = config.position_buckets // 2
    # In float32, to round as the reference implementation does.
    size = np.maximum(np.abs(distance), half).astype(np.float32) / np.float32(half)
    steps = (np.log(size) / np.log(np.float32((config.farthest - 1) / half))
             * np.float32(half - 1))
    bucket = (np.ceil(steps) + half) * np.sign(distance)
    distance = np.where(np.abs(distance) <= half, distance, bucket)
  return np.clip(distance + config.span, 0, 2 * config.span - 1).astype(np.int32)


def _rows(config: DebertaConfig, length: Any) -> tuple[Any, int]:
  """Returns `table_rows` counted from the first row in use, and the index of that row."""
  if isinstance(length, int):
    rows = table_rows(config, length)
    return rows - rows.min(), rows.min()
  # The length is symbolic in an exported program: slice the rows of the longest text.
  longest = config.max_positions
  rows = jnp.asarray(table_rows(config, longest))
  return rows[longest - length:longest + length + 1], 0


def skew(x: jax.Array) -> jax.Array:
  """Takes y[i, j] = x[i, j - i + L - 1] by reshapes: [..., L, 2 L] -> [..., L, L].

  This turns scores by distance into scores by token. A gather, and the scatter in its
  gradient, would be slow on a TPU. The tokens of a text are adjacent in a row, so their
  row indices give their distances.
  """
  *outer, length, _ = x.shape
  flat = x.reshape(*outer, -1)[..., length - 1:-1]
  return flat.reshape(*outer, length, 2 * length - 1)[..., :length]


class RelativeMask(NamedTuple):
  """An `attention.Mask`, and the relative positions that rows of this length use."""

  text_ids: jax.Array  # [B, L] int32
  bias: jax.Array  # [B, 1, L, L] float32
  causal: jax.Array | None  # [B] bool, see `Tokens`
  visible_ids: jax.Array  # [B, L] int32
  table: jax.Array  # [R, D], the part of the table that these rows use, see `_rows`


class RelativePositions(nn.Module):
  """The relative positions, shared by all layers: L -> [R, D] in the activation dtype."""

  config: DebertaConfig

  @nn.compact
  def __call__(self, length: int) -> jax.Array:
    c = self.config
    rows, first = _rows(c, length)
    init = truncated_normal(c.initializer_range, 'position', 'embed')
    table = self.param('table', init, (2 * c.span, c.hidden_size))
    table = nn.with_logical_constraint(table, (None, 'embed_act'))
    if isinstance(length, int):
      table = table[first:first + rows.max() + 1]
    if c.norm_rel_ebd == 'layer_norm':
      table = LayerNorm(c, name='norm')(table)
    return table.astype(activation_dtype(c.compute_dtype))


class DisentangledAttention(attention.SelfAttention):
  """Multi-head self-attention by content and by relative position."""

  config: DebertaConfig

  @nn.compact
  def __call__(self, x: jax.Array, mask: RelativeMask, *, deterministic: bool
               ) -> tuple[Biased, jax.Array | None]:
    """[B, L, D] -> ([B, L, D], the weights [B, H, L, L] if `attend` keeps them)."""
    c = self.config
    d, heads = c.hidden_size, (c.num_heads, 3, c.head_size)
    # Not `_project`, because the positions need this kernel too.
    init = truncated_normal(c.initializer_range, 'embed', 'heads')
    kernel = self.param('qkv_kernel', init, (d, 3 * d))
    bias = self.param('qkv_bias', zeros('heads'), (3 * d,)).astype(x.dtype)
    qkv = product(x.reshape(-1, d), kernel, c.compute_dtype) + bias
    qkv = qkv.reshape(*x.shape[:2], 3 * d)
    qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'heads'))
    by_head = qkv.reshape(*x.shape[:2], *heads)
    query, key, value = jnp.moveaxis(by_head, 3, 0)  # [B, L, H, K]
    table = nn.Dropout(c.dropout, deterministic=deterministic)(mask.table)

    def positions(part, name):
      """Queries (part 0) or keys (part 1) of the relative positions, [R, H, K]."""
      if c.share_att_key:
        part_kernel = kernel.reshape(d, *heads)[:, :, part].astype(x.dtype)  # [D, H, K]
        return (jnp.einsum('rd,dhk->rhk', table, part_kernel)
                + bias.reshape(heads)[:, part])
      y = dense(c, d, ('embed', 'heads'), name=name)(table)
      return y.reshape(-1, c.num_heads, c.head_size)

    terms, (rows, _) = c.pos_att_type.split('|'), _rows(c, x.shape[1])
    scores = 0.0  # [B, H, L, L]
    if 'c2p' in terms:
      by_distance = positions(1, 'pos_key')[rows[-2::-1]]  # [2 L, H, K], L - 1 down to -L
      scores += skew(jnp.einsum('blhk,rhk->bhlr', query, by_distance))
    if 'p2c' in terms:
      by_distance = positions(0, 'pos_query')[rows[1:]]  # [2 L, H, K], 1 - L up to L
      scores += skew(jnp.einsum('blhk,rhk->bhlr', key, by_distance)).swapaxes(2, 3)
    # A score is a sum of 2 or 3 terms: divide by sqrt(number of terms * K), not sqrt(K).
    scale = (1 + len(terms)) ** -0.5
    scores = mask.bias + scores * (scale * c.head_size ** -0.5)
    drop = nn.Dropout(c.attention_dropout, deterministic=deterministic)
    out, weights = attention.dot_product_attention(
        query * scale, key, value, scores, drop)
    out = self._project('out', out.reshape(x.shape), d, c.initializer_range,
                        ('heads', 'embed'))
    return out, weights if self.attend.keeps_weights else None


class Layer(encoder.EncoderLayer):
  """A layer of BERT with disentangled attention."""

  attends_with = DisentangledAttention


class Convolution(nn.Module):
  """LayerNorm(y + activation(convolution(x))); the first layer maps x to y.

  The convolution reads only neighbors in the same text.
  """

  config: DebertaConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, y: jax.Array, mask: RelativeMask) -> jax.Array:
    """[B, L, D], [B, L, D] and the mask -> [B, L, D]."""
    c = self.config
    taps = [*neighbors(x, mask, c.conv_kernel_size // 2)]
    apply_taps = dense(c, c.hidden_size, ('embed', 'pooled'), name='taps')
    z = apply_taps(jnp.concatenate(taps, -1))
    z = nn.Dropout(c.dropout, deterministic=self.deterministic)(z)
    return LayerNorm(c, name='norm')(y + activation(c.conv_act)(z))


class Deberta(encoder.Encoder):
  """BERT with disentangled attention and, in v2, a convolution after the first layer."""

  config: DebertaConfig

  def run_layers(self, x: jax.Array, tokens: Tokens, attend: attention.Attend,
                 deterministic: bool) -> tuple[jax.Array, encoder.States | None]:
    c = self.config
    mask = RelativeMask(*attend.mask(tokens),
                        RelativePositions(c, name='relative')(x.shape[1]))
    first_states = None
    if c.conv_kernel_size:
      first = encoder.rematerialized(Layer, c, in_scan=False)
      y, first_states = first(c, attend, deterministic, name='first')(x, mask)
      x = Convolution(c, deterministic, name='convolution')(x, y, mask)
    layers = encoder.stacked(encoder.rematerialized(Layer, c), c, c.stacked_layers,
                             self.is_initializing())
    y, states = layers(c, attend, deterministic, name='layers')(x, mask)
    if first_states is not None:
      # The output of the first layer is the output of the convolution.
      states = encoder.in_order(first_states._replace(hidden=x), states)
    return y, states
