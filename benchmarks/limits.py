"""The limits of a machine: the speed of large matrix products and large copies."""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp

_RUNS = 3


def _best_seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
  """Returns the shortest time of `function`; each call gets the previous result."""
  x = function(x).block_until_ready()
  times = []
  for _ in range(_RUNS):
    began = time.perf_counter()
    x = function(x).block_until_ready()
    times.append(time.perf_counter() - began)
  return min(times)


def multiply_flops(n: int, dtype: str) -> float:
  """Returns the FLOP/s of a product of two [n, n] matrices."""
  x = jnp.full((n, n), 1 / n, dtype)
  return 2 * n**3 / _best_seconds(jax.jit(lambda x: x @ x), x)


# Reads and writes every word in place, because new memory would cost page faults on a
# CPU. The words are wide: on a GPU, adding single bytes takes longer than moving them.
copy = jax.jit(lambda x: x + 1, donate_argnums=0)


def copy_bandwidth(size: int) -> float:
  """Returns the bytes/s that a copy of `size` bytes reads and writes."""
  return 2 * size / _best_seconds(copy, jnp.zeros(size // 4, jnp.float32))
