"""Masking units of several tokens: whole words, n-grams and spans of words.

Whole words and n-grams are drawn from the whole row, because a long word does not fit the
budget of a short pair. Every unit has the same probability, whatever its length. Units
that are longer than the budget of the row are cut first.
"""

import jax
import jax.numpy as jnp
import numpy as np


def join_words(key: jax.Array, word_start: jax.Array, special: jax.Array,
               probabilities: np.ndarray) -> jax.Array:
  """Joins words into units of random length that never cross a special token.

  Between two special tokens the lengths of the units are independent draws. The next
  special token cuts off the last unit.

  Args:
    key: the key of the row.
    word_start: [L] bool, True where a word starts, on special tokens, on padding and on
      the token after each of these.
    special: [L] bool, True on special tokens and padding.
    probabilities: [n] float64, the probabilities of 1, 2, ... n words in a unit.

  Returns:
    [L] bool, True where units start.
  """
  size = word_start.shape[0]
  word = jnp.cumsum(word_start) - 1  # [L], the word of each position
  indices = jnp.arange(size)
  # From here on the arrays are indexed by word. A row has at most L words, so [L] is
  # enough.
  is_special = jnp.zeros(size, bool).at[word].max(special)
  drawn = jax.random.uniform(key, (size,))
  # Without the last boundary, 1: rounded to float32, it could be below a drawn number.
  words = 1 + jnp.searchsorted(
      jnp.asarray(np.cumsum(probabilities)[:-1], jnp.float32), drawn, side='right')
  # The index of the next special word after each word: a running minimum from the right.
  behind = jax.lax.cummin(jnp.where(is_special, indices, size), reverse=True)
  behind = jnp.append(behind[1:], size)
  jump = jnp.where(is_special, indices + 1, jnp.minimum(indices + words, behind))
  jump = jnp.append(jnp.minimum(jump, size), size)  # [L + 1], the end jumps to itself
  # Units start at the words that a walk from the first word visits. Doubling the jumps
  # finds them in log2(L) rounds, where a loop over words would be sequential.
  visited = jnp.zeros(size + 1, bool).at[0].set(True)
  for _ in range(size.bit_length()):
    visited = visited.at[jump].max(visited)
    jump = jump[jump]
  return word_start & visited[word]


def cut_long(unit_start: jax.Array, word_start: jax.Array,
             longest: jax.Array) -> jax.Array:
  """Cuts units of more than `longest` tokens.

  Such a unit becomes its words. A word of more than `longest` tokens becomes parts of
  equal length.

  Args:
    unit_start, word_start: [L] bool, see `join_words`.
    longest: int32 scalar, at least 1.

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


def draw_whole(key: jax.Array, start: jax.Array, size: jax.Array, n: jax.Array,
               budget: jax.Array, most: int) -> jax.Array:
  """Draws whole units from n tokens in shuffled units; each unit is equally likely.

  The tokens form a circle. A window of `budget` tokens begins at a random token. Units
  that start in it are drawn: each has probability budget / n, whatever its size. Units
  that exceed the `most` predictions are left out.

  Args:
    key: the key of the row.
    start, size: [L] int32, the start and the size, in tokens, of the unit of each token.
    n: int32 scalar, the ordinary tokens of the row.
    budget: int32 scalar, the tokens to draw on average.
    most: M, upper bound on the drawn tokens.

  Returns:
    [L] bool, True on drawn tokens.
  """
  n = jnp.maximum(n, 1)
  # The start of each token's unit, counted from the start of the window.
  begin = (start - jax.random.randint(key, (), 0, n)) % n
  drawn = begin < budget
  # A unit that starts before the window may cover its first tokens: they are not drawn,
  # so predictions count from the first unit that starts inside.
  first = jnp.min(jnp.where(drawn, begin, budget))
  return drawn & (begin - first + size <= most)
