"""Causal rows: some rows of masked language modeling predict the next token instead.

Each token of a causal row sees only itself and earlier tokens of its text. No token is
replaced. The hidden state of the token before a drawn position predicts the token at that
position. Causal and masked rows share all parameters and make equally many predictions. A
model learns faster from both than from masked rows alone: GPT-BERT (Charpentier and
Samuel 2024, arXiv:2410.24159) mixes them, Gisserot-Boukhlef et al. (2025,
arXiv:2507.00994) begin with causal steps. Evaluations never have causal rows.
"""

from fractions import Fraction
import math

import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.objectives.masking import Masked


def are_causal(number: np.ndarray, share: float) -> np.ndarray:
  """True for causal rows, which are evenly spaced by number: [B] int64 -> [B] bool.

  Rows are numbered over the run. In a mixture, each corpus numbers its rows separately.
  """
  return np.floor((number + 1) * share) > np.floor(number * share)


def share_at(share: float, steps: float, step: int, train_steps: int) -> float:
  """The share of causal rows at a step.

  It is `share` in the first part of the run, and 0 after it. The first part is the
  fraction `steps` of all steps.
  """
  # The fraction as it is written: in floats, 0.07 * 100 is a little more than 7.
  return share if step < math.ceil(Fraction(str(steps)) * train_steps) else 0.0


def predict_next(tokens: Tokens, masked: Masked) -> Masked:
  """Makes causal rows predict the next token instead of masked tokens.

  Args:
    tokens: the rows before masking; `causal` says which of them are causal.
    masked: the result of masking all rows.

  Returns:
    `masked`; causal rows have their original ids and the positions before the predicted
    tokens.
  """
  causal = tokens.causal[:, None]  # [B, 1]
  # A text begins with [CLS], which is never predicted: only unused slots have position 0.
  before = jnp.maximum(masked.positions - 1, 0)
  return masked._replace(ids=jnp.where(causal, tokens.ids, masked.ids),
                         positions=jnp.where(causal, before, masked.positions))
