"""Token + position + segment embeddings, summed, normalised and dropped out."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig


def truncated_normal(stddev: float, *axes: str) -> nn.initializers.Initializer:
  """BERT's initializer (normal, cut at two deviations) for a parameter with these logical axes.

  `stddev` is that of the normal before the cut, as in TensorFlow's `truncated_normal_initializer`
  that BERT used: what comes out deviates by 0.88 of it.
  """
  return nn.with_logical_partitioning(nn.initializers.truncated_normal(stddev), axes)


def zeros(*axes: str) -> nn.initializers.Initializer:
  """Initializer of a bias with these logical axes."""
  return nn.with_logical_partitioning(nn.initializers.zeros_init(), axes)


class LayerNorm(nn.Module):
  """LayerNorm over D in float32: [..., D] -> [..., D] in the dtype of its input."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ('norm',))
    norm = nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=jnp.float32,
                        scale_init=ones, bias_init=zeros('norm'), use_fast_variance=False,
                        name='norm')
    nn.share_scope(self, norm)
    return norm(x).astype(x.dtype)


class TokenEmbeddings(nn.Module):
  """The table of token embeddings, looked up, normalised and dropped out; it also decodes."""

  config: BertConfig
  norm_class: type[nn.Module] = LayerNorm

  def setup(self):
    c = self.config
    init = truncated_normal(c.initializer_range, 'vocab', 'embed')
    self.token = self.param('token', init, (c.padded_vocab_size, c.embedding_size))
    self.norm = self.norm_class(c)
    self.dropout = nn.Dropout(c.dropout)

  def _token_table(self) -> jax.Array:
    """[padded V, E], its width whole on every chip.

    Where a preset splits the width, the chips exchange the table; left to itself the compiler would
    have every chip look up a part of the vectors for the rows of all.
    """
    return nn.with_logical_constraint(self.token, ('vocab', 'embed_act'))

  def _finished(self, x: jax.Array, deterministic: bool) -> jax.Array:
    x = nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act'))
    x = self.norm(x).astype(self.config.compute_dtype)
    return self.dropout(x, deterministic=deterministic)

  def __call__(self, ids: jax.Array, *, deterministic: bool) -> jax.Array:
    """[B, L] int32 -> [B, L, E] in the compute dtype."""
    return self._finished(jnp.take(self._token_table(), ids, axis=0), deterministic)

  def decode(self, x: jax.Array) -> jax.Array:
    """Logits of `x` under the token table, tied: [..., E] -> [..., padded V], float32."""
    table = self._token_table().astype(self.config.compute_dtype)
    return jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)


class PositionEmbeddings(TokenEmbeddings):
  """The sum of learned embeddings of tokens and of positions."""

  def setup(self):
    super().setup()
    c = self.config
    init = truncated_normal(c.initializer_range, 'position', 'embed')
    self.position = self.param('position', init, (c.max_positions, c.embedding_size))

  def _placed(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
    # Summed in float32: small numbers of the same size lose a digit in bfloat16.
    position = nn.with_logical_constraint(self.position, (None, 'embed_act'))
    return jnp.take(self._token_table(), ids, axis=0) + jnp.take(position, positions, axis=0)

  def __call__(self, ids: jax.Array, type_ids: jax.Array, positions: jax.Array, *,
               deterministic: bool) -> jax.Array:
    """As `Embeddings`; `type_ids` are not looked at."""
    del type_ids
    return self._finished(self._placed(ids, positions), deterministic)


class Embeddings(PositionEmbeddings):
  """The sum of three learned embeddings (google-research/bert, `embedding_postprocessor`)."""

  def setup(self):
    super().setup()
    c = self.config
    init = truncated_normal(c.initializer_range, 'segment', 'embed')
    self.segment = self.param('segment', init, (c.type_vocab_size, c.embedding_size))

  def __call__(self, ids: jax.Array, type_ids: jax.Array, positions: jax.Array, *,
               deterministic: bool) -> jax.Array:
    """Embeds a batch.

    Args:
      ids: [B, L] int32 token ids.
      type_ids: [B, L] int32, 0 in segment A and 1 in segment B.
      positions: [B, L] int32 position of each token in its own pair.
      deterministic: no dropout.

    Returns:
      [B, L, E] in the compute dtype; E is D in BERT.
    """
    segment = nn.with_logical_constraint(self.segment, (None, 'embed_act'))
    segments = jnp.take(segment, type_ids, axis=0, mode='clip')  # RoBERTa has one
    return self._finished(self._placed(ids, positions) + segments, deterministic)
