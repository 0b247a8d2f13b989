"""gelu(x + bias) in two Triton kernels, forward and backward, for NVIDIA GPUs.

XLA needs twice as many instructions for each value: on an H200, instructions limit the
feed-forward of BERT-base, not memory.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from bert_jax.model import gpu_math
from bert_jax.parallel import sharding

_WARPS = 4
_COLUMNS = 256  # values of a vector that a warp takes, 8 in each thread
_TURNS = 32  # most groups of _WARPS vectors that one program takes
_AXES = ('batch', 'mlp')


class _Tile(NamedTuple):
  """The part of the vectors [N, F] that a program computes."""

  rows: int  # at a time
  turns: int
  interpret: bool  # True = run the kernels in Pallas' interpreter, off GPUs

  def visit(self, take, carry=()):
    """Calls take(rows, carry) for each group of vectors; returns the last carry."""
    def turn(i, carry):
      return take(pl.ds(i * self.rows, self.rows), carry)

    return jax.lax.fori_loop(0, self.turns, turn, carry)

  def sum(self, x, bias) -> jax.Array:
    """x + bias, [rows, columns] float32."""
    # Every warp reads the bias itself: an exchange between them would cost more.
    columns = jax.lax.broadcasted_iota(jnp.int32, (self.rows, _COLUMNS), 1)
    return x.astype(jnp.float32) + bias[columns].astype(jnp.float32)


def _forward_kernel(tile, x, bias, out):
  def take(rows, carry):
    value = tile.sum(x[rows, :], bias)
    out[rows, :] = (value * gpu_math.normal(value, tile.interpret)[1]).astype(out.dtype)
    return carry

  tile.visit(take)


def _backward_kernel(tile, x, bias, gradient, d_x, share):
  def take(rows, total):
    value = tile.sum(x[rows, :], bias)
    bell, below = gpu_math.normal(value, tile.interpret)
    slope = below + value * bell * (1 / math.sqrt(2 * math.pi))
    d_value = gradient[rows, :].astype(jnp.float32) * slope
    d_x[rows, :] = d_value.astype(d_x.dtype)
    return total + d_value

  share[...] = tile.visit(take, jnp.zeros((tile.rows, _COLUMNS), jnp.float32)).sum(0)


def _call(kernel, interpret: bool, results, x, bias, *arguments):
  """Runs a kernel on [N, F]; `results` has [N, F], and [programs, F] for partial sums."""
  count, width = x.shape
  tile = _tile(count, width, interpret)
  block = pl.BlockSpec((tile.rows * tile.turns, _COLUMNS), lambda i, j: (i, j))
  vector, share = (pl.BlockSpec((_COLUMNS,), lambda i, j: (j,)),
                   pl.BlockSpec((None, _COLUMNS), lambda i, j: (i, j)))
  size = sum(math.prod(y.shape) * y.dtype.itemsize
             for y in jax.tree.leaves((x, bias, arguments, results)))
  return pl.pallas_call(
      functools.partial(kernel, tile),
      grid=(count // (tile.rows * tile.turns), width // _COLUMNS),
      in_specs=[block, vector, *[block] * len(arguments)],
      out_specs=[block, share][:len(results)], out_shape=results, interpret=interpret,
      name=kernel.__name__.strip('_').replace('kernel', 'gelu'),
      # XLA cannot look into a kernel: without an estimate it counts the kernel as free.
      cost_estimate=pl.CostEstimate(flops=0, transcendentals=x.size, bytes_accessed=size),
      compiler_params=pltriton.CompilerParams(num_warps=tile.rows, num_stages=1),
  )(x, bias, *arguments)


def _tile(count: int, width: int, interpret: bool) -> _Tile:
  rows = math.gcd(count, _WARPS)
  groups = count // rows
  turns = gpu_math.turns(groups * width // _COLUMNS, _TURNS)
  return _Tile(rows, math.gcd(groups, turns), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gelu(interpret: bool, x: jax.Array, bias: jax.Array) -> jax.Array:
  return _forward(interpret, x, bias)[0]


def _forward(interpret, x, bias):
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  out, = _call(_forward_kernel, interpret, [like], x, bias)
  return out, (x, bias)


def _backward(interpret, saved, gradient):
  x, bias = saved
  tile = _tile(*x.shape, interpret)
  programs = len(x) // (tile.rows * tile.turns)
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  partial_sums = jax.ShapeDtypeStruct((programs, x.shape[1]), jnp.float32)
  d_x, d_bias = _call(
      _backward_kernel, interpret, [like, partial_sums], x, bias, gradient)
  return d_x, d_bias.sum(0).astype(bias.dtype)


_gelu.defvjp(_forward, _backward)


def can_run(width: int) -> bool:
  """True if the current trace can use the kernels for vectors of this width F."""
  return sharding.has_triton() and width % (_COLUMNS * sharding.num_shards('mlp')) == 0


def gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
  """(x + bias) * Phi(x + bias), computed in float32.

  Off GPUs, Pallas interprets the kernels, which is slow: for tests only.

  Args:
    x: [N, F].
    bias: [F].

  Returns:
    [N, F] in the dtype of x.
  """
  local = functools.partial(_gelu, not sharding.has_triton())
  return sharding.on_each_chip(local, (_AXES, _AXES[1:]), _AXES)(x, bias)
