"""The post-LayerNorm transformer encoder and the whole BERT under its heads."""

import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import kernels
from bert_jax.model.attention import SelfAttention
from bert_jax.model.attention import attention_bias
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.embeddings import LayerNorm
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros


class Batch(NamedTuple):
  """What an encoder reads. All [B, L] int32."""

  ids: jax.Array  # token ids
  type_ids: jax.Array  # 0 in segment A, 1 in segment B
  positions: jax.Array  # position of each token in its own pair
  pair_index: jax.Array  # 0 on padding, 1..P on the tokens of each pair


def gelu(x: jax.Array) -> jax.Array:
  """x * Phi(x) by erf (Hendrycks and Gimpel 2016); `jax.nn.gelu` uses erfc, which is slower."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.7071067811865476))


def activation(name: str):
  """The feed-forward's nonlinearity: 'gelu' (erf, as published), 'gelu_tanh' or 'relu'."""
  return {'gelu': gelu,
          'gelu_tanh': functools.partial(nn.gelu, approximate=True),
          'relu': nn.relu}[name]


class FeedForward(nn.Module):
  """Dense to F, activation, dense back: [B, L, D] -> [B, L, D]."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    y = nn.Dense(c.intermediate_size, dtype=x.dtype, bias_init=zeros('mlp'), name='up',
                 kernel_init=truncated_normal(c.initializer_range, 'embed', 'mlp'))(y)  # [B * L, F]
    y = nn.with_logical_constraint(y, ('batch', 'mlp'))
    y = activation(c.activation)(y)
    y = nn.Dense(c.hidden_size, dtype=x.dtype, bias_init=zeros('embed'), name='down',
                 kernel_init=truncated_normal(c.initializer_range, 'mlp', 'embed'))(y)
    return y.reshape(x.shape)


class EncoderLayer(nn.Module):
  """LayerNorm(x + Attention(x)), then LayerNorm(x + FeedForward(x)); one turn of the layer scan."""

  config: BertConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array,
               bias: jax.Array | None) -> tuple[jax.Array, None]:
    """[B, L, D], and what `SelfAttention` takes -> ([B, L, D], None)."""
    c = self.config
    dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
    y = SelfAttention(c, name='attention')(x, pair_index, bias,
                                           deterministic=self.deterministic)
    x = LayerNorm(c, name='attention_norm')(x + dropout(y))
    y = FeedForward(c, name='feed_forward')(x)
    x = LayerNorm(c, name='feed_forward_norm')(x + dropout(y))
    self.sow('intermediates', 'hidden', x)
    return nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act')), None


def rematerialised(layer: type[nn.Module], config: BertConfig) -> type[nn.Module]:
  """The layer, whose backward pass computes again what `remat` says."""
  if config.remat == 'none':
    return layer
  policy = {'dots': jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
            'full': None}[config.remat]
  # A loop keeps the two computations of a layer apart; unrolled, the compiler would merge them.
  return nn.remat(layer, policy=policy, prevent_cse=config.scan_unroll > 1)


def _in_dtype(dtype: jnp.dtype, params: dict) -> dict:
  """The layers' parameters as they are computed with: all but those of the norms in `dtype`.

  Done for all layers at once, their gradients are kept in `dtype` too, and chips that exchange
  either send half as much.
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x if any('norm' in str(key) for key in path) else x.astype(dtype), params)


def stacked(layer: type[nn.Module], config: BertConfig, length: int,
            initializing: bool) -> type[nn.Module]:
  """`length` layers with parameters of their own, which are stacked: [length, ...]."""
  layers = nn.scan(layer, variable_axes={'params': 0, 'intermediates': 0},
                   split_rngs={'params': True, 'dropout': True}, in_axes=nn.broadcast,
                   length=length, unroll=config.scan_unroll,
                   metadata_params={nn.PARTITION_NAME: 'layers'})
  if config.compute_dtype == jnp.float32 or initializing:
    return layers
  return nn.map_variables(layers, 'params', functools.partial(_in_dtype, config.compute_dtype))


class Intermediates(NamedTuple):
  """What an encoder computed on its way."""

  hidden: jax.Array  # [N + 1, B, L, D]: the embeddings, then every layer
  attention: jax.Array  # [N, B, H, L, L]: the attention weights


class Bert(nn.Module):
  """Embeddings, N encoder layers, and the tanh pooler over each pair's [CLS]."""

  config: BertConfig
  embeddings_class = Embeddings
  pool_activation = staticmethod(jnp.tanh)

  def setup(self):
    c = self.config
    self.embeddings = self.embeddings_class(c)
    self.pooler = nn.Dense(c.hidden_size, dtype=c.compute_dtype, bias_init=zeros('embed'),
                           kernel_init=truncated_normal(c.initializer_range, 'embed', 'pooled'))

  def embed(self, batch: Batch, deterministic: bool) -> jax.Array:
    """What the first layer reads, [B, L, D]."""
    return self.embeddings(batch.ids, batch.type_ids, batch.positions, deterministic=deterministic)

  def run_layers(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None,
                 deterministic: bool) -> jax.Array:
    """The embeddings through all layers; arguments as `SelfAttention` takes them."""
    c = self.config
    layers = stacked(rematerialised(EncoderLayer, c), c, c.num_layers, self.is_initializing())
    return layers(c, deterministic, name='layers')(x, pair_index, bias)[0]

  @nn.compact
  def encode(self, batch: Batch, *, deterministic: bool = True) -> jax.Array:
    """Hidden states of the last layer, [B, L, D] in the compute dtype.

    With `mutable=['intermediates']` Linen gives what `intermediates` takes apart.
    """
    c = self.config
    x = self.embed(batch, deterministic)
    self.sow('intermediates', 'embedded', x)
    path, _ = kernels.chosen(c, x.shape[1])
    plain = path == 'xla' or self.is_mutable_collection('intermediates')  # who asks for weights
    bias = attention_bias(batch.pair_index) if plain else None
    return self.run_layers(x, batch.pair_index, bias, deterministic)

  def pool(self, hidden: jax.Array, cls_positions: jax.Array) -> jax.Array:
    """tanh(dense(h)) of each pair's [CLS]: [B, L, D] and [B, P] int32 -> [B, P, D]."""
    return self.pool_activation(self.pooler(take_positions(hidden, cls_positions)))

  def __call__(self, batch: Batch, cls_positions: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    """(hidden [B, L, D], pooled [B, P, D])."""
    hidden = self.encode(batch, deterministic=deterministic)
    return hidden, self.pool(hidden, cls_positions)

  def features(self, hidden: jax.Array) -> jax.Array:
    """What heads on tokens read: [..., D] -> [..., D], the hidden states themselves."""
    return hidden

  def intermediates(self, collection: dict) -> Intermediates:
    """The `intermediates` that `encode` left behind, in the order of the layers."""
    embedded, layers = collection['embedded'][0], collection['layers']
    hidden = layers['hidden'][0].reshape(-1, *embedded.shape)  # groups of layers too: one axis
    weights = layers['attention']['weights'][0]
    return Intermediates(jnp.concatenate([embedded[None], hidden]),
                         weights.reshape(-1, *weights.shape[-4:]))


def take_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
  """The vectors at some positions of each row: [B, L, D] and [B, M] int32 -> [B, M, D]."""
  return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
