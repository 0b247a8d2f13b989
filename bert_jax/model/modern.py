"""The modern encoder: ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663).

Pre-norm layers without biases, rotary positions, and a gated feed-forward. By default,
every third layer is global: its tokens attend to their whole text. In the other layers, a
token attends only to its neighbors.
"""

import dataclasses
import math
from typing import ClassVar

from flax import linen as nn
import jax

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require, require_choice
from bert_jax.model import encoder, pooling
from bert_jax.model.attention import Attend, Mask, SelfAttention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import States
from bert_jax.model.layers import AddAndNorm, LayerNorm, activation, dense
from bert_jax.model.rotary import rotary
from bert_jax.model.short_convolution import ShortConvolution


@dataclasses.dataclass(frozen=True)
class ModernConfig(BertConfig):
  """Sizes of a ModernBERT, by default of the published base."""

  architecture: str = 'modernbert'
  vocab_size: int = 50_368
  num_layers: int = 22  # N, more than global_every
  intermediate_size: int = 1152
  max_positions: int = 8192  # the longest L
  type_vocab_size: int = 0
  dropout: float = 0.0  # share dropped of the embeddings and inside the feed-forward
  attention_dropout: float = 0.0  # share dropped of attention weights and outputs
  layer_norm_eps: float = 1e-5
  # The first layer and every `global_every`-th after it are global: they see whole texts.
  global_every: int = 3
  local_window: int = 128  # a local layer sees half of it on either side of a token
  global_theta: float = 160_000.0  # base of the rotary angles in global layers
  local_theta: float = 10_000.0  # base of the rotary angles in local layers
  classifier_pooling: str = 'cls'  # input of heads on texts: cls (first token) or mean
  conv_reach: int = 0  # tokens on either side in short convolutions; ModernBERT has none

  has_positions: ClassVar[bool] = False
  has_segments: ClassVar[bool] = False
  has_biases: ClassVar[bool] = False
  has_windows: ClassVar[bool] = True
  pooler_is_shared: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    # The layers after the first one are scanned in groups: at least one must be whole.
    require(2 <= self.global_every < self.num_layers,
            f'model.num_layers={self.num_layers} must be more than model.global_every='
            f'{self.global_every}, which is at least 2')
    require(self.local_window >= 0,
            f'model.local_window={self.local_window} must not be negative: half of it lies '
            'on either side of a token')
    require(0 <= self.conv_reach <= 16,
            f'model.conv_reach={self.conv_reach} must lie in [0, 16]')
    require_choice('model.classifier_pooling', self.classifier_pooling, ('cls', 'mean'))
    require(self.head_size % 2 == 0,
            f'a head of {self.head_size} cannot be rotated in pairs: make '
            'model.hidden_size / model.num_heads even')
    require(min(self.global_theta, self.local_theta) > 0,
            f'model.global_theta={self.global_theta} and '
            f'model.local_theta={self.local_theta} must be positive')

  @property
  def stacked_layers(self) -> int:
    """Groups of `global_every` layers after the first one."""
    return (self.num_layers - 1) // self.global_every

  @property
  def last_layers(self) -> int:
    """Local layers after the groups; 0 in the published base and large."""
    return (self.num_layers - 1) % self.global_every

  @property
  def reach(self) -> int:
    """Tokens on either side that a local layer sees, without the token itself."""
    return self.local_window // 2

  @property
  def fewest_layers(self) -> tuple[int, int]:
    return 1 + self.global_every, 1 + 2 * self.global_every

  @property
  def out_stddev(self) -> float:
    """`stddev` of the kernels that write to the residual stream (Radford et al. 2019)."""
    return self.initializer_range / math.sqrt(2 * self.num_layers)

  def flops_per_token(self, length: int, predictions: float) -> float:
    d, f, n = self.hidden_size, self.intermediate_size, self.num_layers
    window = min(2 * self.reach + 1, length)
    global_layers = 1 + self.stacked_layers
    seen = global_layers * length + (n - global_layers) * window
    return (6 * n * (4 * d * d + 3 * d * f) + 12 * d * seen
            + 6 * predictions * (d * d + d * self.vocab_size))


class GatedFeedForward(nn.Module):
  """down(activation(up(x)) * gate(x)), GeGLU (Shazeer 2020): [B, L, D] -> [B, L, D]."""

  config: ModernConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    up, gate = (
        dense(c, c.intermediate_size, ('embed', 'mlp'), name=name, use_bias=False)(y)
        for name in ('up', 'gate'))  # [B * L, F]
    y = activation(c.activation)(up) * gate
    y = nn.with_logical_constraint(y, ('batch', 'mlp'))
    y = nn.Dropout(c.dropout, deterministic=self.deterministic)(y)
    y = dense(c, c.hidden_size, ('mlp', 'embed'), name='down', stddev=c.out_stddev,
              use_bias=False)(y)  # [B * L, D]
    return y.reshape(x.shape)


class Layer(nn.Module):
  """x + Attention(Norm(x)), then x + FeedForward(Norm(x)).

  The first layer has no attention norm, because the embeddings end with a norm.
  """

  config: ModernConfig
  attend: Attend
  deterministic: bool
  is_local: bool
  is_first: bool = False

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask,
               angles: jax.Array) -> tuple[jax.Array, States | None]:
    """([B, L, D], mask, `rotary`) -> ([B, L, D], states if `attend` keeps weights)."""
    c = self.config
    attention = SelfAttention(
        c, self.attend, reach=c.reach if self.is_local else None, out_stddev=c.out_stddev,
        output_dropout=c.attention_dropout, name='attention')
    y = x
    if not self.is_first:
      y, x = AddAndNorm(c, returns_sum=True, name='attention_norm')(x)
    y = ShortConvolution(c.conv_reach, name='attention_convolution')(y, mask)
    y, weights = attention(y, mask, angles=angles, deterministic=self.deterministic)
    y, x = AddAndNorm(c, returns_sum=True, name='feed_forward_norm')(x, y)
    y = ShortConvolution(c.conv_reach, name='feed_forward_convolution')(y, mask)
    x = x + GatedFeedForward(c, self.deterministic, name='feed_forward')(y)
    states = States(x, weights) if self.attend.keeps_weights else None
    return nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act')), states


def group_names(config: ModernConfig) -> list[str]:
  """Returns the names of the layers of a group, in order."""
  return [*(f'local_{i}' for i in range(config.global_every - 1)), 'global']


class Group(nn.Module):
  """Local layers, then a global layer; one step of the scan."""

  config: ModernConfig
  attend: Attend
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask,
               angles: dict[str, jax.Array]) -> tuple[jax.Array, States | None]:
    """Runs the layers of a group.

    Args:
      x: [B, L, D].
      mask: from `Attend.mask`.
      angles: from `rotary`, for 'global' and for 'local' layers.

    Returns:
      ([B, L, D], the states of the layers in order if `attend` keeps the weights).
    """
    kept = []
    for name in group_names(self.config):
      is_local = name != 'global'
      layer = Layer(self.config, self.attend, self.deterministic, is_local, name=name)
      x, states = layer(x, mask, angles['local' if is_local else 'global'])
      kept.append(states)
    return x, encoder.in_order(*kept) if self.attend.keeps_weights else None


class PredictionHead(nn.Module):
  """Norm(gelu(dense(x))), between the encoder and every head: [..., D] -> [..., D]."""

  config: ModernConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    y = dense(c, c.hidden_size, ('embed', 'pooled'), name='dense', stddev=c.out_stddev,
              use_bias=False)(x)
    return LayerNorm(c, name='norm')(activation('gelu')(y))


class Modern(encoder.Encoder):
  """Token embeddings, N layers, a final norm and the head that all tasks share."""

  config: ModernConfig

  def setup(self):
    self.embeddings = Embeddings(self.config)
    self.final_norm = LayerNorm(self.config)
    self.pooler = PredictionHead(self.config)

  def run_layers(self, x: jax.Array, tokens: Tokens, attend: Attend,
                 deterministic: bool) -> tuple[jax.Array, States | None]:
    c, mask = self.config, attend.mask(tokens)
    angles = {'global': rotary(tokens.positions, c.head_size, c.global_theta),
              'local': rotary(tokens.positions, c.head_size, c.local_theta)}
    # Otherwise XLA computes sine and cosine again for every head and layer.
    angles = jax.lax.optimization_barrier(angles)
    first = encoder.rematerialized(Layer, c, in_scan=False)(
        c, attend, deterministic, is_local=False, is_first=True, name='first')
    x, first_states = first(x, mask, angles['global'])
    groups = encoder.stacked(encoder.rematerialized(Group, c), c, c.stacked_layers,
                             self.is_initializing())
    x, *states = groups(c, attend, deterministic, name='layers')(x, mask, angles)
    for i in range(c.last_layers):
      last = encoder.rematerialized(Layer, c, in_scan=False)(
          c, attend, deterministic, is_local=True, name=f'last_{i}')
      x, of_layer = last(x, mask, angles['local'])
      states.append(of_layer)
    x = self.final_norm(x)
    if attend.keeps_weights:
      hidden, weights = encoder.in_order(first_states, *states)
      # The last hidden state is the one after the final norm, as in `encode`.
      return x, States(hidden.at[-1].set(x), weights)
    return x, None

  def features(self, hidden: jax.Array) -> jax.Array:
    return self.pooler(hidden)

  def pool(self, hidden: jax.Array, starts: jax.Array) -> jax.Array:
    return self.pooler(encoder.take_positions(hidden, starts))

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    hidden = self.encode(tokens, deterministic=deterministic)
    if self.config.classifier_pooling == 'cls':
      return hidden, self.pool(hidden, starts)
    return hidden, self.features(pooling.pool(
        hidden, tokens.text_ids, tokens.positions, starts, 'mean'))
