"""The tokens of a batch: rows of the corpus and inputs of the encoder have the same form."""

from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
  """Rows of tokens, with one or several texts or pairs of texts in each. All [B, L] int32.

  On the host they are NumPy arrays, in a model jax.Arrays.
  """

  ids: np.ndarray  # entries of the vocabulary
  type_ids: np.ndarray  # 0 in segment A of a pair and in a single text, 1 in segment B
  positions: np.ndarray  # the position of each token in its own text or pair
  text_ids: np.ndarray  # 0 on padding, 1..P on the tokens of each text or pair
