"""One vector for a long text that was read in chunks (Sun et al. 2019, section 5.3)."""

import jax
import jax.numpy as jnp

from bert_jax.model.attention import MASKED


def combine(vectors: jax.Array, there: jax.Array, how: str) -> jax.Array:
  """Combines the vectors of each text's chunks: [E, C, D] -> [E, D].

  chunks_attention has no weights of its own: every chunk attends to all with scaled dot products,
  and the mean of what they see is taken.

  Args:
    vectors: of the chunks.
    there: [E, C] bool, which of them exist.
    how: chunks_mean, chunks_max or chunks_attention; of one chunk all give the chunk itself.
  """
  if vectors.shape[1] == 1:
    return vectors[:, 0]
  real = there[:, :, None].astype(vectors.dtype)  # [E, C, 1]
  if how == 'chunks_max':
    return jnp.where(there[:, :, None], vectors, MASKED).max(1)
  if how == 'chunks_attention':
    scores = jnp.einsum('ecd,ekd->eck', vectors, vectors) / jnp.sqrt(vectors.shape[-1])
    weights = jax.nn.softmax(jnp.where(there[:, None, :], scores, MASKED), axis=-1)
    vectors = jnp.einsum('eck,ekd->ecd', weights, vectors)
  return (vectors * real).sum(1) / jnp.maximum(real.sum(1), 1)
