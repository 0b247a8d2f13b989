"""An attention kernel that a user may add: one row and head at a time."""

import jax
import jax.numpy as jnp


def obstacle(config, length, heads):
  return f'{length} is odd' if length % 2 else ''


def attend(heads, text_ids, dropout):
  def of_head(query, key, value, text):  # [L, K] each, and [L]
    scores = query @ key.T / jnp.sqrt(query.shape[-1])
    return jax.nn.softmax(jnp.where(text[:, None] == text, scores, -1e9)) @ value

  def of_row(query, key, value, text):  # [L, H, K] each, and [L]
    return jax.vmap(of_head, (1, 1, 1, None), 1)(query, key, value, text)

  return jax.vmap(of_row)(heads.query, heads.key, heads.value, text_ids)
