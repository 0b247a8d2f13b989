"""Masked LM, alone or with a question about sentence pairs.

Devlin et al. 2019 (section 3.1): masked LM + next sentence prediction (does B follow A?). Lan et
al. 2020 (ALBERT): sentence order prediction (does B come after A, or before it?). Liu et al. 2019
(RoBERTa): masked LM alone.
"""

import dataclasses
from typing import Any

import jax

from bert_jax.objectives import losses, objective
from bert_jax.objectives.objective import Example, Keys


@dataclasses.dataclass(frozen=True)
class MaskedLM(objective.Objective):
  """Masked LM; `pair_objective` is nsp, sop, or None = the pair head is left out."""

  pair_objective: str | None = 'nsp'

  @property
  def loss_weights(self) -> dict[str, float]:
    """The losses count the same."""
    names = ('mlm', self.pair_objective) if self.pair_objective else ('mlm',)
    return {f'{name}_loss': 1.0 for name in names}

  def init(self, key: jax.Array) -> Any:
    return objective.init_masked_lm(self.model, key, with_pairs=bool(self.pair_objective))

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> losses.Metrics:
    """mlm_loss, mlm_accuracy, and the same of nsp or sop."""
    del frozen
    masked, pairs = example.masked, self.pair_objective
    mlm_logits, pair_logits = self.model.apply(
        params, example.inputs, masked.positions, example.cls_positions if pairs else None,
        **objective.with_dropout(keys.dropout))
    metrics = losses.classification(mlm_logits, masked.targets, masked.weights, 'mlm_')
    if pairs:
      metrics |= losses.classification(pair_logits, example.labels, example.pair_weights,
                                       f'{pairs}_')
    return metrics
