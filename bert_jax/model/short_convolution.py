"""A short convolution over the neighbors of each token.

Canon layers (Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351)
have one before attention and one before the feed-forward. A small model learns from
neighbors long before its attention can find them.
"""

from collections.abc import Iterator

from flax import linen as nn
import jax
import jax.numpy as jnp


def neighbors(x: jax.Array, text_ids: jax.Array, reach: int) -> Iterator[jax.Array]:
  """Yields x shifted by each i from -reach to reach, with zeros outside the text.

  Args:
    x: [B, L, D].
    text_ids: [B, L] int32, the number of the text of each token.
    reach: tokens on either side.

  Yields:
    [B, L, D]: at each token t, x[t + i] if t + i is in the text of t, else 0.
  """
  length = x.shape[1]
  around = ((0, 0), (reach, reach))
  wide, wide_ids = jnp.pad(x, (*around, (0, 0))), jnp.pad(text_ids, around)
  for i in range(2 * reach + 1):
    is_same = wide_ids[:, i:i + length] == text_ids  # [B, L]
    yield jnp.where(is_same[:, :, None], wide[:, i:i + length], 0)


class ShortConvolution(nn.Module):
  """x[t] + sum over i of taps[i] * x[t + i], for |i| <= reach within the text of t."""

  reach: int  # tokens on either side; 0 = no convolution, and no parameters

  @nn.compact
  def __call__(self, x: jax.Array, text_ids: jax.Array) -> jax.Array:
    """[B, L, D] and [B, L] int32, the number of the text of each token, -> [B, L, D]."""
    if not self.reach:
      return x
    # With zeros, a fresh layer changes nothing.
    zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, 'norm'))
    taps = self.param('taps', zeros, (2 * self.reach + 1, x.shape[-1])).astype(x.dtype)
    y = x
    for tap, neighbor in zip(taps, neighbors(x, text_ids, self.reach)):
      y += neighbor * tap
    return y
