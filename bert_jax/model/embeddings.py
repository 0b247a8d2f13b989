"""The embeddings of tokens, positions and segments; their sum enters the first layer."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import LayerNorm, truncated_normal
from bert_jax.model.products import activation_dtype, product_with_transposed


class Embeddings(nn.Module):
  """The sum of learned embeddings (google-research/bert, `embedding_postprocessor`).

  The sum has token embeddings, and position and segment embeddings if the architecture
  has them. The token table is also the decoder of the MLM head.
  """

  config: BertConfig

  def setup(self):
    c = self.config

    def table(name, axis, rows):
      return self.param(name, truncated_normal(c.initializer_range, axis, 'embed'),
                        (rows, c.embedding_size))

    self.token = table('token', 'vocab', c.padded_vocab_size)
    if c.has_positions:
      self.position = table('position', 'position', c.max_positions)
    if c.has_segments:
      self.segment = table('segment', 'segment', c.type_vocab_size)
    self.norm = LayerNorm(c)
    self.dropout = nn.Dropout(c.dropout)

  def _token_table(self) -> jax.Array:
    """[padded V, E], with the full width E on every chip.

    If a preset shards the width, the chips gather it here. Without this constraint, XLA
    makes every chip look up its part of the width for the rows of all chips.
    """
    return nn.with_logical_constraint(self.token, ('vocab', 'embed_act'))

  def __call__(self, ids: jax.Array, type_ids: jax.Array, positions: jax.Array, *,
               deterministic: bool) -> jax.Array:
    """Embeds a batch.

    Args:
      ids: [B, L] int32 token ids.
      type_ids: [B, L] int32, 0 in segment A and 1 in segment B.
      positions: [B, L] int32 position of each token in its text or pair.
      deterministic: no dropout.

    Returns:
      [B, L, E] in the activation dtype.
    """
    c = self.config
    # The sum is in float32, because bfloat16 would round away digits of each term.
    x = jnp.take(self._token_table(), ids, axis=0)  # [B, L, E]
    if c.has_positions:
      table = nn.with_logical_constraint(self.position, (None, 'embed_act'))
      x += jnp.take(table, positions, axis=0)
    if c.has_segments:
      table = nn.with_logical_constraint(self.segment, (None, 'embed_act'))
      # RoBERTa has one segment: ids of segment B use its row too.
      x += jnp.take(table, type_ids, axis=0, mode='clip')
    x = nn.with_logical_constraint(x, ('batch', 'seq', 'embed_act'))
    x = self.norm(x).astype(activation_dtype(c.compute_dtype))
    return self.dropout(x, deterministic=deterministic)

  def decode(self, x: jax.Array) -> jax.Array:
    """Logits under the token table: [..., E] -> [..., padded V] float32."""
    return product_with_transposed(x, self._token_table(), self.config.compute_dtype)
