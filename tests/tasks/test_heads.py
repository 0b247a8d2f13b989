"""Fine-tuning trains the encoder and the head with dropout."""

from flax import linen as nn
import jax
import numpy as np
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.model.bert_config import BertConfig
from bert_jax.tasks import (
  late_interaction,
  multiple_choice,
  question_answering,
  sequence_classification,
  sparse_embedding,
  token_classification,
)

CONFIG = BertConfig(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
                    max_positions=32, dropout=0.5, attention_dropout=0.0)


@pytest.mark.parametrize('module', [
    sequence_classification.BertForSequenceClassification(CONFIG, 3),
    token_classification.BertForTokenClassification(CONFIG, 3),
    question_answering.BertForQuestionAnswering(CONFIG),
    multiple_choice.BertForMultipleChoice(CONFIG),
    sparse_embedding.BertForSparseEmbedding(CONFIG),
    late_interaction.BertForLateInteraction(CONFIG, 8)], ids=lambda x: type(x).__name__)
def test_encoder_and_head_train_with_dropout(module, monkeypatch):
  tokens = Tokens(*np.ones((4, 2, 8), np.int32))
  starts = np.zeros((2, 1), np.int32)
  params = jax.eval_shape(module.init, jax.random.key(0), tokens, starts)
  off, call = [], nn.Dropout.__call__
  monkeypatch.setattr(nn.Dropout, '__call__', lambda self, x, deterministic=None, rng=None: (
      off.append(deterministic) or call(self, x, deterministic, rng)))
  jax.eval_shape(lambda p: module.apply(p, tokens, starts, deterministic=False,
                                        rngs={'dropout': jax.random.key(1)}), params)
  assert len(off) > 2 and not any(off)
