"""The heads of pretraining, and BERT with those of its own."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import architectures
from bert_jax.model.attention import MASKED
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import LayerNorm
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros
from bert_jax.model.encoder import Batch
from bert_jax.model.encoder import activation
from bert_jax.model.encoder import take_positions


class ReplacedTokenHead(nn.Module):
  """Was this token replaced? (Clark et al. 2020, https://arxiv.org/abs/2003.10555)."""

  config: BertConfig

  @nn.compact
  def __call__(self, hidden: jax.Array) -> jax.Array:
    """[..., D] -> logits [...] float32, high where a token seems to be replaced."""
    c = self.config
    x = nn.Dense(c.hidden_size, dtype=hidden.dtype, bias_init=zeros('pooled'), name='dense',
                 kernel_init=truncated_normal(c.initializer_range, 'embed', 'pooled'))(hidden)
    return nn.Dense(1, dtype=jnp.float32, bias_init=zeros('labels'), name='out',
                    kernel_init=truncated_normal(c.initializer_range, 'embed', 'labels'))(
                        activation(c.activation)(x))[..., 0]


class ElectraForPreTraining(nn.Module):
  """ELECTRA's discriminator."""

  config: BertConfig

  def setup(self):
    self.bert = architectures.encoder(self.config)
    self.rtd = ReplacedTokenHead(self.config)

  def __call__(self, batch: Batch, *, deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> logits [B, L] float32, high where a token seems to be replaced."""
    return self.rtd(self.bert.encode(batch, deterministic=deterministic))


class BertForPreTraining(nn.Module):
  """BERT with the masked-LM head and the next-sentence head of the paper."""

  config: BertConfig

  def setup(self):
    c = self.config
    init = truncated_normal(c.initializer_range, 'embed', 'pooled')
    self.bert = architectures.encoder(c)
    self.mlm_dense = nn.Dense(c.embedding_size, dtype=c.compute_dtype, kernel_init=init,
                              bias_init=zeros('pooled'))
    self.mlm_norm = LayerNorm(c)
    self.nsp = nn.Dense(2, dtype=jnp.float32, bias_init=zeros('labels'),
                        kernel_init=truncated_normal(c.initializer_range, 'embed', 'labels'))

  def transform(self, x: jax.Array) -> jax.Array:
    """What the decoder reads: hidden states [..., D] -> [..., E]."""
    return self.mlm_norm(activation(self.config.activation)(self.mlm_dense(x)))

  @nn.compact  # its bias is asked for only here: an imported model may have the other head alone
  def mlm_logits(self, hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Logits over the vocabulary at the masked positions only.

    Args:
      hidden: [B, L, D] from the encoder.
      positions: [B, M] int32.

    Returns:
      [B, M, padded V] float32; -1e9 on the entries that only pad the table.
    """
    x = self.transform(take_positions(hidden, positions).reshape(-1, hidden.shape[-1]))
    shift = self.param('mlm_bias', zeros('vocab'), (self.config.padded_vocab_size,))
    logits = self.bert.embeddings.decode(x) + shift  # [B * M, padded V]
    logits = nn.with_logical_constraint(logits, ('batch', 'vocab'))
    logits = jnp.where(jnp.arange(logits.shape[-1]) < self.config.vocab_size, logits, MASKED)
    return logits.reshape(*positions.shape, -1)

  def nsp_logits(self, hidden: jax.Array, cls_positions: jax.Array) -> jax.Array:
    """[B, L, D] and [B, P] int32 -> [B, P, 2] float32; class 0 is "B follows A", as published."""
    return self.nsp(self.bert.pool(hidden, cls_positions))

  def __call__(self, batch: Batch, masked_positions: jax.Array, cls_positions: jax.Array | None, *,
               deterministic: bool = True) -> tuple[jax.Array, jax.Array | None]:
    """(MLM logits [B, M, padded V], NSP logits [B, P, 2]), both float32.

    Without `cls_positions` there is no NSP head and no pooler (RoBERTa), and None for its logits.
    """
    hidden = self.bert.encode(batch, deterministic=deterministic)
    nsp_logits = None if cls_positions is None else self.nsp_logits(hidden, cls_positions)
    return self.mlm_logits(hidden, masked_positions), nsp_logits


class ModernForPreTraining(BertForPreTraining):
  """The modern encoder, whose own head stands before the decoder."""

  def transform(self, x: jax.Array) -> jax.Array:
    """The head that all tasks share."""
    return self.bert.features(x)


def for_pretraining(config: BertConfig) -> BertForPreTraining:
  """The model with the heads of masked LM and of pairs."""
  special = {'modernbert': ModernForPreTraining}
  return special.get(config.architecture, BertForPreTraining)(config)
