"""Contrast within a batch: each text is to be nearer to its partner than to all others.

The loss of SimCSE (Gao et al. 2021, https://arxiv.org/abs/2104.08821) and of sentence-transformers'
multiple negatives; a third text of an example, if it has one, is one more that it is no partner of.
"""

import jax
import jax.numpy as jnp

from bert_jax.model.kernels import MASKED
from bert_jax.objectives.losses import cross_entropy


def contrast(vectors: jax.Array, exists: jax.Array,
             temperature: float) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of the partner among the other texts of the batch, by their cosines.

  Args:
    vectors: [E, C, D] float32 of length 1: of each example a text, its partner, perhaps a third.
    exists: [E, C] bool, False for texts that an example lacks.
    temperature: the cosines are divided by it.

  Returns:
    (losses [E] in nat, right [E] bool: the partner is the nearest).
  """
  others = jnp.moveaxis(vectors[:, 1:], 1, 0).reshape(-1, vectors.shape[-1])  # partners, then third
  cosines = jnp.einsum('ed,od->eo', vectors[:, 0], others, preferred_element_type=jnp.float32)
  other_exists = jnp.moveaxis(exists[:, 1:], 1, 0).reshape(-1)
  logits = jnp.where(other_exists, cosines / temperature, MASKED)
  return cross_entropy(logits, jnp.arange(len(exists)))
