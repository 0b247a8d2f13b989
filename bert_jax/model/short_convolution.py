"""A short convolution over the neighbours of each token.

Canon layers (Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351) have one in
front of attention and one in front of the feed-forward. A small model learns from neighbours long
before its attention finds them.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp


class ShortConvolution(nn.Module):
  """x[t] + sum over i of taps[i] * x[t + i], for the |i| <= reach that lie in the text of t.

  The taps start at zero, so that a fresh layer changes nothing.
  """

  reach: int  # tokens to either side; 0 = no convolution, and no parameters

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array) -> jax.Array:
    """[B, L, D] and [B, L] int32, the number of the text of each token, -> [B, L, D]."""
    if not self.reach:
      return x
    zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, 'norm'))
    taps = self.param('taps', zeros, (2 * self.reach + 1, x.shape[-1])).astype(x.dtype)
    length = x.shape[1]
    around = ((0, 0), (self.reach, self.reach))
    wide, of_text = jnp.pad(x, (*around, (0, 0))), jnp.pad(pair_index, around)
    y = x
    for i, tap in enumerate(taps):
      is_same = of_text[:, i:i + length] == pair_index  # [B, L]
      y += jnp.where(is_same[:, :, None], wide[:, i:i + length], 0) * tap
    return y
