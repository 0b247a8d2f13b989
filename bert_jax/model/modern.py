"""The modern encoder: ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663).

Pre-norm layers without biases, rotary positions, a gated feed-forward, and attention that sees all
of a text in every third layer and the neighbourhood of each token in the others.
"""

import dataclasses
import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError
from bert_jax.model import kernels
from bert_jax.model.attention import MASKED
from bert_jax.model.attention import attention_bias
from bert_jax.model.attention import dot_product_attention
from bert_jax.model.attention import local_attention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import TokenEmbeddings
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.encoder import Batch
from bert_jax.model.encoder import Intermediates
from bert_jax.model.encoder import activation
from bert_jax.model.encoder import rematerialised
from bert_jax.model.encoder import stacked
from bert_jax.model.encoder import take_positions
from bert_jax.model.pooling import pool


@dataclasses.dataclass(frozen=True)
class ModernConfig(BertConfig):
  """Sizes of a ModernBERT; the defaults are those of the published base."""

  architecture: str = 'modernbert'
  vocab_size: int = 50_368
  num_layers: int = 22  # 1 + a multiple of global_every
  intermediate_size: int = 1152
  max_positions: int = 8192
  type_vocab_size: int = 0
  dropout: float = 0.0
  attention_dropout: float = 0.0
  layer_norm_eps: float = 1e-5
  global_every: int = 3  # the first layer and every third after it see all of a text
  local_window: int = 128  # the others see so many tokens around each, half on either side
  global_theta: float = 160_000.0  # base of the rotary angles, in these layers and in those
  local_theta: float = 10_000.0
  classifier_pooling: str = 'cls'  # what heads on texts read: cls, the first token, or their mean

  def __post_init__(self):
    super().__post_init__()
    if self.global_every < 2 or (self.num_layers - 1) % self.global_every:
      raise UserError(f'model.num_layers={self.num_layers} must be 1 more than a multiple of '
                      f'model.global_every={self.global_every}, which is at least 2')
    if self.local_window < 2 or self.local_window % 2:
      raise UserError(f'model.local_window={self.local_window} must be even: half of it lies on '
                      'either side of a token')
    if self.classifier_pooling not in ('cls', 'mean'):
      raise UserError(f'model.classifier_pooling={self.classifier_pooling!r} is unknown: use cls, '
                      'mean')
    if self.head_size % 2:
      raise UserError(f'a head of {self.head_size} cannot be rotated in pairs: make '
                      'model.hidden_size / model.num_heads even')
    if min(self.global_theta, self.local_theta) <= 0:
      raise UserError(f'model.global_theta={self.global_theta} and model.local_theta='
                      f'{self.local_theta} must be positive')

  @property
  def stacked_layers(self) -> int:
    """Groups of `global_every` layers after the first one."""
    return (self.num_layers - 1) // self.global_every

  @property
  def fewest_segments(self) -> int:
    """None."""
    return 0

  @property
  def pooler_is_shared(self) -> bool:
    """The head that stands before every classifier and the decoder."""
    return True

  @property
  def fewest_layers(self) -> tuple[int, int]:
    """One group, or two, after the first layer."""
    return 1 + self.global_every, 1 + 2 * self.global_every

  def count_parameters(self, *, pooler: bool = True, heads: bool = False) -> int:
    """As `BertConfig.count_parameters`; what is called the pooler is a part of every head."""
    d, f, v, n = self.hidden_size, self.intermediate_size, self.vocab_size, self.num_layers
    layers = n * (4 * d * d + 3 * d * f + 2 * d) - d  # the first has no norm before its attention
    return v * d + d + layers + d + (pooler or heads) * (d * d + d) + heads * v

  def flops_per_token(self, length: int, predictions: float) -> float:
    """As `BertConfig.flops_per_token`."""
    d, f, v, n = self.hidden_size, self.intermediate_size, self.vocab_size, self.num_layers
    seen = (1 + self.stacked_layers) * length + (n - 1 - self.stacked_layers) * min(
        self.local_window + 1, length)
    return (6 * n * (4 * d * d + 3 * d * f) + 12 * d * seen
            + 6 * predictions * (d * d + d * v))


class Norm(nn.Module):
  """LayerNorm without a bias, in float32: [..., D] -> [..., D] in the dtype of its input."""

  config: ModernConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ('norm',))
    norm = nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=jnp.float32, scale_init=ones,
                        use_bias=False, use_fast_variance=False, name='norm')
    nn.share_scope(self, norm)
    return norm(x).astype(x.dtype)


def rotary(positions: jax.Array, width: int, theta: float) -> jax.Array:
  """cos and sin of the rotary angles (Su et al. 2021, https://arxiv.org/abs/2104.09864).

  Args:
    positions: [B, L] int32.
    width: K.
    theta: base of the angles.

  Returns:
    [2, B, L, 1, K / 2] float32.
  """
  frequencies = 1.0 / theta ** (np.arange(0, width, 2) / width)
  angles = positions[:, :, None, None] * frequencies.astype(np.float32)
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Turns (x[i], x[i + K / 2]) by the i-th angle, in float32: [B, L, H, K] as it comes."""
  cos, sin = angles
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


class Attention(nn.Module):
  """Self-attention with rotary positions, over all of a text or the neighbourhood of each token."""

  config: ModernConfig
  local: bool
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None,
               angles: jax.Array) -> jax.Array:
    """[B, L, D] -> [B, L, D]; `bias` [B, 1, L, L], None = a kernel does what is not local."""
    c, init = self.config, truncated_normal
    d, h, k = c.hidden_size, c.num_heads, c.head_size
    # Laid out as BERT's: the query, key and value of a head stand side by side.
    kernel = self.param('qkv_kernel', init(c.initializer_range, 'embed', 'heads'), (d, h * 3 * k))
    qkv = (x.reshape(-1, d) @ kernel.astype(x.dtype)).reshape(*x.shape[:2], -1)
    qkv = nn.with_logical_constraint(qkv, ('batch', 'seq', 'heads')).reshape(*x.shape[:2], h, 3, k)
    query, key, value = rotate(qkv[:, :, :, 0], angles), rotate(qkv[:, :, :, 1], angles), qkv[
        :, :, :, 2]
    out = self._attend(query, key, value, pair_index, bias)
    kernel = self.param('out_kernel', init(out_range(c), 'heads', 'embed'), (h * k, d))
    out = (out.reshape(-1, h * k) @ kernel.astype(x.dtype)).reshape(x.shape)
    return nn.Dropout(c.attention_dropout, deterministic=self.deterministic)(out)

  def _attend(self, query, key, value, pair_index, bias) -> jax.Array:
    """[B, L, H, K] each -> [B, L, H, K]."""
    c = self.config
    dropout = nn.Dropout(c.attention_dropout, deterministic=self.deterministic)
    if self.local and not self.is_mutable_collection('intermediates'):
      return local_attention(query, key, value, pair_index, c.local_window // 2, dropout)
    if bias is not None:
      def drop(weights):
        self.sow('intermediates', 'weights', weights)
        return dropout(weights)

      if self.local:
        at = jnp.arange(query.shape[1])
        near = jnp.abs(at[:, None] - at[None, :]) <= c.local_window // 2
        bias = jnp.where(near, bias, MASKED)
      return dot_product_attention(query, key, value, bias, drop)
    path, _ = kernels.chosen(c, query.shape[1])
    if path == 'fused':
      qkv = jnp.stack([query, key, value], axis=3).reshape(*query.shape[:2], -1)
      random = None if self.deterministic or not c.attention_dropout else self.make_rng('dropout')
      out = kernels.fused(qkv, pair_index, c.head_size, c.attention_dropout, random)
      return out.reshape(query.shape)
    return {'splash': kernels.splash, 'cudnn': kernels.cudnn}[path](query, key, value, pair_index)


def out_range(config: ModernConfig) -> float:
  """Standard deviation of what writes to the residual stream (Radford et al. 2019)."""
  return config.initializer_range / math.sqrt(2 * config.num_layers)


class FeedForward(nn.Module):
  """down(activation(up(x)) * gate(x)), GeGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

  config: ModernConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    dense = functools.partial(nn.Dense, use_bias=False, dtype=x.dtype)
    init = truncated_normal(c.initializer_range, 'embed', 'mlp')
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    up, gate = (dense(c.intermediate_size, kernel_init=init, name=name)(y)
                for name in ('up', 'gate'))  # [B * L, F]
    y = nn.with_logical_constraint(activation(c.activation)(up) * gate, ('batch', 'mlp'))
    y = nn.Dropout(c.dropout, deterministic=self.deterministic)(y)
    y = dense(c.hidden_size, name='down',
              kernel_init=truncated_normal(out_range(c), 'mlp', 'embed'))(y)
    return y.reshape(x.shape)


class Layer(nn.Module):
  """x + Attention(Norm(x)), then x + FeedForward(Norm(x)); no first norm in the first layer."""

  config: ModernConfig
  deterministic: bool
  local: bool
  first: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None,
               angles: jax.Array) -> jax.Array:
    """[B, L, D] -> [B, L, D]."""
    c = self.config
    y = x if self.first else Norm(c, name='attention_norm')(x)
    x = x + Attention(c, self.local, self.deterministic, name='attention')(
        y, pair_index, bias, angles)
    y = Norm(c, name='feed_forward_norm')(x)
    x = x + FeedForward(c, self.deterministic, name='feed_forward')(y)
    self.sow('intermediates', 'hidden', x)
    return nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act'))


def group_names(config: ModernConfig) -> list[str]:
  """The layers of a group, in order."""
  return [*(f'local_{i}' for i in range(config.global_every - 1)), 'global']


class Group(nn.Module):
  """Layers that see the neighbourhood, then one that sees all; one turn of the scan."""

  config: ModernConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None,
               angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    """`angles`: of the global layers, and of the local ones."""
    for name in group_names(self.config):
      local = name != 'global'
      x = Layer(self.config, self.deterministic, local, name=name)(
          x, pair_index, bias, angles[local])
    return x, None


class PredictionHead(nn.Module):
  """Norm(gelu(dense(x))), between the encoder and whatever is predicted: [..., D] -> [..., D]."""

  config: ModernConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    init = truncated_normal(out_range(c), 'embed', 'pooled')
    y = nn.Dense(c.hidden_size, use_bias=False, dtype=c.compute_dtype, kernel_init=init,
                 name='dense')(x)
    return Norm(c, name='norm')(activation('gelu')(y))


class Modern(nn.Module):
  """Embeddings of tokens alone, N layers, a last norm, and the head that all tasks share."""

  config: ModernConfig

  def setup(self):
    self.embeddings = TokenEmbeddings(self.config, norm_class=Norm)
    self.final_norm = Norm(self.config)
    self.pooler = PredictionHead(self.config)

  @nn.compact
  def encode(self, batch: Batch, *, deterministic: bool = True) -> jax.Array:
    """As `bert_jax.model.encoder.Bert.encode`."""
    c = self.config
    x = self.embeddings(batch.ids, deterministic=deterministic)
    self.sow('intermediates', 'embedded', x)
    path, _ = kernels.chosen(c, x.shape[1])
    plain = path == 'xla' or self.is_mutable_collection('intermediates')  # who asks for weights
    bias = attention_bias(batch.pair_index) if plain else None
    angles = tuple(rotary(batch.positions, c.head_size, theta)
                   for theta in (c.global_theta, c.local_theta))
    x = rematerialised(Layer, c)(c, deterministic, local=False, first=True, name='first')(
        x, batch.pair_index, bias, angles[0])
    groups = stacked(rematerialised(Group, c), c, c.stacked_layers, self.is_initializing())
    x, _ = groups(c, deterministic, name='layers')(x, batch.pair_index, bias, angles)
    x = self.final_norm(x)
    self.sow('intermediates', 'last', x)
    return x

  def features(self, hidden: jax.Array) -> jax.Array:
    """What heads on tokens read: [..., D] -> [..., D]."""
    return self.pooler(hidden)

  def pool(self, hidden: jax.Array, cls_positions: jax.Array) -> jax.Array:
    """What heads on texts read: [B, L, D] and [B, P] int32 -> [B, P, D]."""
    return self.pooler(take_positions(hidden, cls_positions))

  def __call__(self, batch: Batch, cls_positions: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    """(hidden [B, L, D], pooled [B, P, D])."""
    hidden = self.encode(batch, deterministic=deterministic)
    if self.config.classifier_pooling == 'cls':
      return hidden, self.pool(hidden, cls_positions)
    return hidden, self.features(pool(hidden, batch.pair_index, cls_positions, 'mean'))

  def intermediates(self, collection: dict) -> Intermediates:
    """As `bert_jax.model.encoder.Bert.intermediates`; the last layer after the last norm."""
    first, groups = collection['first'], collection['layers']
    names = group_names(self.config)
    hidden = jnp.stack([groups[name]['hidden'][0] for name in names], axis=1)
    weights = jnp.stack([groups[name]['attention']['weights'][0] for name in names], axis=1)
    hidden = hidden.reshape(-1, *hidden.shape[2:])[:-1]
    one = first['attention']['weights'][0][None]
    return Intermediates(
        jnp.concatenate([collection['embedded'][0][None], first['hidden'][0][None], hidden,
                         collection['last'][0][None]]),
        jnp.concatenate([one, weights.reshape(-1, *one.shape[1:])]))
