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

from bert_jax.model.attention import MASKED
from bert_jax.model.kernels import LANES


class _Shape(NamedTuple):
  """What a kernel is made for."""

  heads: int  # H of this chip
  width: int  # K
  rate: float  # share of the weights that is dropped
  interpret: bool

  @property
  def per_block(self) -> int:
    """Heads; they fill it."""
    return LANES // self.width

  @property
  def blocks(self) -> int:
    """Of the heads."""
    return self.heads // self.per_block


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


class _Head(NamedTuple):
  """What a core computes for one head of one row."""

  query: jax.Array  # [L, K], scaled
  key: jax.Array  # [L, K]
  value: jax.Array  # [L, K]
  weights: jax.Array  # [L, L] float32, of the softmax
  dropped: jax.Array  # the same after dropout, in the dtype of the input
  keep: jax.Array | None  # what dropout keeps; None = all


def _dot(a, b, axes) -> jax.Array:
  """The product over an axis of each, in float32."""
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                             preferred_element_type=jnp.float32)


def _head(shape: _Shape, i: int, qkv, column, line, random, rows, heads) -> _Head:
  """Head number `i` of the block that the kernel is at."""
  query, key, value = (qkv[0, :, (3 * i + j) * shape.width:(3 * i + j + 1) * shape.width]
                       for j in range(3))
  query = query / jnp.sqrt(shape.width).astype(query.dtype)
  scores = _dot(query, key, (1, 1))
  scores += jnp.where((column[0] == line[0]) & (line[0] > 0), 0.0, MASKED)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = e / e.sum(-1, keepdims=True)
  dropped, keep = weights.astype(query.dtype), None
  if shape.rate:
    row = rows[pl.program_id(0)]
    head = heads[pl.program_id(1) * shape.per_block + i]
    keep = kept((random[0], random[1]), row, head, query.shape[0], shape.rate)
    dropped = jnp.where(keep, dropped / (1 - shape.rate), 0).astype(query.dtype)
  return _Head(query, key, value, weights, dropped, keep)


def _forward_kernel(shape, qkv, *others):
  """One block of heads of one row."""
  *others, out = others
  for i in range(shape.per_block):
    head = _head(shape, i, qkv, *others)
    at = slice(i * shape.width, (i + 1) * shape.width)
    out[0, :, at] = _dot(head.dropped, head.value, (1, 0)).astype(out.dtype)


def _backward_kernel(shape, qkv, *others):
  """The same for the gradients of query, key and value."""
  *others, gradient, out = others
  for i in range(shape.per_block):
    head = _head(shape, i, qkv, *others)
    g = gradient[0, :, i * shape.width:(i + 1) * shape.width]
    d_weights = _dot(g, head.value, (1, 1))
    if head.keep is not None:
      d_weights = jnp.where(head.keep, d_weights / (1 - shape.rate), 0)
    d_scores = head.weights * (d_weights - (head.weights * d_weights).sum(-1, keepdims=True))
    d_scores = d_scores.astype(g.dtype)
    found = (_dot(d_scores, head.key, (1, 0)) / np.float32(np.sqrt(shape.width)),
             _dot(d_scores, head.query, (0, 0)), _dot(head.dropped, g, (0, 0)))
    for j, x in enumerate(found):
      out[0, :, (3 * i + j) * shape.width:(3 * i + j + 1) * shape.width] = x.astype(out.dtype)


def _block(length: int, width: int) -> pl.BlockSpec:
  """Of an array [B, L, ...]: a row, and a block of its heads."""
  return pl.BlockSpec((1, length, width), lambda row, block: (row, 0, block))


def _call(kernel, shape: _Shape, width: int, products: int, qkv, pair_index, random, rows, heads,
          *more) -> jax.Array:
  """Runs a kernel that gives `width` for each block, with so many products of each head."""
  batch, length, size = qkv.shape
  weights = batch * shape.heads * length * length
  moved = (size + sum(x.shape[2] for x in more) + shape.blocks * width) * batch * length
  numbers = pl.BlockSpec(memory_space=pltpu.SMEM)
  return pl.pallas_call(
      functools.partial(kernel, shape), grid=(batch, shape.blocks),
      in_specs=[_block(length, 3 * LANES),
                pl.BlockSpec((1, length, 1), lambda row, _: (row, 0, 0)),
                pl.BlockSpec((1, 1, length), lambda row, _: (row, 0, 0)),
                numbers, numbers, numbers, *(_block(length, LANES) for _ in more)],
      out_specs=_block(length, width),
      out_shape=jax.ShapeDtypeStruct((batch, length, shape.blocks * width), qkv.dtype),
      cost_estimate=pl.CostEstimate(flops=2 * products * weights * shape.width,
                                    transcendentals=weights,
                                    bytes_accessed=moved * qkv.dtype.itemsize),
      interpret=shape.interpret, name=kernel.__name__.strip('_').replace('kernel', 'attention'),
  )(qkv, pair_index[:, :, None], pair_index[:, None, :], random, rows, heads, *more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: _Shape, *arguments) -> jax.Array:
  return _call(_forward_kernel, shape, LANES, 2, *arguments)


def _attend_forward(shape, *arguments):
  return _attend(shape, *arguments), arguments


def _attend_backward(shape, arguments, gradient):
  return (_call(_backward_kernel, shape, 3 * LANES, 5, *arguments, gradient), *[None] * 4)


_attend.defvjp(_attend_forward, _attend_backward)


def attend(qkv: jax.Array, pair_index: jax.Array, random: jax.Array, rows: jax.Array,
           heads: jax.Array, *, width: int, rate: float, interpret: bool) -> jax.Array:
  """Attention of the rows and heads of one chip.

  Args:
    qkv: [B, L, H * 3 * K], query, key and value of each head side by side.
    pair_index: [B, L] int32; a token attends to those of its own number, 0 is padding.
    random: [2] uint32, a threefry key.
    rows, heads: [B] and [H] uint32, their numbers over all chips.
    width: K.
    rate: share of the weights that is dropped.
    interpret: whether to run it off a TPU: slow, for tests.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  return _attend(_Shape(heads.size, width, rate, interpret), qkv, pair_index, random, rows, heads)
