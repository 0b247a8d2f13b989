"""Masked LM + next sentence prediction, the two objectives of Devlin et al. 2019 (section 3.1)."""

from typing import Any

import jax

from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.objectives.masking import Masked

OBJECTIVES = {'mlm_loss': 1.0, 'nsp_loss': 1.0}  # their weights in the total loss


def loss(model: BertForPreTraining, params: Any, inputs: Batch, masked: Masked,
         cls_positions: jax.Array, next_sentence: jax.Array, pair_weights: jax.Array,
         dropout_key: jax.Array | None) -> Metrics:
  """Both losses and their accuracies.

  Args:
    model: BERT with both heads.
    params: its variables.
    inputs: [B, L] each; `ids` are the corrupted ones.
    masked: what to predict, [B, M].
    cls_positions: [B, P] int32.
    next_sentence: [B, P] int32, 0 where B follows A, 1 where it is from elsewhere.
    pair_weights: [B, P] float32, 1 for a pair, 0 where there is none.
    dropout_key: None = no dropout.

  Returns:
    mlm_loss, mlm_accuracy, nsp_loss and nsp_accuracy, each (sum, count) in nat or right answers.
  """
  mlm_logits, nsp_logits = model.apply(
      params, inputs, masked.positions, cls_positions, deterministic=dropout_key is None,
      rngs={} if dropout_key is None else {'dropout': dropout_key})
  mlm_loss, mlm_right = cross_entropy(mlm_logits, masked.targets)
  nsp_loss, nsp_right = cross_entropy(nsp_logits, next_sentence)
  return {
      'mlm_loss': weighted(mlm_loss, masked.weights),
      'mlm_accuracy': weighted(mlm_right, masked.weights),
      'nsp_loss': weighted(nsp_loss, pair_weights),
      'nsp_accuracy': weighted(nsp_right, pair_weights),
  }
