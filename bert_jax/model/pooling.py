"""One vector for each text of a packed batch."""

import jax
import jax.numpy as jnp

from bert_jax.model.encoder import take_positions

POOLINGS = ('cls', 'mean', 'max', 'none')


def pool(hidden: jax.Array, pair_index: jax.Array, starts: jax.Array, how: str) -> jax.Array:
  """Pools the hidden states of each text, special tokens included: [B, L, D] -> [B, P, D] float32.

  Args:
    hidden: [B, L, D] from the encoder.
    pair_index: [B, L] int32, 0 on padding, p = 1..P on the tokens of the p-th text of the row.
    starts: [B, P] int32, the position where each text begins.
    how: 'cls' (the first token), 'mean' or 'max' over the tokens.
  """
  hidden = hidden.astype(jnp.float32)
  if how == 'cls':
    return take_positions(hidden, starts)
  texts = jnp.arange(1, starts.shape[1] + 1)
  if how == 'mean':
    member = (pair_index[:, :, None] == texts).astype(jnp.float32)  # [B, L, P]
    total = jnp.einsum('blp,bld->bpd', member, hidden)
    return total / jnp.maximum(member.sum(1), 1)[:, :, None]

  def largest(text):
    return jnp.max(hidden, axis=1, where=(pair_index == text)[:, :, None], initial=-jnp.inf)

  return jax.vmap(largest, out_axes=1)(texts)
