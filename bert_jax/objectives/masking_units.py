"""Masking units of several tokens: whole words, n-grams and spans of words.

Whole words and n-grams are drawn from the whole row, because the budget of a short pair has no room
for a long word. Every unit has the same probability, whatever its length. Units that are too long
for the row's budget are cut first.
"""

import jax
import jax.numpy as jnp
import numpy as np


def join_words(key: jax.Array, word_start: jax.Array, special: jax.Array,
               probabilities: np.ndarray) -> jax.Array:
  """Joins runs of words of random length to units, which never reach across a special token.

  Between two special tokens the lengths of the units are independent draws; the last one is cut off
  at the next special token.

  Args:
    key: the key of the row.
    word_start: [L] bool, True also on special tokens, on padding and on the tokens after them.
    special: [L] bool, special tokens and padding.
    probabilities: the probability of 1, 2, ... words.

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


def cut_long(unit_start: jax.Array, word_start: jax.Array, longest: jax.Array) -> jax.Array:
  """Cuts units of more than `longest` tokens into their words, and longer words into equal parts.

  Args:
    unit_start, word_start: [L] bool, as in `join_words`.
    longest: tokens, at least 1.

  Returns:
    [L] bool, True where units start.
  """
  position = jnp.arange(unit_start.shape[0])

  def sizes(start):
    unit = jnp.cumsum(start) - 1
    return jnp.zeros_like(position).at[unit].add(1)[unit]

  start = unit_start | (word_start & (sizes(unit_start) > longest))
  size = sizes(start)
  parts = -(-size // longest)
  offset = position - jax.lax.cummax(jnp.where(start, position, 0))
  return start | (offset % -(-size // parts) == 0)


def draw_whole(key: jax.Array, start: jax.Array, size: jax.Array, n: jax.Array, budget: jax.Array,
               most: int) -> jax.Array:
  """Draws whole units from n tokens, whose units are in random order: [L] bool, the drawn tokens.

  The tokens form a circle, and a window of `budget` tokens begins at a random one. The units that
  start in it are drawn: each with probability budget / n, whatever its size. Units for which the
  `most` predictions have no room are left out.

  Args:
    key: the key of the row.
    start, size: [L] int32, start and size in tokens of each token's unit.
    n, budget, most: numbers of tokens.
  """
  n = jnp.maximum(n, 1)
  begin = (start - jax.random.randint(key, (), 0, n)) % n  # start of the unit in the window
  drawn = begin < budget
  first = jnp.min(jnp.where(drawn, begin, budget))  # before it a unit from outside may reach in
  return drawn & (begin - first + size <= most)
