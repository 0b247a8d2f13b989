"""Attention in one TPU kernel, with dropout: the [L, L] weights of a row never leave the core.

The weights of a short row fit into a core's own memory. There they are computed from query and key,
dropped, used and forgotten; the backward pass computes them again, and what was dropped. What goes
to and comes from the chip's memory is query, key, value and the result, as in flash attention (Dao
et al. 2022, https://arxiv.org/abs/2205.14135), without its blocks of keys. Queries are taken 128 at
a time, in a loop: the compiler takes as long as the code is long.
"""

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from bert_jax.model import dropout_bits
from bert_jax.model.attention import MASKED
from bert_jax.model.kernels import LANES

_QUERIES = 128  # that a core takes at a time


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


def kept(key: jax.Array, row: jax.Array, head: jax.Array, part: jax.Array, length: int,
         rate: float) -> jax.Array:
  """Which weights dropout keeps: [128, L] bool of some queries of one head in one row.

  They follow from the key and the row's place in the batch, so that every mesh drops the same.

  Args:
    key: [2] uint32, the data of a key.
    row, head: uint32, counted over all chips.
    part: int32, which 128 queries of the row.
    length: L.
    rate: share that is dropped.
  """
  weights = (_QUERIES, length)
  query = part * _QUERIES + jax.lax.broadcasted_iota(jnp.int32, weights, 0)
  inner = (query * length + jax.lax.broadcasted_iota(jnp.int32, weights, 1)).astype(jnp.uint32)
  outer = row * np.uint32(1 << 16) + head
  # 24 bits, because a TPU compares signed words only.
  drawn = (dropout_bits.words(key, outer, inner) >> np.uint32(8)).astype(jnp.int32)
  return drawn < np.int32((1 - rate) * 2**24)


class _Part(NamedTuple):
  """What a core computes for 128 queries of one head of one row."""

  query: jax.Array  # [128, K], scaled
  key: jax.Array  # [L, K]
  value: jax.Array  # [L, K]
  weights: jax.Array  # [128, L] float32, of the softmax
  dropped: jax.Array  # the same after dropout, in the dtype of the input
  keep: jax.Array | None  # what dropout keeps; None = all


def _dot(a, b, axes) -> jax.Array:
  """The product over an axis of each, in float32."""
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                             preferred_element_type=jnp.float32)


def _queries(part: jax.Array) -> pl.Slice:
  """Where the part is in a row."""
  return pl.ds(pl.multiple_of(part * _QUERIES, _QUERIES), _QUERIES)


def _third(shape: _Shape, i: int, j: int) -> slice:
  """Where query (j = 0), key or value of head number `i` is in a block."""
  return slice((3 * i + j) * shape.width, (3 * i + j + 1) * shape.width)


def _seed(shape: _Shape, i: int, random, rows, heads) -> tuple:
  """What dropout in head number `i` follows from: key, row and head. A loop cannot ask for it."""
  head = heads[pl.program_id(1) * shape.per_block + i]
  return (random[0], random[1]), rows[pl.program_id(0)], head


def _part(shape: _Shape, i: int, part: jax.Array, seed, qkv, column, line) -> _Part:
  """Part number `part` of head number `i` of the block that the kernel is at."""
  query = qkv[0, _queries(part), _third(shape, i, 0)]
  key, value = (qkv[0, :, _third(shape, i, j)] for j in (1, 2))
  query = query / jnp.sqrt(shape.width).astype(query.dtype)
  scores = _dot(query, key, (1, 1))
  scores += jnp.where((column[0, _queries(part)] == line[0]) & (line[0] > 0), 0.0, MASKED)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = e / e.sum(-1, keepdims=True)
  dropped, keep = weights.astype(query.dtype), None
  if shape.rate:
    keep = kept(*seed, part, key.shape[0], shape.rate)
    dropped = jnp.where(keep, dropped / (1 - shape.rate), 0).astype(query.dtype)
  return _Part(query, key, value, weights, dropped, keep)


def _forward_kernel(shape, qkv, column, line, random, rows, heads, out):
  """One block of heads of one row."""
  for i in range(shape.per_block):
    at = slice(i * shape.width, (i + 1) * shape.width)
    seed = _seed(shape, i, random, rows, heads)

    def write(number, _, i=i, at=at, seed=seed):
      part = _part(shape, i, number, seed, qkv, column, line)
      out[0, _queries(number), at] = _dot(part.dropped, part.value, (1, 0)).astype(out.dtype)

    jax.lax.fori_loop(0, qkv.shape[1] // _QUERIES, write, None)


def _backward_kernel(shape, qkv, column, line, random, rows, heads, gradient, out):
  """The same for the gradients of query, key and value."""
  for i in range(shape.per_block):
    at = slice(i * shape.width, (i + 1) * shape.width)
    seed = _seed(shape, i, random, rows, heads)

    def write(number, total, i=i, at=at, seed=seed):
      part = _part(shape, i, number, seed, qkv, column, line)
      g = gradient[0, _queries(number), at]
      d_weights = _dot(g, part.value, (1, 1))
      if part.keep is not None:
        d_weights = jnp.where(part.keep, d_weights / (1 - shape.rate), 0)
      d_scores = part.weights * (d_weights - (part.weights * d_weights).sum(-1, keepdims=True))
      d_scores = d_scores.astype(g.dtype)
      d_query = _dot(d_scores, part.key, (1, 0)) / np.float32(np.sqrt(shape.width))
      out[0, _queries(number), _third(shape, i, 0)] = d_query.astype(out.dtype)
      return (total[0] + _dot(d_scores, part.query, (0, 0)),
              total[1] + _dot(part.dropped, g, (0, 0)))

    zero = jnp.zeros((qkv.shape[1], shape.width), jnp.float32)
    found = jax.lax.fori_loop(0, qkv.shape[1] // _QUERIES, write, (zero, zero))
    for j, x in enumerate(found, 1):
      out[0, :, _third(shape, i, j)] = x.astype(out.dtype)


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
    random: [2] uint32, the data of a key.
    rows, heads: [B] and [H] uint32, their numbers over all chips.
    width: K.
    rate: share of the weights that is dropped.
    interpret: whether to run it off a TPU: slow, for tests.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  return _attend(_Shape(heads.size, width, rate, interpret), qkv, pair_index, random, rows, heads)
