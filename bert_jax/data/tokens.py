"""The tokens of a batch: the form of corpus rows and of encoder inputs."""

from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
  """Rows of tokens; each row has one or more texts, or pairs of texts: [B, L] int32.

  The fields are NumPy arrays on the host and jax.Arrays in a model.
  """

  ids: np.ndarray  # entries of the vocabulary
  type_ids: np.ndarray  # 0 in segment A of a pair and in a single text, 1 in segment B
  positions: np.ndarray  # the position of each token in its own text or pair
  text_ids: np.ndarray  # 0 on padding, 1..P on the tokens of each text or pair
  # [B] bool: in a causal row, each token sees only itself and earlier tokens. None = no
  # row is causal.
  causal: np.ndarray | None = None
  # [B, L] bool: True on tokens that no other token sees, such as the [MASK] tokens that
  # expand a query of ColBERT. They see their text. None = all tokens are visible.
  hidden: np.ndarray | None = None
