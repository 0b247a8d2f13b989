"""Embeddings, and the norm, the dense layer and the initializers that all modules share."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig


def truncated_normal(stddev: float, *axes: str) -> nn.initializers.Initializer:
  """BERT's initializer (normal, cut at two deviations) for a parameter with these logical axes.

  `stddev` is that of the normal before the cut, as in TensorFlow's `truncated_normal_initializer`
  that BERT used. The values have a standard deviation of 0.88 `stddev`.
  """
  return nn.with_logical_partitioning(nn.initializers.truncated_normal(stddev), axes)


def zeros(*axes: str) -> nn.initializers.Initializer:
  """Initializer of a bias with these logical axes."""
  return nn.with_logical_partitioning(nn.initializers.zeros_init(), axes)


def dense(config: BertConfig, features: int, axes: tuple[str, str], *, name: str | None = None,
          stddev: float | None = None, dtype: jnp.dtype | None = None, use_bias: bool = True,
          bias_axis: str | None = None) -> nn.Dense:
  """A dense layer: [..., size] -> [..., features].

  `axes` are the logical axes of the kernel, the last one also that of the bias unless `bias_axis`
  is given. The defaults are the compute dtype and a `stddev` of `initializer_range`.
  """
  init = truncated_normal(config.initializer_range if stddev is None else stddev, *axes)
  return nn.Dense(features, use_bias=use_bias, dtype=dtype or config.compute_dtype,
                  kernel_init=init, bias_init=zeros(bias_axis or axes[1]), name=name)


class LayerNorm(nn.Module):
  """LayerNorm over the last axis, in float32: [..., D] -> [..., D] in the dtype of its input."""

  config: BertConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    ones = nn.with_logical_partitioning(nn.initializers.ones_init(), ('norm',))
    norm = nn.LayerNorm(epsilon=self.config.layer_norm_eps, dtype=jnp.float32,
                        use_bias=self.config.has_biases, scale_init=ones, bias_init=zeros('norm'),
                        use_fast_variance=False, name='norm')
    nn.share_scope(self, norm)
    return norm(x).astype(x.dtype)


class Embeddings(nn.Module):
  """The sum of learned embeddings (google-research/bert, `embedding_postprocessor`).

  Tokens, and positions and segments where the architecture has them. The token table also decodes.
  """

  config: BertConfig

  def setup(self):
    c = self.config

    def table(name, axis, rows):
      init = truncated_normal(c.initializer_range, axis, 'embed')
      return self.param(name, init, (rows, c.embedding_size))

    self.token = table('token', 'vocab', c.padded_vocab_size)
    if c.has_positions:
      self.position = table('position', 'position', c.max_positions)
    if c.has_segments:
      self.segment = table('segment', 'segment', c.type_vocab_size)
    self.norm = LayerNorm(c)
    self.dropout = nn.Dropout(c.dropout)

  def _token_table(self) -> jax.Array:
    """[padded V, E], its width whole on every chip.

    Where a preset splits the width, the chips exchange the table. Left to itself the compiler would
    have every chip look up a part of the vectors for the rows of all.
    """
    return nn.with_logical_constraint(self.token, ('vocab', 'embed_act'))

  def __call__(self, ids: jax.Array, type_ids: jax.Array, positions: jax.Array, *,
               deterministic: bool) -> jax.Array:
    """Embeds a batch.

    Args:
      ids: [B, L] int32 token ids.
      type_ids: [B, L] int32, 0 in segment A and 1 in segment B.
      positions: [B, L] int32 position of each token in its own pair.
      deterministic: no dropout.

    Returns:
      [B, L, E] in the compute dtype.
    """
    c = self.config
    # Summed in float32: small numbers of the same size lose a digit in bfloat16.
    x = jnp.take(self._token_table(), ids, axis=0)  # [B, L, E]
    if c.has_positions:
      table = nn.with_logical_constraint(self.position, (None, 'embed_act'))
      x += jnp.take(table, positions, axis=0)
    if c.has_segments:
      table = nn.with_logical_constraint(self.segment, (None, 'embed_act'))
      x += jnp.take(table, type_ids, axis=0, mode='clip')  # RoBERTa has one segment
    x = nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act'))
    x = self.norm(x).astype(c.compute_dtype)
    return self.dropout(x, deterministic=deterministic)

  def decode(self, x: jax.Array) -> jax.Array:
    """Logits under the token table: [..., E] -> [..., padded V] float32."""
    table = self._token_table().astype(self.config.compute_dtype)
    return jnp.einsum('...d,vd->...v', x, table, preferred_element_type=jnp.float32)
