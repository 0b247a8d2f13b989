"""Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import jax
import jax.numpy as jnp
import numpy as np


def rotary(positions: jax.Array, width: int, theta: float) -> jax.Array:
  """Computes cos and sin of the angles by which queries and keys are rotated.

  Args:
    positions: [B, L] int32.
    width: K.
    theta: base of the angles.

  Returns:
    [2, B, L, 1, K / 2] float32.
  """
  frequencies = 1.0 / theta ** (np.arange(0, width, 2) / width)
  angles = positions[:, :, None, None] * frequencies.astype(np.float32)  # [B, L, 1, K / 2]
  return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates (x[i], x[i + K / 2]) by the i-th angle, in float32; x is [B, L, H, K]."""
  cos, sin = angles
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
