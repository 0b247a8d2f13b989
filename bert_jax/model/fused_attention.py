"""Attention in one TPU kernel, with dropout: the [L, L] weights of a row never leave the core.

The weights of a short row fit into a core's own memory. There they are computed from query and key,
dropped, used and forgotten; the backward pass computes them again, and what was dropped. What goes
to and comes from the chip's memory is query, key, value and the result, as in flash attention (Dao
et al. 2022, https://arxiv.org/abs/2205.14135), without its blocks.
"""

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp
import numpy as np

LANES = 128  # of a TPU's registers: a block is so wide, one head or several
_MASKED = -1e9


class _Shape(NamedTuple):
  """What a kernel is made for."""

  heads: int  # H of this chip
  width: int  # K
  rate: float  # share of the weights that is dropped
  interpret: bool

  @property
  def per_block(self) -> int:
    return LANES // self.width

  @property
  def blocks(self) -> int:
    """Of the heads."""
    return self.heads // self.per_block


def fits(heads: int, width: int) -> bool:
  """Whether `heads` heads of `width` on each chip fill whole blocks."""
  return LANES % width == 0 and heads * width % LANES == 0


def kept(key: jax.Array, row: jax.Array, head: jax.Array, length: int, rate: float) -> jax.Array:
  """Which weights dropout keeps: [L, L] bool of one head in one row.

  They follow from the key and the row's place in the batch, so that every mesh drops the same.

  Args:
    key: [2] uint32, a threefry key.
    row, head: uint32, counted over all chips.
    length: L.
    rate: share that is dropped.
  """
  half = (length // 2, length)  # two words come of each count
  position = (jax.lax.broadcasted_iota(jnp.uint32, half, 0) * np.uint32(length)
              + jax.lax.broadcasted_iota(jnp.uint32, half, 1))
  where = jnp.full(half, row * np.uint32(1 << 16) + head)
  words = threefry2x32_p.bind(jnp.full(half, key[0]), jnp.full(half, key[1]), where, position)
  # 24 bits, because a TPU compares signed words only.
  drawn = (jnp.concatenate(words) >> np.uint32(8)).astype(jnp.int32)
  return drawn < np.int32((1 - rate) * 2**24)


def _weights(shape: _Shape, query, key, column, line, random, row, head):
  """(softmax [L, L] float32, the same after dropout in the dtype of the input, what was kept)."""
  scaled = query / jnp.sqrt(shape.width).astype(query.dtype)
  scores = _dot(scaled, key, (1, 1))
  scores += jnp.where((column == line) & (line > 0), 0.0, _MASKED)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = e / e.sum(-1, keepdims=True)
  if not shape.rate:
    return weights, weights.astype(query.dtype), None, scaled
  keep = kept((random[0], random[1]), row, head, query.shape[0], shape.rate)
  dropped = jnp.where(keep, weights.astype(query.dtype) / (1 - shape.rate), 0)
  return weights, dropped.astype(query.dtype), keep, scaled


def _dot(a, b, axes) -> jax.Array:
  """The product over an axis of each, in float32."""
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                             preferred_element_type=jnp.float32)


def _forward_kernel(shape, random, rows, heads, query, key, value, column, line, out):
  """One block of heads of one row."""
  b, block = (pl.program_id(axis) for axis in range(2))
  for i in range(shape.per_block):
    at = slice(i * shape.width, (i + 1) * shape.width)
    _, dropped, *_ = _weights(shape, query[0, :, at], key[0, :, at], column[0], line[0], random,
                              rows[b], heads[block * shape.per_block + i])
    out[0, :, at] = _dot(dropped, value[0, :, at], (1, 0)).astype(out.dtype)


def _backward_kernel(shape, random, rows, heads, query, key, value, column, line, gradient, out,
                     found):
  """The same for the gradients of query, key and value, written in three turns."""
  b, block, turn = (pl.program_id(axis) for axis in range(3))

  @pl.when(turn == 0)
  def _():
    for i in range(shape.per_block):
      at = slice(i * shape.width, (i + 1) * shape.width)
      weights, dropped, keep, scaled = _weights(
          shape, query[0, :, at], key[0, :, at], column[0], line[0], random, rows[b],
          heads[block * shape.per_block + i])
      g = gradient[0, :, at]
      found[2, :, at] = _dot(dropped, g, (0, 0)).astype(found.dtype)
      d_weights = _dot(g, value[0, :, at], (1, 1))
      if keep is not None:
        d_weights = jnp.where(keep, d_weights / (1 - shape.rate), 0)
      d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
      d_scores = d_scores.astype(scaled.dtype)
      d_query = _dot(d_scores, key[0, :, at], (1, 0)) / np.sqrt(shape.width).astype(np.float32)
      found[0, :, at] = d_query.astype(found.dtype)
      found[1, :, at] = _dot(d_scores, scaled, (0, 0)).astype(found.dtype)

  out[0] = found[turn]


def _operands(shape: _Shape, length: int):
  """How the arguments of both kernels are cut: numbers whole, the rest a row and a block of it."""
  def part(which):
    return pl.BlockSpec((1, length, LANES), lambda b, h, *_: (b, 0, which * shape.blocks + h))
  numbers = pl.BlockSpec(memory_space=pltpu.SMEM)
  return [numbers, numbers, numbers, part(0), part(1), part(2),
          pl.BlockSpec((1, length, 1), lambda b, *_: (b, 0, 0)),
          pl.BlockSpec((1, 1, length), lambda b, *_: (b, 0, 0))]


def _cost(shape: _Shape, qkv: jax.Array, products: int, arrays: int) -> pl.CostEstimate:
  """Of a kernel with so many [L, L, K] products that moves so many [B, L, H * K]."""
  rows, length, _ = qkv.shape
  weights = rows * shape.heads * length * length
  return pl.CostEstimate(flops=2 * products * weights * shape.width, transcendentals=weights,
                         bytes_accessed=arrays * qkv.size // 3 * qkv.dtype.itemsize)


def _arguments(qkv, pair_index, random, rows, heads):
  return (random, rows, heads, qkv, qkv, qkv, pair_index[:, :, None], pair_index[:, None, :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: _Shape, qkv, pair_index, random, rows, heads):
  """[B, L, 3 * H * K], [B, L], [2], [B], [H] -> [B, L, H * K]."""
  batch, length, _ = qkv.shape
  return pl.pallas_call(
      functools.partial(_forward_kernel, shape), grid=(batch, shape.blocks),
      in_specs=_operands(shape, length),
      out_specs=pl.BlockSpec((1, length, LANES), lambda b, h: (b, 0, h)),
      out_shape=jax.ShapeDtypeStruct((batch, length, shape.heads * shape.width), qkv.dtype),
      cost_estimate=_cost(shape, qkv, products=2, arrays=4), interpret=shape.interpret,
      name='fused_attention')(*_arguments(qkv, pair_index, random, rows, heads))


def _attend_forward(shape, *arguments):
  return _attend(shape, *arguments), arguments


def _attend_backward(shape, arguments, gradient):
  qkv = arguments[0]
  batch, length, _ = qkv.shape
  block = (1, length, LANES)
  found = pl.pallas_call(
      functools.partial(_backward_kernel, shape), grid=(batch, shape.blocks, 3),
      in_specs=[*_operands(shape, length), pl.BlockSpec(block, lambda b, h, _: (b, 0, h))],
      out_specs=pl.BlockSpec(block, lambda b, h, turn: (b, 0, turn * shape.blocks + h)),
      out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
      scratch_shapes=[pltpu.VMEM((3, length, LANES), qkv.dtype)],
      cost_estimate=_cost(shape, qkv, products=5, arrays=7), interpret=shape.interpret,
      name='fused_attention_backward')(*_arguments(*arguments), gradient)
  return found, None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def attend(qkv: jax.Array, pair_index: jax.Array, random: jax.Array, rows: jax.Array,
           heads: jax.Array, *, rate: float, interpret: bool) -> jax.Array:
  """Attention of the rows and heads of one chip.

  Args:
    qkv: [B, L, 3, H, K], queries, keys and values.
    pair_index: [B, L] int32; a token attends to those of its own number, 0 is padding.
    random: [2] uint32, a threefry key.
    rows, heads: [B] and [H] uint32, their numbers over all chips.
    rate: share of the weights that is dropped.
    interpret: whether to run it off a TPU: slow, for tests.

  Returns:
    [B, L, H, K] in the dtype of `qkv`.
  """
  batch, length, _, count, width = qkv.shape
  shape = _Shape(count, width, rate, interpret)
  out = _attend(shape, qkv.reshape(batch, length, -1), pair_index, random, rows, heads)
  return out.reshape(batch, length, count, width)
