"""BERT's encoder, a stack of post-LayerNorm transformer layers."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple, Protocol

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.model import attention, parameters
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings, LayerNorm, dense


class Intermediates(NamedTuple):
  """The states between the layers of an encoder, and the attention weights in them."""

  hidden: jax.Array  # [N + 1, B, L, D]: the embeddings, then every layer
  attention: jax.Array  # [N, B, H, L, L]: the attention weights


class Encoder(Protocol):
  """The interface of an encoder, a Linen module, for heads and tools."""

  config: BertConfig
  embeddings: Embeddings  # its `decode` is the decoder of the masked LM head

  def encode(self, tokens: Tokens, *, deterministic: bool = True) -> jax.Array:
    """Returns the hidden states of the last layer, [B, L, D] in the compute dtype.

    With `mutable=['intermediates']` Linen also returns the collection that `intermediates` reads.
    """

  def pool(self, hidden: jax.Array, cls_positions: jax.Array) -> jax.Array:
    """Returns the input of heads on texts: [B, L, D] and [B, P] int32 -> [B, P, D]."""

  def features(self, hidden: jax.Array) -> jax.Array:
    """Returns the input of heads on tokens: [..., D] -> [..., D]."""

  def __call__(self, tokens: Tokens, cls_positions: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    """Encodes and pools: (hidden [B, L, D], pooled [B, P, D])."""

  def intermediates(self, collection: dict[str, Any]) -> Intermediates:
    """Puts the `intermediates` collection of `encode` in the order of the layers."""


def init_tokens() -> Tokens:
  """Makes the input that initializes a module: [1, 8] zeros each."""
  return Tokens(*[jnp.zeros((1, 8), jnp.int32)] * 4)


def take_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
  """Takes the vectors at some positions of each row: [B, L, D] and [B, M] int32 -> [B, M, D]."""
  return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)


def _gelu(x: jax.Array) -> jax.Array:
  """x * Phi(x) by erf (Hendrycks and Gimpel 2016); `jax.nn.gelu` uses erfc, which is slower."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.7071067811865476))


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
  """Returns an elementwise nonlinearity: gelu (by erf, as published), gelu_tanh, relu or tanh."""
  return {'gelu': _gelu,
          'gelu_tanh': functools.partial(nn.gelu, approximate=True),
          'relu': nn.relu,
          'tanh': jnp.tanh}[name]


class FeedForward(nn.Module):
  """Dense to F, activation, dense back: [B, L, D] -> [B, L, D]."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    y = x.reshape(-1, c.hidden_size)  # [B * L, D]
    y = dense(c, c.intermediate_size, ('embed', 'mlp'), name='up')(y)  # [B * L, F]
    y = nn.with_logical_constraint(y, ('batch', 'mlp'))
    y = activation(c.activation)(y)
    y = dense(c, c.hidden_size, ('mlp', 'embed'), name='down')(y)  # [B * L, D]
    return y.reshape(x.shape)


class EncoderLayer(nn.Module):
  """LayerNorm(x + Attention(x)), then LayerNorm(x + FeedForward(x)); one turn of the layer scan."""

  config: BertConfig
  deterministic: bool
  attends_with = attention.SelfAttention  # no field: a subclass has another

  @nn.compact
  def __call__(self, x: jax.Array, mask: attention.Mask) -> tuple[jax.Array, None]:
    """[B, L, D] -> ([B, L, D], None)."""
    c = self.config
    dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
    attend = self.attends_with(c, name='attention')
    y = attend(x, mask, deterministic=self.deterministic)
    x = LayerNorm(c, name='attention_norm')(x + dropout(y))
    y = FeedForward(c, name='feed_forward')(x)
    x = LayerNorm(c, name='feed_forward_norm')(x + dropout(y))
    self.sow('intermediates', 'hidden', x)
    return nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act')), None


def rematerialised(layer: type[nn.Module], config: BertConfig,
                   in_scan: bool = True) -> type[nn.Module]:
  """Returns a layer that recomputes its activations in the backward pass as `config.remat` says.

  `in_scan` is False for a layer outside the scan over layers.
  """
  if config.remat == 'none':
    return layer
  policy = {'dots': jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
            'full': None}[config.remat]
  # A loop keeps the two computations of a layer apart; elsewhere the compiler would merge them.
  return nn.remat(layer, policy=policy, prevent_cse=not in_scan or config.scan_unroll > 1)


def _in_dtype(dtype: jnp.dtype, params: dict) -> dict:
  """Casts the layers' parameters, except those of the norms, to the dtype of the computation.

  All layers are cast at once, so that their gradients are kept in `dtype` too, and chips that
  exchange either send half as much.
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, x: (
          x if parameters.kind(path) == parameters.Kind.NORM else x.astype(dtype)), params)


def stacked(layer: type[nn.Module], config: BertConfig, length: int,
            initializing: bool) -> type[nn.Module]:
  """Returns a scan over `length` layers, whose parameters are stacked: [length, ...]."""
  layers = nn.scan(layer, variable_axes={'params': 0, 'intermediates': 0},
                   split_rngs={'params': True, 'dropout': True}, in_axes=nn.broadcast,
                   length=length, unroll=config.scan_unroll,
                   metadata_params={nn.PARTITION_NAME: 'layers'})
  if config.compute_dtype == jnp.float32 or initializing:
    return layers
  return nn.map_variables(layers, 'params', functools.partial(_in_dtype, config.compute_dtype))


class Bert(nn.Module):
  """BERT's `Encoder`: embeddings, N layers, and the pooler over each pair's [CLS]."""

  config: BertConfig

  def setup(self):
    c = self.config
    self.embeddings = Embeddings(c)
    if c.projects:
      self.projection = dense(c, c.hidden_size, ('pooled', 'embed'), bias_axis='embed_act')
    self.pooler = dense(c, c.hidden_size, ('embed', 'pooled'), bias_axis='embed')

  def attention_mask(self, tokens: Tokens) -> attention.Mask:
    """Who attends to whom in all layers."""
    return attention.make_mask(self, tokens.text_ids)

  def run_layers(self, x: jax.Array, tokens: Tokens, deterministic: bool) -> jax.Array:
    """Runs all layers: [B, L, D] -> [B, L, D]."""
    c, mask = self.config, self.attention_mask(tokens)
    layers = stacked(rematerialised(EncoderLayer, c), c, c.num_layers, self.is_initializing())
    return layers(c, deterministic, name='layers')(x, mask)[0]

  @nn.compact
  def encode(self, tokens: Tokens, *, deterministic: bool = True) -> jax.Array:
    x = self.embeddings(tokens.ids, tokens.type_ids, tokens.positions,
                        deterministic=deterministic)  # [B, L, E]
    if self.config.projects:
      x = self.projection(x)  # [B, L, D]
    self.sow('intermediates', 'embedded', x)
    return self.run_layers(x, tokens, deterministic)

  def pool(self, hidden: jax.Array, cls_positions: jax.Array) -> jax.Array:
    pooled = self.pooler(take_positions(hidden, cls_positions))  # [B, P, D]
    return activation(self.config.pooler_activation)(pooled)

  def features(self, hidden: jax.Array) -> jax.Array:
    return hidden

  def __call__(self, tokens: Tokens, cls_positions: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    hidden = self.encode(tokens, deterministic=deterministic)
    return hidden, self.pool(hidden, cls_positions)

  def intermediates(self, collection: dict[str, Any]) -> Intermediates:
    embedded, layers = collection['embedded'][0], collection['layers']
    hidden = layers['hidden'][0].reshape(-1, *embedded.shape)  # ALBERT's groups become one axis
    weights = layers['attention']['weights'][0]
    return Intermediates(jnp.concatenate([embedded[None], hidden]),
                         weights.reshape(-1, *weights.shape[-4:]))
