"""One vector for a long text that was read in chunks (Sun et al. 2019, section 5.3)."""

import jax
import jax.numpy as jnp

from bert_jax.model.kernels import MASKED


def combine(vectors: jax.Array, exists: jax.Array, how: str) -> jax.Array:
  """Combines the vectors of the C chunks of each of T texts: [T, C, D] -> [T, D].

  chunks_attention has no weights of its own: every chunk attends to all with scaled dot products,
  and the results are averaged.

  Args:
    vectors: [T, C, D] float32.
    exists: [T, C] bool, False where a text has fewer chunks.
    how: chunks_mean, chunks_max or chunks_attention; of one chunk all give the chunk itself.
  """
  if vectors.shape[1] == 1:
    return vectors[:, 0]
  real = exists[:, :, None].astype(vectors.dtype)  # [T, C, 1]
  if how == 'chunks_max':
    return jnp.where(exists[:, :, None], vectors, MASKED).max(1)
  if how == 'chunks_attention':
    scores = jnp.einsum('tcd,tkd->tck', vectors, vectors) / jnp.sqrt(vectors.shape[-1])
    weights = jax.nn.softmax(jnp.where(exists[:, None, :], scores, MASKED), axis=-1)  # [T, C, C]
    vectors = jnp.einsum('tck,tkd->tcd', weights, vectors)
  return (vectors * real).sum(1) / jnp.maximum(real.sum(1), 1)
