"""A short convolution over the neighbors of each token.

Canon layers (Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351)
have one before attention and one before the feed-forward. A small model learns from
neighbors long before its attention can find them.
"""

from collections.abc import Iterator

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.attention import Mask


def neighbors(x: jax.Array, mask: Mask, reach: int) -> Iterator[jax.Array]:
  """Yields x shifted by each i from -reach to reach, with zeros outside the text.

  Hidden neighbors are zero too, and so are later neighbors in a causal row.

  Args:
    x: [B, L, D].
    mask: its `text_ids`, `visible_ids` and `causal`.
    reach: tokens on either side.

  Yields:
    [B, L, D]: at each token t, x[t + i] if t + i is in the text of t, else 0.
  """
  length = x.shape[1]
  around = ((0, 0), (reach, reach))
  wide, wide_ids = jnp.pad(x, (*around, (0, 0))), jnp.pad(mask.visible_ids, around)
  for i in range(2 * reach + 1):
    # A hidden token still sees itself.
    is_visible = (i == reach) | (wide_ids[:, i:i + length] == mask.text_ids)  # [B, L]
    if mask.causal is not None and i > reach:
      is_visible &= ~mask.causal[:, None]
    yield jnp.where(is_visible[:, :, None], wide[:, i:i + length], 0)


class ShortConvolution(nn.Module):
  """x[t] + sum over i of taps[i] * x[t + i], for |i| <= reach within the text of t."""

  reach: int  # tokens on either side; 0 = no convolution, and no parameters

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask) -> jax.Array:
    """[B, L, D] and the mask -> [B, L, D]."""
    if not self.reach:
      return x
    # With zeros, a fresh layer changes nothing.
    zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, 'norm'))
    taps = self.param('taps', zeros, (2 * self.reach + 1, x.shape[-1])).astype(x.dtype)
    # One copy for each row: one kernel then sums the gradients of all taps over the rows,
    # instead of one kernel for each tap.
    taps = jnp.broadcast_to(taps[:, None, None], (len(taps), x.shape[0], 1, x.shape[-1]))
    y = x
    for tap, neighbor in zip(taps, neighbors(x, mask, self.reach)):
      y += neighbor * tap
    return y
