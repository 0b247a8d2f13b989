"""Attention in one TPU kernel, with dropout: the [L, L] weights never leave the core.

The weights of a short row fit into the memory of a core (VMEM). The kernel computes them
there from query and key, applies dropout, multiplies them with the values and discards
them. The backward pass recomputes the weights and the dropout mask. Only query, key,
value and the result cross the chip's memory (HBM), as in flash attention (Dao et al.
2022, https://arxiv.org/abs/2205.14135), but without its blocks of keys. A loop takes 128
queries at a time, because an unrolled loop compiles slowly.
"""

import functools
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from bert_jax.model import dropout_bits
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import MASKED
from bert_jax.parallel import sharding

LANES = 128  # width of a TPU's registers
_LONGEST = 512  # the longest row: several [L, L] arrays must fit into VMEM
_QUERIES = 128  # queries that a core takes at a time
_ROWS = ('batch', 'seq')
_HEADS = ('batch', 'seq', 'heads')


class _Shape(NamedTuple):
  """Static arguments of the kernels."""

  heads: int  # H of this chip
  width: int  # K
  rate: float  # share of dropped weights
  interpret: bool  # True = run the kernel in Pallas' interpreter, off TPU

  @property
  def heads_per_block(self) -> int:
    return LANES // self.width

  @property
  def blocks(self) -> int:
    return self.heads // self.heads_per_block


def keep_mask(key: jax.Array, row: jax.Array, head: jax.Array, part: jax.Array,
              length: int, rate: float) -> jax.Array:
  """Draws the weights that dropout keeps, for 128 queries of a head: [128, L] bool.

  `part` is the index of this block of queries in the row. For the other arguments, see
  `dropout_bits.keeps_weight`.
  """
  query = part * _QUERIES + jax.lax.broadcasted_iota(jnp.int32, (_QUERIES, 1), 0)
  key_index = jax.lax.broadcasted_iota(jnp.int32, (1, length), 1)
  return dropout_bits.keeps_weight(key, row, head, query, key_index, rate)


class _Part(NamedTuple):
  """Intermediate values for 128 queries of one head of one row."""

  query: jax.Array  # [128, K], scaled
  key: jax.Array  # [L, K]
  value: jax.Array  # [L, K]
  weights: jax.Array  # [128, L] float32, of the softmax
  dropped: jax.Array  # [128, L] after dropout, in the dtype of the input
  keep: jax.Array | None  # [128, L] bool, the weights that dropout keeps; None = all


def _dot(a, b, axes) -> jax.Array:
  """The product of two matrices over one axis of each, in float32."""
  return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())),
                             preferred_element_type=jnp.float32)


def _queries(index: jax.Array) -> pl.Slice:
  """The positions of the `index`-th part in its row."""
  return pl.ds(pl.multiple_of(index * _QUERIES, _QUERIES), _QUERIES)


def _columns(shape: _Shape, i: int, j: int) -> slice:
  """The columns of query (j = 0), key (1) or value (2) of the `i`-th head in a block."""
  return slice((3 * i + j) * shape.width, (3 * i + j + 1) * shape.width)


def _seed(shape: _Shape, i: int, random, rows, heads) -> tuple:
  """The first arguments of `keep_mask` for the `i`-th head of the current block."""
  # Computed outside the loop over queries, because a loop cannot read program ids.
  head = heads[pl.program_id(1) * shape.heads_per_block + i]
  return (random[0], random[1]), rows[pl.program_id(0)], head


def _part(shape: _Shape, i: int, index: jax.Array, seed, qkv, query_ids,
          key_ids) -> _Part:
  """Computes the `index`-th part of the `i`-th head of the current block."""
  query = qkv[0, _queries(index), _columns(shape, i, 0)]
  key, value = (qkv[0, :, _columns(shape, i, j)] for j in (1, 2))
  query = query / jnp.sqrt(shape.width).astype(query.dtype)
  scores = _dot(query, key, (1, 1))
  visible = (query_ids[0, _queries(index)] == key_ids[0]) & (key_ids[0] > 0)
  scores += jnp.where(visible, 0.0, MASKED)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  weights = e / e.sum(-1, keepdims=True)
  dropped, keep = weights.astype(query.dtype), None
  if shape.rate:
    keep = keep_mask(*seed, index, key.shape[0], shape.rate)
    dropped = jnp.where(keep, dropped / (1 - shape.rate), 0).astype(query.dtype)
  return _Part(query, key, value, weights, dropped, keep)


def _forward_kernel(shape, qkv, query_ids, key_ids, random, rows, heads, out):
  """Attention of one block of heads of one row."""
  for i in range(shape.heads_per_block):
    at = slice(i * shape.width, (i + 1) * shape.width)
    seed = _seed(shape, i, random, rows, heads)

    def write(index, _, i=i, at=at, seed=seed):
      part = _part(shape, i, index, seed, qkv, query_ids, key_ids)
      result = _dot(part.dropped, part.value, (1, 0))
      out[0, _queries(index), at] = result.astype(out.dtype)

    jax.lax.fori_loop(0, qkv.shape[1] // _QUERIES, write, None)


def _backward_kernel(shape, qkv, query_ids, key_ids, random, rows, heads, gradient, out):
  """Gradients of query, key and value of one block of heads of one row."""
  for i in range(shape.heads_per_block):
    at = slice(i * shape.width, (i + 1) * shape.width)
    seed = _seed(shape, i, random, rows, heads)

    def write(index, total, i=i, at=at, seed=seed):
      # Recomputes the weights, because the forward pass kept none.
      part = _part(shape, i, index, seed, qkv, query_ids, key_ids)
      g = gradient[0, _queries(index), at]
      d_weights = _dot(g, part.value, (1, 1))
      if part.keep is not None:
        d_weights = jnp.where(part.keep, d_weights / (1 - shape.rate), 0)
      mean = (part.weights * d_weights).sum(-1, keepdims=True)
      d_scores = (part.weights * (d_weights - mean)).astype(g.dtype)
      d_query = _dot(d_scores, part.key, (1, 0)) / np.float32(np.sqrt(shape.width))
      out[0, _queries(index), _columns(shape, i, 0)] = d_query.astype(out.dtype)
      return (total[0] + _dot(d_scores, part.query, (0, 0)),
              total[1] + _dot(part.dropped, g, (0, 0)))

    # All queries add to the gradients of every key and value, so the loop carries them.
    zero = jnp.zeros((qkv.shape[1], shape.width), jnp.float32)
    d_key_and_value = jax.lax.fori_loop(
        0, qkv.shape[1] // _QUERIES, write, (zero, zero))
    for j, x in enumerate(d_key_and_value, 1):
      out[0, :, _columns(shape, i, j)] = x.astype(out.dtype)


def _by_block(row: int, block: int) -> tuple[int, int, int]:
  return row, 0, block  # a row of [B, L, ...] and a block of heads


def _by_row(row: int, _: int) -> tuple[int, int, int]:
  return row, 0, 0


def _call(kernel, shape: _Shape, width: int, products: int, qkv, text_ids, random,
          rows, heads, *gradient) -> jax.Array:
  """Runs a kernel.

  Each block writes `width` columns; each head computes `products` matrix products.
  """
  batch, length, size = qkv.shape
  weights = batch * shape.heads * length * length
  columns = size + sum(x.shape[2] for x in gradient) + shape.blocks * width
  # XLA cannot look into a kernel: without an estimate it counts the kernel as free.
  cost = pl.CostEstimate(flops=2 * products * weights * shape.width,
                         transcendentals=weights,
                         bytes_accessed=columns * batch * length * qkv.dtype.itemsize)
  scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
  return pl.pallas_call(
      functools.partial(kernel, shape), grid=(batch, shape.blocks),
      in_specs=[pl.BlockSpec((1, length, 3 * LANES), _by_block),
                pl.BlockSpec((1, length, 1), _by_row),
                pl.BlockSpec((1, 1, length), _by_row),
                scalars, scalars, scalars,
                *(pl.BlockSpec((1, length, LANES), _by_block) for _ in gradient)],
      out_specs=pl.BlockSpec((1, length, width), _by_block),
      out_shape=jax.ShapeDtypeStruct((batch, length, shape.blocks * width), qkv.dtype),
      cost_estimate=cost, interpret=shape.interpret,
      name=kernel.__name__.strip('_').replace('kernel', 'attention'),
  )(qkv, text_ids[:, :, None], text_ids[:, None, :], random, rows, heads, *gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: _Shape, *arguments) -> jax.Array:
  return _call(_forward_kernel, shape, LANES, 2, *arguments)


def _attend_forward(shape, *arguments):
  return _attend(shape, *arguments), arguments


def _attend_backward(shape, arguments, gradient):
  return (_call(_backward_kernel, shape, 3 * LANES, 5, *arguments, gradient), *[None] * 4)


_attend.defvjp(_attend_forward, _attend_backward)


def obstacle(config: BertConfig, length: int, heads: int) -> str:
  """Returns the reason why the kernel cannot be used; '' if it can.

  Args:
    config: of the model.
    length: L.
    heads: H of one chip.
  """
  if length > _LONGEST:
    return f'rows of {length} tokens are longer than {_LONGEST}'
  if length % LANES:
    return f'rows of {length} tokens are not a multiple of {LANES}'
  if LANES % config.head_size or heads * config.head_size % LANES:
    return f'{heads} heads of {config.head_size} do not fill blocks of {LANES}'
  return ''


def attend(qkv: jax.Array, text_ids: jax.Array, width: int, rate: float = 0.0,
           random: jax.Array | None = None) -> jax.Array:
  """Attention by the kernel, each chip on its rows and heads.

  Off TPU, Pallas interprets the kernel, which is slow: for tests only.

  Args:
    qkv: [B, L, H * 3 * K]; query, key and value of a head are adjacent.
    text_ids: [B, L] int32, 0 on padding. A token attends to tokens with the same id.
    width: K.
    rate: share of dropped weights.
    random: the key of the dropout, 2 words of data; None = no dropout.

  Returns:
    [B, L, H * K] in the dtype of `qkv`.
  """
  interpret = sharding.platform() != 'tpu'
  if random is None:
    rate = 0.0
  words = jnp.zeros(2, jnp.uint32) if random is None else jax.random.key_data(random)
  # Global indices, so that dropout does not depend on the mesh.
  rows = jnp.arange(qkv.shape[0], dtype=jnp.uint32)
  heads = jnp.arange(qkv.shape[2] // (3 * width), dtype=jnp.uint32)

  def local(qkv, text_ids, words, rows, heads):
    shape = _Shape(heads.size, width, rate, interpret)
    return _attend(shape, qkv, text_ids, words, rows, heads)

  inputs = (_HEADS, _ROWS, (None,), ('batch',), ('heads',))
  return sharding.on_each_chip(local, inputs, _HEADS)(
      qkv, text_ids, words, rows, heads)
