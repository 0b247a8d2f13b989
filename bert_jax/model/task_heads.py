"""The heads of the paper's fine-tuning tasks (Devlin et al. 2019, section 4), on BERT."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model import architectures
from bert_jax.model import pooling
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros
from bert_jax.model.encoder import Batch


def _dense(config: BertConfig, outputs: int) -> nn.Dense:
  return nn.Dense(outputs, dtype=jnp.float32, bias_init=zeros('labels'),
                  kernel_init=truncated_normal(config.initializer_range, 'embed', 'labels'))


class BertForSequenceClassification(nn.Module):
  """A label, labels or a number for each text or pair: a dense layer on the pooled [CLS]."""

  config: BertConfig
  num_labels: int  # 1 for a regression

  def setup(self):
    self.bert = architectures.encoder(self.config)
    self.dropout = nn.Dropout(self.config.dropout)
    self.classifier = _dense(self.config, self.num_labels)

  def pooled(self, batch: Batch, cls_positions: jax.Array, *,
             deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 positions of [CLS] -> pooled outputs [B, P, D]."""
    return self.bert(batch, cls_positions, deterministic=deterministic)[1]

  def classify(self, pooled: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """Pooled outputs [..., D] -> logits [..., num_labels] float32."""
    return self.classifier(self.dropout(pooled, deterministic=deterministic))

  def __call__(self, batch: Batch, cls_positions: jax.Array, *,
               deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 positions of [CLS] -> logits [B, P, num_labels] float32."""
    pooled = self.pooled(batch, cls_positions, deterministic=deterministic)
    return self.classify(pooled, deterministic=deterministic)


class BertForMultipleChoice(BertForSequenceClassification):
  """A score for each (text, choice) pair; a softmax over the pairs of a text is the caller's."""

  num_labels: int = 1


class BertForTokenClassification(nn.Module):
  """A label for each token: a dense layer on its hidden state."""

  config: BertConfig
  num_labels: int

  def setup(self):
    self.bert = architectures.encoder(self.config)
    self.dropout = nn.Dropout(self.config.dropout)
    self.classifier = _dense(self.config, self.num_labels)

  def __call__(self, batch: Batch, *, deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> logits [B, L, num_labels] float32."""
    hidden = self.bert.features(self.bert.encode(batch, deterministic=deterministic))
    return self.classifier(self.dropout(hidden, deterministic=deterministic))


class BertForQuestionAnswering(nn.Module):
  """Where an answer begins and ends: two scores for each token, without dropout before them."""

  config: BertConfig

  def setup(self):
    self.bert = architectures.encoder(self.config)
    self.qa_outputs = _dense(self.config, 2)

  def __call__(self, batch: Batch, *, deterministic: bool = True) -> jax.Array:
    """[B, L] inputs -> logits [B, L, 2] float32: the start, the end."""
    return self.qa_outputs(self.bert.features(self.bert.encode(batch, deterministic=deterministic)))


class BertForSentenceEmbedding(nn.Module):
  """A vector for each text, pooled from its hidden states; no head of its own."""

  config: BertConfig
  pooling: str  # cls, mean, max

  def setup(self):
    self.bert = architectures.encoder(self.config)

  def __call__(self, batch: Batch, starts: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """[B, L] inputs and [B, P] int32 where texts begin -> [B, P, D] float32."""
    hidden = self.bert.encode(batch, deterministic=deterministic)
    return pooling.pool(hidden, batch.pair_index, starts, self.pooling)
