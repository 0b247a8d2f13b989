"""Masked LM and what is asked of sentence pairs.

Devlin et al. 2019 (section 3.1): masked LM + next sentence prediction (does B follow A?). Lan et
al. 2020 (ALBERT): sentence order prediction (does B come after A, or before it?). Liu et al. 2019
(RoBERTa): masked LM alone.
"""

from typing import Any

import jax

from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.objectives.masking import Masked

# What is asked of the pairs, by the kind of sequences that rows are made of.
PAIR_OBJECTIVES = {'next_sentence': 'nsp', 'sentence_order': 'sop', 'full_sentences': None}


def objectives(pair_objective: str | None) -> dict[str, float]:
  """The losses and their weights in the total."""
  return {'mlm_loss': 1.0, **({f'{pair_objective}_loss': 1.0} if pair_objective else {})}


def loss(model: BertForPreTraining, params: Any, inputs: Batch, masked: Masked,
         cls_positions: jax.Array, labels: jax.Array, pair_weights: jax.Array,
         dropout_key: jax.Array | None, pair_objective: str | None = 'nsp') -> Metrics:
  """The losses and their accuracies.

  Args:
    model: BERT with both heads.
    params: its variables.
    inputs: [B, L] each; `ids` are the corrupted ones.
    masked: what to predict, [B, M].
    cls_positions: [B, P] int32.
    labels: [B, P] int32, 0 where B follows A, 1 where it is from elsewhere or comes before A.
    pair_weights: [B, P] float32, 1 for a pair, 0 where there is none.
    dropout_key: None = no dropout.
    pair_objective: nsp, sop, or None = the pair head is left out.

  Returns:
    mlm_loss, mlm_accuracy, and nsp_loss and nsp_accuracy or sop_loss and sop_accuracy, each
    (sum, count) in nat or right answers.
  """
  mlm_logits, pair_logits = model.apply(
      params, inputs, masked.positions, cls_positions if pair_objective else None,
      deterministic=dropout_key is None,
      rngs={} if dropout_key is None else {'dropout': dropout_key})
  mlm_loss, mlm_right = cross_entropy(mlm_logits, masked.targets)
  metrics = {'mlm_loss': weighted(mlm_loss, masked.weights),
             'mlm_accuracy': weighted(mlm_right, masked.weights)}
  if pair_objective:
    pair_loss, pair_right = cross_entropy(pair_logits, labels)
    metrics[f'{pair_objective}_loss'] = weighted(pair_loss, pair_weights)
    metrics[f'{pair_objective}_accuracy'] = weighted(pair_right, pair_weights)
  return metrics
