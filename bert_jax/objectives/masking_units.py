"""Units of masking that are longer than a word: spans and n-grams."""

import jax
import jax.numpy as jnp
import numpy as np


def join_words(key: jax.Array, word_start: jax.Array, special: jax.Array,
               probabilities: np.ndarray) -> jax.Array:
  """Joins runs of words of random length to units, which never reach across a special token.

  Between two special tokens the lengths of the units are independent draws; the last one is cut off
  at the next special token.

  Args:
    key: of the row.
    word_start: [L] bool, True also on special tokens, on padding and on the tokens after them.
    special: [L] bool, special tokens and padding.
    probabilities: of 1, 2, ... words.

  Returns:
    [L] bool, True where units start.
  """
  size = word_start.shape[0]
  word = jnp.cumsum(word_start) - 1  # [L], the word of each position
  indices = jnp.arange(size)
  is_special = jnp.zeros(size, bool).at[word].max(special)  # by word, like all below
  drawn = jax.random.uniform(key, (size,))
  words = 1 + jnp.searchsorted(jnp.asarray(np.cumsum(probabilities)[:-1], jnp.float32), drawn,
                               side='right')
  # The next special word behind each word: the smallest index of one, looking from the right.
  behind = jax.lax.cummin(jnp.where(is_special, indices, size), reverse=True)
  behind = jnp.append(behind[1:], size)
  jump = jnp.where(is_special, indices + 1, jnp.minimum(indices + words, behind))
  jump = jnp.append(jnp.minimum(jump, size), size)  # [L + 1], the end jumps to itself
  # Marks the words that a walk from the first one visits, in log2(L) rounds of doubled jumps.
  visited = jnp.zeros(size + 1, bool).at[0].set(True)
  for _ in range(size.bit_length()):
    visited = visited.at[jump].max(visited)
    jump = jump[jump]
  return word_start & visited[word]
