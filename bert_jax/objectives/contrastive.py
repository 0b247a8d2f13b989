"""Contrast within a batch: each text is to be nearer to its partner than to all others.

The loss of SimCSE (Gao et al. 2021, https://arxiv.org/abs/2104.08821) and of sentence-transformers'
multiple negatives; a third text of an example, if it has one, is one more that it is no partner of.
"""

import jax
import jax.numpy as jnp

from bert_jax.model.attention import MASKED
from bert_jax.objectives.losses import cross_entropy


def contrast(vectors: jax.Array, there: jax.Array,
             temperature: float) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of the partner among the other texts of the batch, by their cosines.

  Args:
    vectors: [E, C, D] float32 of length 1: of each example a text, its partner, perhaps a third.
    there: [E, C] bool, which of them exist.
    temperature: the cosines are divided by it.

  Returns:
    (losses [E] in nat, whether the partner is the nearest [E] bool).
  """
  others = jnp.moveaxis(vectors[:, 1:], 1, 0).reshape(-1, vectors.shape[-1])  # partners, then third
  cosines = jnp.einsum('ed,od->eo', vectors[:, 0], others, preferred_element_type=jnp.float32)
  exists = jnp.moveaxis(there[:, 1:], 1, 0).reshape(-1)
  return cross_entropy(jnp.where(exists, cosines / temperature, MASKED), jnp.arange(len(there)))
