"""A short convolution over the neighbours of each token.

Canon layers (Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351) have one in
front of attention and one in front of the feed-forward. A small model learns from neighbours long
before its attention finds them.
"""

from collections.abc import Iterator

from flax import linen as nn
import jax
import jax.numpy as jnp


def neighbours(x: jax.Array, text_ids: jax.Array, reach: int) -> Iterator[jax.Array]:
  """For each i from -reach to reach, x[t + i] of every token t; 0 if that is of another text.

  Args:
    x: [B, L, D].
    text_ids: [B, L] int32, the number of the text of each token.
    reach: tokens to either side.

  Yields:
    [B, L, D].
  """
  length = x.shape[1]
  around = ((0, 0), (reach, reach))
  wide, of_text = jnp.pad(x, (*around, (0, 0))), jnp.pad(text_ids, around)
  for i in range(2 * reach + 1):
    is_same = of_text[:, i:i + length] == text_ids  # [B, L]
    yield jnp.where(is_same[:, :, None], wide[:, i:i + length], 0)


class ShortConvolution(nn.Module):
  """x[t] + sum over i of taps[i] * x[t + i], for the |i| <= reach that lie in the text of t.

  The taps start at zero, so that a fresh layer changes nothing.
  """

  reach: int  # tokens to either side; 0 = no convolution, and no parameters

  @nn.compact
  def __call__(self, x: jax.Array, text_ids: jax.Array) -> jax.Array:
    """[B, L, D] and [B, L] int32, the number of the text of each token, -> [B, L, D]."""
    if not self.reach:
      return x
    zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, 'norm'))
    taps = self.param('taps', zeros, (2 * self.reach + 1, x.shape[-1])).astype(x.dtype)
    y = x
    for tap, neighbour in zip(taps, neighbours(x, text_ids, self.reach)):
      y += neighbour * tap
    return y
