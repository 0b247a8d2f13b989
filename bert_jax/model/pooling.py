"""Pooling: one vector for each text, from its tokens or from its chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model.encoder import take_positions
from bert_jax.model.layers import MASKED


class Texts(NamedTuple):
  """The texts within B rows."""

  text_ids: jax.Array  # [B, L] int32, 0 on padding, 1..P on the tokens of each text
  positions: jax.Array  # [B, L] int32, position of each token in its text, from 0
  starts: jax.Array  # [B, P] int32, the index in the row at which each text begins

  def members(self) -> jax.Array:
    """[B, L, P] float32, 1 on the tokens of each text."""
    numbers = jnp.arange(1, self.starts.shape[1] + 1)
    return (self.text_ids[:, :, None] == numbers).astype(jnp.float32)


def _first_token(hidden: jax.Array, texts: Texts) -> jax.Array:
  return take_positions(hidden, texts.starts)


def _last_token(hidden: jax.Array, texts: Texts) -> jax.Array:
  count = texts.members().sum(1).astype(jnp.int32)  # [B, P]
  # An absent text has no tokens and starts at 0.
  return take_positions(hidden, jnp.maximum(texts.starts + count - 1, 0))


def _largest(hidden: jax.Array, texts: Texts) -> jax.Array:

  def of_text(number):
    is_token = (texts.text_ids == number)[:, :, None]
    return jnp.max(hidden, axis=1, where=is_token, initial=-jnp.inf)

  return jax.vmap(of_text, out_axes=1)(jnp.arange(1, texts.starts.shape[1] + 1))


def _quotient(hidden: jax.Array, weights: jax.Array, divisor: jax.Array) -> jax.Array:
  """The token sum weighted by `weights` [B, L, P], divided by `divisor` [B, P]."""
  total = jnp.einsum('blp,bld->bpd', weights, hidden)
  # Absent texts have a divisor of 0.
  return total / jnp.maximum(divisor, 1)[:, :, None]


def _mean(hidden: jax.Array, texts: Texts) -> jax.Array:
  members = texts.members()
  return _quotient(hidden, members, members.sum(1))


def _sum_over_root_of_count(hidden: jax.Array, texts: Texts) -> jax.Array:
  members = texts.members()
  return _quotient(hidden, members, jnp.sqrt(members.sum(1)))


def _weighted_mean(hidden: jax.Array, texts: Texts) -> jax.Array:
  """Weighs the tokens of a text 1, 2, 3, ..."""
  weights = texts.members() * (texts.positions + 1)[:, :, None]
  return _quotient(hidden, weights, weights.sum(1))


# (hidden [B, L, D] float32, texts) -> [B, P, D] over all tokens of each text, including
# special tokens, by the names of sentence-transformers. A new pooling is one line here.
POOLINGS = {
    'cls': _first_token,
    'mean': _mean,
    'max': _largest,
    'mean_sqrt_len_tokens': _sum_over_root_of_count,
    'weightedmean': _weighted_mean,
    'lasttoken': _last_token,
}
TOKEN_VECTORS = 'none'  # instead of a pooling: one vector for each token


def pool(hidden: jax.Array, text_ids: jax.Array, positions: jax.Array, starts: jax.Array,
         how: str) -> jax.Array:
  """Pools the hidden states of each text: [B, L, D] -> [B, P, D] float32.

  Args:
    hidden: [B, L, D] from the encoder.
    text_ids, positions, starts: the fields of `Texts`.
    how: one of POOLINGS.
  """
  return POOLINGS[how](hidden.astype(jnp.float32), Texts(text_ids, positions, starts))


def combine_chunks(vectors: jax.Array, exists: jax.Array, how: str) -> jax.Array:
  """Combines the chunks of long texts (Sun et al. 2019): [T, C, D] -> [T, D].

  T is the number of texts, C the number of chunks of each. chunks_attention has no
  parameters: every chunk attends to all chunks by scaled dot products, and the results
  are averaged. For a single chunk, every method returns the chunk itself.

  Args:
    vectors: [T, C, D] float32.
    exists: [T, C] bool, False where a text has fewer chunks.
    how: chunks_mean, chunks_max or chunks_attention.
  """
  if vectors.shape[1] == 1:
    return vectors[:, 0]
  real = exists[:, :, None].astype(vectors.dtype)  # [T, C, 1]
  if how == 'chunks_max':
    return jnp.where(exists[:, :, None], vectors, MASKED).max(1)
  if how == 'chunks_attention':
    scores = jnp.einsum('tcd,tkd->tck', vectors, vectors) / jnp.sqrt(vectors.shape[-1])
    scores = jnp.where(exists[:, None, :], scores, MASKED)  # [T, C, C]
    vectors = jnp.einsum('tck,tkd->tcd', jax.nn.softmax(scores, axis=-1), vectors)
  return (vectors * real).sum(1) / jnp.maximum(real.sum(1), 1)


def combine_chunks_on_host(vectors: np.ndarray, owners: np.ndarray, how: str) -> np.ndarray:
  """Combines the chunks of each text, in host arrays: [chunks, D] -> [texts, D].

  `owners` [chunks] is the index of each chunk's text, ascending from 0 without gaps. For
  `how`, see `combine_chunks`.
  """
  counts = np.bincount(owners)
  first = np.cumsum(counts) - counts
  # Pad each text to the next power of 2 chunks: one long text does not pad all others.
  size = 1 << np.ceil(np.log2(counts)).astype(np.int64)
  combined = np.empty((len(counts), vectors.shape[1]), vectors.dtype)
  for chunks in np.unique(size):
    texts = np.flatnonzero(size == chunks)
    index = first[texts, None] + np.arange(chunks)  # [T, C]
    exists = np.arange(chunks) < counts[texts, None]
    group = jnp.asarray(vectors[np.minimum(index, len(vectors) - 1)])
    combined[texts] = combine_chunks(group, exists, how)
  return combined
