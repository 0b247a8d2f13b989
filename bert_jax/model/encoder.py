"""BERT's encoder, a stack of post-LayerNorm layers; other encoders derive from it."""

import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.model import attention_kernels, parameters
from bert_jax.model.attention import Attend, Mask, SelfAttention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.layers import AddAndNorm, FeedForward, activation, dense
from bert_jax.model.products import activation_dtype


class States(NamedTuple):
  """The states of all layers; a single layer returns them without the first axis."""

  hidden: jax.Array  # [N + 1, B, L, D]: the embeddings, then every layer
  attention: jax.Array  # [N, B, H, L, L]: the attention weights


def in_order(*parts: States) -> States:
  """Concatenates states of single or stacked layers, in order, along one layer axis."""
  return States(
      jnp.concatenate([x.hidden.reshape(-1, *x.hidden.shape[-3:]) for x in parts]),
      jnp.concatenate([x.attention.reshape(-1, *x.attention.shape[-4:]) for x in parts]))


def init_tokens() -> Tokens:
  """Makes the input that initializes a module: four [1, 8] int32 arrays of zeros."""
  return Tokens(*[jnp.zeros((1, 8), jnp.int32)] * 4)


def take_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
  """Takes the vectors at positions of each row: [B, L, D], [B, M] int32 -> [B, M, D]."""
  return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)


class EncoderLayer(nn.Module):
  """A step of the scan: LayerNorm(x + Attention(x)), LayerNorm(x + FeedForward(x))."""

  config: BertConfig
  attend: Attend
  deterministic: bool
  attends_with = SelfAttention  # not a field: a subclass sets its own class

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask) -> tuple[jax.Array, States | None]:
    """[B, L, D] -> ([B, L, D], the layer's states if `attend` keeps the weights)."""
    c = self.config
    dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
    attention = self.attends_with(c, self.attend, name='attention')
    y, weights = attention(x, mask, deterministic=self.deterministic)
    x, _ = AddAndNorm(c, name='attention_norm')(x, y, dropout)
    y = FeedForward(c, name='feed_forward')(x)
    x, _ = AddAndNorm(c, name='feed_forward_norm')(x, y, dropout)
    states = States(x, weights) if self.attend.keeps_weights else None
    return nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act')), states


def rematerialized(layer: type[nn.Module], config: BertConfig,
                   in_scan: bool = True) -> type[nn.Module]:
  """Returns a layer that recomputes its activations as `config.remat` says.

  `in_scan` is False for a layer outside the scan over layers.
  """
  if config.remat == 'none':
    return layer
  policy = {'dots': jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
            'full': None}[config.remat]
  # Outside a loop, XLA's CSE would merge the recomputation with the forward pass.
  return nn.remat(layer, policy=policy, prevent_cse=not in_scan or config.scan_unroll > 1)


def _in_dtype(dtype: jnp.dtype, params: dict) -> dict:
  """Casts the layers' parameters, except the norms, to the dtype of the computation.

  All layers are cast at once. Their gradients are then in `dtype` too, and chips that
  exchange parameters or gradients send half the bytes.
  """

  def cast(path, x):
    return x if parameters.kind(path) == parameters.Kind.NORM else x.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def stacked(layer: type[nn.Module], config: BertConfig, length: int,
            initializing: bool) -> type[nn.Module]:
  """Returns a scan over `length` layers with stacked parameters: [length, ...]."""
  layers = nn.scan(layer, variable_axes={'params': 0},
                   split_rngs={'params': True, 'dropout': True}, in_axes=nn.broadcast,
                   length=length, unroll=max(config.scan_unroll, 1),
                   metadata_params={nn.PARTITION_NAME: 'layers'})
  if activation_dtype(config.compute_dtype) == jnp.float32 or initializing:
    return layers
  return nn.map_variables(layers, 'params',
                          functools.partial(_in_dtype, config.compute_dtype))


class Encoder(nn.Module):
  """BERT's encoder: embeddings, N layers, and the pooler over each text's [CLS].

  The encoders of other architectures are subclasses. Heads and tools call the encoder and
  its methods `encode`, `states`, `pool` and `features`, and `embeddings.decode`.
  """

  config: BertConfig

  def setup(self):
    c = self.config
    self.embeddings = Embeddings(c)
    if c.projects:
      self.projection = dense(c, c.hidden_size, ('pooled', 'embed'), bias_axis='embed_act')
    self.pooler = dense(c, c.hidden_size, ('embed', 'pooled'), bias_axis='embed')

  def attention_mask(self, tokens: Tokens, attend: Attend) -> Mask:
    """Makes the mask for all layers; an architecture may add a bias."""
    return attend.mask(tokens)

  def run_layers(self, x: jax.Array, tokens: Tokens, attend: Attend,
                 deterministic: bool) -> tuple[jax.Array, States | None]:
    """Runs all layers.

    Args:
      x: [B, L, D], the embeddings.
      tokens: the rows.
      attend: the attention of every layer.
      deterministic: no dropout.

    Returns:
      ([B, L, D], the states of the layers if `attend` keeps the weights).
    """
    c = self.config
    layers = stacked(rematerialized(EncoderLayer, c), c, c.num_layers,
                     self.is_initializing())
    return layers(c, attend, deterministic, name='layers')(
        x, self.attention_mask(tokens, attend))

  @nn.compact
  def _run(self, tokens: Tokens, attend: Attend,
           deterministic: bool) -> tuple[jax.Array, States | None]:
    """(the last hidden states [B, L, D], all states if `attend` keeps the weights)."""
    x = self.embeddings(tokens.ids, tokens.type_ids, tokens.positions,
                        deterministic=deterministic)  # [B, L, E]
    if self.config.projects:
      x = self.projection(x)  # [B, L, D]
    hidden, states = self.run_layers(x, tokens, attend, deterministic)
    if states is not None:
      states = in_order(states)
      states = states._replace(hidden=jnp.concatenate([x[None], states.hidden]))
    return hidden, states

  def encode(self, tokens: Tokens, *, deterministic: bool = True) -> jax.Array:
    """Returns the hidden states of the last layer, [B, L, D] in the activation dtype."""
    # The rows of `init_tokens` are too short for every kernel.
    attend = (Attend() if self.is_initializing()
              else attention_kernels.choose(self.config, tokens))
    return self._run(tokens, attend, deterministic)[0]

  def states(self, tokens: Tokens) -> States:
    """Returns the states of all layers without dropout.

    Attention runs in XLA whatever the config says, because no kernel returns the weights.
    """
    return self._run(tokens, Attend(keeps_weights=True), deterministic=True)[1]

  def pool(self, hidden: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns the input of heads on texts: [B, L, D] and [B, P] int32 -> [B, P, D]."""
    pooled = self.pooler(take_positions(hidden, starts))  # [B, P, D]
    return activation(self.config.pooler_activation)(pooled)

  def features(self, hidden: jax.Array) -> jax.Array:
    """Returns the input of heads on tokens: [..., D] -> [..., D]."""
    return hidden

  def __call__(self, tokens: Tokens, starts: jax.Array, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
    """Encodes and pools: (hidden [B, L, D], pooled [B, P, D])."""
    hidden = self.encode(tokens, deterministic=deterministic)
    return hidden, self.pool(hidden, starts)
