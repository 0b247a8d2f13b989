"""Masked LM and what is asked of sentence pairs.

Devlin et al. 2019 (section 3.1): masked LM + next sentence prediction (does B follow A?). Lan et
al. 2020 (ALBERT): sentence order prediction (does B come after A, or before it?). Liu et al. 2019
(RoBERTa): masked LM alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.objectives.objective import Example
from bert_jax.objectives.objective import Keys


@dataclasses.dataclass(frozen=True)
class MaskedLM:
  """Masked LM; `pair_objective` is nsp, sop, or None = the pair head is left out."""

  model: BertForPreTraining
  pair_objective: str | None = 'nsp'

  @property
  def loss_weights(self) -> dict[str, float]:
    """The losses count the same."""
    return {'mlm_loss': 1.0,
            **({f'{self.pair_objective}_loss': 1.0} if self.pair_objective else {})}

  def with_config(self, config: BertConfig) -> 'MaskedLM':
    """The same with a model of other sizes."""
    return dataclasses.replace(self, model=type(self.model)(config))

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return self.model.init(key, Batch(*[tokens] * 4), tokens[:, :1],
                           tokens[:, :1] if self.pair_objective else None)

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> Metrics:
    """The losses and their accuracies.

    Returns:
      mlm_loss, mlm_accuracy, and nsp_loss and nsp_accuracy or sop_loss and sop_accuracy, each
      (sum, count) in nat or right answers.
    """
    del frozen
    masked = example.masked
    mlm_logits, pair_logits = self.model.apply(
        params, example.inputs, masked.positions,
        example.cls_positions if self.pair_objective else None,
        deterministic=keys.dropout is None,
        rngs={} if keys.dropout is None else {'dropout': keys.dropout})
    mlm_loss, mlm_right = cross_entropy(mlm_logits, masked.targets)
    metrics = {'mlm_loss': weighted(mlm_loss, masked.weights),
               'mlm_accuracy': weighted(mlm_right, masked.weights)}
    if self.pair_objective:
      pair_loss, pair_right = cross_entropy(pair_logits, example.labels)
      metrics[f'{self.pair_objective}_loss'] = weighted(pair_loss, example.pair_weights)
      metrics[f'{self.pair_objective}_accuracy'] = weighted(pair_right, example.pair_weights)
    return metrics

  def exported(self, params: Any) -> Any:
    """All of them."""
    return params

  def parameters(self) -> int:
    """Encoder, masked LM head, and pooler and pair head if there is one."""
    return self.model.config.count_parameters(pooler=self.pair_objective is not None, heads=True)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Of the encoder and the masked LM head."""
    return self.model.config.flops_per_token(length, predictions)
