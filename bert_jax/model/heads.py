"""The pretraining heads, for every encoder."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import take_positions
from bert_jax.model.layers import MASKED, LayerNorm, activation, dense, zeros


class ReplacedTokenHead(nn.Module):
  """Scores whether a token was replaced (Clark et al. 2020, arXiv:2003.10555)."""

  config: BertConfig

  @nn.compact
  def __call__(self, hidden: jax.Array) -> jax.Array:
    """[..., D] -> logits [...] float32, high where a token seems to be replaced."""
    c = self.config
    x = dense(c, c.hidden_size, ('embed', 'pooled'), name='dense')(hidden)
    x = activation(c.activation)(x)
    return dense(c, 1, ('embed', 'labels'), name='out', dtype=jnp.float32)(x)[..., 0]


class BertForPreTraining(nn.Module):
  """An encoder with pretraining heads; only heads that `init` calls have parameters."""

  config: BertConfig

  def setup(self):
    c = self.config
    self.bert = architectures.make_encoder(c)
    self.mlm_dense = dense(c, c.embedding_size, ('embed', 'pooled'))
    self.mlm_norm = LayerNorm(c)
    self.nsp = dense(c, 2, ('embed', 'labels'), dtype=jnp.float32)
    self.rtd = ReplacedTokenHead(c)

  def transform(self, x: jax.Array) -> jax.Array:
    """Makes the input of the decoder from hidden states: [..., D] -> [..., E]."""
    # A shared pooler already is the layer between the encoder and the decoder.
    if self.config.pooler_is_shared:
      return self.bert.features(x)
    name = self.config.mlm_activation or self.config.activation
    return self.mlm_norm(activation(name)(self.mlm_dense(x)))

  @nn.compact  # the bias exists only if `init` calls this, as for modules in `setup`
  def mlm_logits(self, hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Computes the logits over the vocabulary at `positions`.

    Args:
      hidden: [B, L, D] from the encoder.
      positions: [B, M] int32.

    Returns:
      [B, M, padded V] float32; -1e9 on the entries that only pad the table.
    """
    x = take_positions(hidden, positions).reshape(-1, hidden.shape[-1])  # [B * M, D]
    x = self.transform(x)  # [B * M, E]
    bias = self.param('mlm_bias', zeros('vocab'), (self.config.padded_vocab_size,))
    logits = self.bert.embeddings.decode(x) + bias  # [B * M, padded V]
    logits = nn.with_logical_constraint(logits, ('batch', 'vocab'))
    if logits.shape[-1] > self.config.vocab_size:
      is_entry = jnp.arange(logits.shape[-1]) < self.config.vocab_size  # [padded V]
      logits = jnp.where(is_entry, logits, MASKED)
    return logits.reshape(*positions.shape, -1)

  def nsp_logits(self, hidden: jax.Array, starts: jax.Array) -> jax.Array:
    """[B, L, D], [B, P] int32 -> [B, P, 2] float32; class 0 is "B follows A"."""
    return self.nsp(self.bert.pool(hidden, starts))

  def rtd_logits(self, tokens: Tokens, *, deterministic: bool = True) -> jax.Array:
    """[B, L] -> [B, L] float32, high where a token seems to be replaced (ELECTRA)."""
    return self.rtd(self.bert.encode(tokens, deterministic=deterministic))

  def __call__(self, tokens: Tokens, masked_positions: jax.Array,
               starts: jax.Array | None, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array | None]:
    """Returns (MLM logits [B, M, padded V], NSP logits [B, P, 2]), both float32.

    Without `starts`, the model has no NSP head (RoBERTa), and the NSP logits are None.
    """
    hidden = self.bert.encode(tokens, deterministic=deterministic)
    nsp_logits = None if starts is None else self.nsp_logits(hidden, starts)
    return self.mlm_logits(hidden, masked_positions), nsp_logits
