"""Pooling: one vector for each text, from its tokens or from its chunks."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.encoder import take_positions
from bert_jax.model.kernels import MASKED

# As sentence-transformers names them. 'none' is a vector for each token.
POOLINGS = ('cls', 'mean', 'max', 'mean_sqrt_len_tokens', 'weightedmean', 'lasttoken', 'none')


def pool(hidden: jax.Array, text_ids: jax.Array, positions: jax.Array, starts: jax.Array,
         how: str) -> jax.Array:
  """Pools the hidden states of each text, special tokens included: [B, L, D] -> [B, P, D] float32.

  Args:
    hidden: [B, L, D] from the encoder.
    text_ids: [B, L] int32, 0 on padding, p = 1..P on the tokens of the p-th text of the row.
    positions: [B, L] int32, those of the tokens in their texts, from 0 on.
    starts: [B, P] int32, the position where each text begins.
    how: 'cls' and 'lasttoken' take the first and the last token, 'mean' and 'max' are over all
      tokens. 'mean_sqrt_len_tokens' divides the sum by the root of the number of tokens.
      'weightedmean' weighs the tokens 1, 2, 3, ...
  """
  hidden = hidden.astype(jnp.float32)
  if how == 'cls':
    return take_positions(hidden, starts)
  texts = jnp.arange(1, starts.shape[1] + 1)
  if how == 'max':

    def largest(text):
      return jnp.max(hidden, axis=1, where=(text_ids == text)[:, :, None], initial=-jnp.inf)

    return jax.vmap(largest, out_axes=1)(texts)
  member = (text_ids[:, :, None] == texts).astype(jnp.float32)  # [B, L, P]
  count = member.sum(1)  # [B, P]
  if how == 'lasttoken':
    return take_positions(hidden, jnp.maximum(starts + count.astype(jnp.int32) - 1, 0))
  if how == 'weightedmean':
    member *= (positions + 1)[:, :, None]
  total = jnp.einsum('blp,bld->bpd', member, hidden)
  weight = jnp.sqrt(count) if how == 'mean_sqrt_len_tokens' else member.sum(1)
  return total / jnp.maximum(weight, 1)[:, :, None]


def combine_chunks(vectors: jax.Array, exists: jax.Array, how: str) -> jax.Array:
  """Combines the chunks of long texts (Sun et al. 2019, section 5.3): [T, C, D] -> [T, D].

  T is the number of texts, C that of the chunks of each.
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


def combine_texts(vectors: np.ndarray, owners: np.ndarray, how: str) -> np.ndarray:
  """The combined chunks of each text: [chunks, D] -> [texts, D].

  `owners` [chunks] holds the text of each chunk, ascending from 0 without gaps. `combine_chunks`
  gets texts with similar numbers of chunks together, so that one long text does not pad all others.
  """
  counts = np.bincount(owners)
  first = np.cumsum(counts) - counts
  size = 1 << np.ceil(np.log2(counts)).astype(np.int64)  # chunks, the next power of two
  combined = np.empty((len(counts), vectors.shape[1]), vectors.dtype)
  for chunks in np.unique(size):
    texts = np.flatnonzero(size == chunks)
    place = first[texts, None] + np.arange(chunks)  # [T, C]
    exists = np.arange(chunks) < counts[texts, None]
    group = jnp.asarray(vectors[np.minimum(place, len(vectors) - 1)])
    combined[texts] = combine_chunks(group, exists, how)
  return combined
