"""The bodies of the kernels of `gpu_attention`: what one program computes.

A program has one row and one head. Its references are to that row and head, so that
query, key, value and gradient are [L, K].

Rotary positions rotate pairs of entries, one of each half of a vector. A program cannot
split an array, so it loads rotated vectors as two halves, and every product with them is
the sum of the products of the halves. All other vectors are one part.
"""

import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp
import numpy as np

from bert_jax.model import dropout_bits, gpu_math
from bert_jax.model.layers import MASKED

LEAST = 16  # tokens in a block: the fewest that a product of Triton takes
_LOG2_E = math.log2(math.e)


class Shape(NamedTuple):
  """Static arguments of the kernels."""

  length: int  # L
  width: int  # K
  rate: float  # share of dropped weights
  reach: int | None  # visible tokens on either side; None = the whole text
  interpret: bool  # True = run the kernel in Pallas' interpreter, off GPUs

  def block(self, most: int) -> int:
    """The tokens in a block: a power of two, at most `most`."""
    return min(most, max(LEAST, pl.next_power_of_2(self.length)))

  def visited(self, start: jax.Array, size: int, block: int) -> tuple:
    """Range of key blocks that queries in [start, start + size) see, or vice versa."""
    count = pl.cdiv(self.length, block)
    if self.reach is None:
      return 0, count
    first = jnp.maximum(start - self.reach, 0) // block
    last = jnp.minimum(start + size - 1 + self.reach, self.length - 1) // block
    return first, jnp.minimum(last + 1, count)


class Inputs(NamedTuple):
  """Arrays, or a program's references to its row and head."""

  qkv: Any  # [B, L, H, 3, K]; in a kernel query, key and value, each [L, K]
  # [2, B, L, 1, K / 2]; in a kernel cos and sin, each [L, K / 2]; None = no rotation
  angles: Any
  bias: Any  # [H, 3, K], to be added; in a kernel [3, K]; None = zeros
  text_ids: Any  # [B, L] int32; in a kernel [L]
  words: Any  # [2] uint32, of the dropout's key
  rows: Any  # [B] uint32, the indices of the rows, counted over all devices
  heads: Any  # [H] uint32, the indices of the heads, counted over all devices
  causal: Any = None  # [B] int32, not 0 in causal rows; None = no row is causal


class _Program(NamedTuple):
  """Values that a program reads once: the key of dropout, its row and its head."""

  words: tuple[jax.Array, jax.Array]
  row: jax.Array
  head: jax.Array
  is_causal: jax.Array | None  # bool


class _Tokens(NamedTuple):
  """A block of tokens of a row."""

  start: jax.Array  # the place of the first token in the row
  at: jax.Array  # [tokens] int32, the places in the row
  ids: jax.Array  # [tokens] int32, the text ids; -1 past the end of the row


def _load(ref, shape: Shape, start, size: int, columns=None, other=0) -> jax.Array:
  """`size` tokens of a reference [L, ...]; `other` past the end of the row.

  `columns` is a slice of the last axis; None = all of it.
  """
  index, width = (pl.ds(start, size),), ref.shape[1:]
  if width:
    index += (slice(None) if columns is None else columns,)
    width = width if columns is None else (columns.size,)
  if shape.length % size == 0:
    return ref[index]
  is_inside = start + jnp.arange(size) < shape.length
  mask = jnp.broadcast_to(is_inside[:, None], (size, *width)) if width else is_inside
  return pltriton.load(ref.at[index], mask=mask, other=other)


def _store(ref, shape: Shape, start, x: jax.Array, *index):
  """Stores tokens into `ref[:, *index]`; drops tokens past the end of the row."""
  index = index or [slice(None)] * (x.ndim - 1)
  index = (pl.ds(start, x.shape[0]), *index)
  x = x.astype(ref.dtype)
  if shape.length % x.shape[0] == 0:
    ref[index] = x
    return
  is_inside = start + jnp.arange(x.shape[0]) < shape.length
  mask = is_inside if x.ndim == 1 else jnp.broadcast_to(is_inside[:, None], x.shape)
  pltriton.store(ref.at[index], x, mask=mask)


def _tokens(refs: Inputs, shape: Shape, start, size: int) -> _Tokens:
  ids = _load(refs.text_ids, shape, start, size, other=-1)
  return _Tokens(start, start + jnp.arange(size), ids)


def _columns(shape: Shape, parts: int) -> list:
  """The slice of K that each part of a vector covers."""
  width = shape.width // parts
  return [pl.ds(i * width, width) for i in range(parts)]


def _vectors(refs: Inputs, i: int, shape: Shape, start, size: int) -> list[jax.Array]:
  """Queries (i = 0), keys (1) or values (2) of some tokens: parts [tokens, K / parts]."""
  is_rotated = refs.angles is not None and i < 2
  parts = []
  for columns in _columns(shape, 2 if is_rotated else 1):
    x = _load(refs.qkv[i], shape, start, size, columns)
    parts.append(x if refs.bias is None else x + refs.bias[i, columns][None, :])
  return _rotate(refs, shape, start, parts, 1) if is_rotated else parts


def _rotate(refs: Inputs, shape: Shape, start, halves: list[jax.Array],
            sign: int) -> list[jax.Array]:
  """Rotates vectors by their angles, or back if `sign` is -1, in float32."""
  first, second = (x.astype(jnp.float32) for x in halves)
  cos, sin = (_load(ref, shape, start, len(first)) for ref in refs.angles)
  sin *= sign
  rotated = first * cos - second * sin, second * cos + first * sin
  return [x.astype(halves[0].dtype) for x in rotated]


def _products(x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
  """x y^T of vectors in parts: [tokens of x, tokens of y] float32."""
  return sum(pltriton.dot(a, b, trans_b=True) for a, b in zip(x, y))


def _weighted_sums(weights: jax.Array, vectors: list[jax.Array],
                   transposed: bool = False) -> list[jax.Array]:
  """Sums of vectors, weighted by each row of `weights`, or each column if `transposed`.

  Returns:
    Parts [sums, K / parts] float32.
  """
  return [pltriton.dot(weights, x, trans_a=transposed) for x in vectors]


def _zeros(vectors: list[jax.Array]) -> list[jax.Array]:
  return [jnp.zeros(x.shape, jnp.float32) for x in vectors]


def _add(x: list[jax.Array], y: list[jax.Array]) -> list[jax.Array]:
  return [a + b for a, b in zip(x, y)]


def _program(refs: Inputs) -> _Program:
  """Reads the values outside the loops: interpreted loops cannot read program ids."""
  row, head = pl.program_id(0), pl.program_id(1)
  return _Program((refs.words[0], refs.words[1]), refs.rows[row], refs.heads[head],
                  None if refs.causal is None else refs.causal[row] > 0)


def _scores(shape: Shape, program: _Program, query, key, queries: _Tokens,
            keys: _Tokens) -> jax.Array:
  """The scores for a softmax in base 2: [queries, keys] float32."""
  scores = _products(query, key)
  scores *= np.float32(_LOG2_E / math.sqrt(shape.width))
  # A query in the padding sees the padding, so that its sum is not zero.
  visible = queries.ids[:, None] == keys.ids[None, :]
  if shape.reach is not None:
    visible &= jnp.abs(queries.at[:, None] - keys.at[None, :]) <= shape.reach
  if program.is_causal is not None:
    visible &= (queries.at[:, None] >= keys.at[None, :]) | ~program.is_causal
  return jnp.where(visible, scores, MASKED)


def _drop(shape: Shape, program: _Program, queries: _Tokens, keys: _Tokens,
          *weights: jax.Array) -> tuple[jax.Array, ...]:
  """Zeroes the same places of each [queries, keys] array, and does not scale the rest."""
  if not shape.rate:
    return weights
  keep = dropout_bits.keeps_weight(program.words, program.row, program.head,
                                   queries.at[:, None], keys.at[None, :], shape.rate)
  return tuple(jnp.where(keep, x, 0) for x in weights)


def forward_kernel(shape, sizes, refs, out, sums):
  """Attention of a block of queries; `sums` gets the log2-sum-exp2 of their scores."""
  program, start = _program(refs), pl.program_id(2) * sizes[0]
  q = _vectors(refs, 0, shape, start, sizes[0])
  queries = _tokens(refs, shape, start, sizes[0])

  def add(j, carry):
    total, most, sums = carry
    at = j * sizes[1]
    keys = _tokens(refs, shape, at, sizes[1])
    k = _vectors(refs, 1, shape, at, sizes[1])
    scores = _scores(shape, program, q, k, queries, keys)
    # The running softmax of flash attention: a new maximum shrinks the earlier sums.
    new_most = jnp.maximum(most, scores.max(-1))
    weights = gpu_math.exp2(scores - new_most[:, None], shape.interpret)
    shrink = gpu_math.exp2(most - new_most, shape.interpret)
    sums = sums * shrink + weights.sum(-1)
    weights, = _drop(shape, program, queries, keys, weights)
    v, = _vectors(refs, 2, shape, at, sizes[1])
    total = total * shrink[:, None] + pltriton.dot(weights.astype(v.dtype), v)
    return total, new_most, sums

  # The first maximum is below every score, so the first block replaces it.
  empty = (jnp.zeros((sizes[0], shape.width), jnp.float32),
           jnp.full(sizes[:1], 2 * MASKED, jnp.float32),
           jnp.zeros(sizes[:1], jnp.float32))
  total, most, sum_of_weights = jax.lax.fori_loop(
      *shape.visited(start, *sizes), add, empty)
  # One scale for dropout at the end, instead of one for each weight.
  sum_of_kept = sum_of_weights * np.float32(1 - shape.rate)
  _store(out, shape, start, total / sum_of_kept[:, None])
  _store(sums, shape, start, most + jnp.log2(sum_of_weights))


def _weights(shape: Shape, program: _Program, q, k, queries: _Tokens, keys: _Tokens, sums,
             d_weights) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(weights, weights after dropout, `d_weights` after dropout), each [queries, keys].

  The weights are already divided by 1 - rate.
  """
  scores = _scores(shape, program, q, k, queries, keys)
  # Past the end of the row the weights are zero, so that sums over tokens are right.
  log_sums = _load(sums, shape, queries.start, len(q[0]), other=-MASKED)
  log_sums += np.float32(math.log2(1 - shape.rate))
  weights = gpu_math.exp2(scores - log_sums[:, None], shape.interpret)
  return weights, *_drop(shape, program, queries, keys, weights, d_weights)


def _sum_of_tokens(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The sum of rounded vectors: [tokens, K] -> [K] float32."""
  if dtype == jnp.float32:
    return x.sum(0)
  # A product with ones: exchanging each value between threads would take a sixth of the
  # kernel's time.
  ones = jnp.ones((LEAST, x.shape[0]), dtype)
  return pltriton.dot(ones, x.astype(dtype)).sum(0) * np.float32(1 / LEAST)


def _store_gradient(refs: Inputs, results, shape: Shape, i: int, number, start,
                    parts: list[jax.Array]):
  """Stores the gradient of a block of vectors, and its share of the bias's gradient."""
  d_qkv, d_bias = results
  if len(parts) == 2:
    parts = _rotate(refs, shape, start, parts, -1)
  for x, columns in zip(parts, _columns(shape, len(parts))):
    # Old versions of Pallas do not take Python's integers together with a mask.
    _store(d_qkv, shape, start, x, np.int32(i), columns)
    if d_bias is not None:
      d_bias[number, i, columns] = _sum_of_tokens(x, d_qkv.dtype)


def whole_backward_kernel(shape, sizes, refs, gradient, sums, *results):
  """The gradients of query, key and value of a row of one block."""
  size, scale = sizes[0], np.float32(1 / math.sqrt(shape.width))
  # A traced zero: Pallas refuses a constant start if the block ends past the row.
  start = 0 * pl.program_id(0)
  q, k, v = (_vectors(refs, i, shape, start, size) for i in range(3))
  g, tokens = [_load(gradient, shape, start, size)], _tokens(refs, shape, start, size)
  weights, dropped, d_weights = _weights(
      shape, _program(refs), q, k, tokens, tokens, sums, _products(g, v))
  d_value = _weighted_sums(dropped.astype(g[0].dtype), g, transposed=True)
  mean = np.float32(1 - shape.rate) * (weights * d_weights).sum(-1, keepdims=True)
  d_scores = (weights * (d_weights - mean) * scale).astype(q[0].dtype)
  d_query = _weighted_sums(d_scores, k)
  d_key = _weighted_sums(d_scores, q, transposed=True)
  for i, parts in enumerate((d_query, d_key, d_value)):
    _store_gradient(refs, results, shape, i, 0, start, parts)


def backward_kernel(shape, sizes, refs, gradient, sums, means, *results):
  """The gradients of a block of queries, or of a block of keys and values."""
  program, size, scale = _program(refs), sizes[0], np.float32(1 / math.sqrt(shape.width))
  number, count = pl.program_id(2), pl.cdiv(shape.length, size)

  def of_scores(q, k, v, g, queries, keys):
    """(weights after dropout, gradient of the scores), [queries, keys]."""
    weights, dropped, d_weights = _weights(
        shape, program, q, k, queries, keys, sums, _products(g, v))
    mean = np.float32(1 - shape.rate) * _load(means, shape, queries.start, size)[:, None]
    d_scores = weights * (d_weights - mean) * scale
    return dropped.astype(g[0].dtype), d_scores.astype(q[0].dtype)

  def by_query():
    start = number * size
    q, g = _vectors(refs, 0, shape, start, size), [_load(gradient, shape, start, size)]
    queries = _tokens(refs, shape, start, size)

    def add(j, d_query):
      k, v = (_vectors(refs, i, shape, j * size, size) for i in (1, 2))
      keys = _tokens(refs, shape, j * size, size)
      return _add(d_query, _weighted_sums(of_scores(q, k, v, g, queries, keys)[1], k))

    d_query = jax.lax.fori_loop(*shape.visited(start, size, size), add, _zeros(q))
    _store_gradient(refs, results, shape, 0, number, start, d_query)

  def by_key():
    block = number - count
    at = block * size
    k, v = (_vectors(refs, i, shape, at, size) for i in (1, 2))
    keys = _tokens(refs, shape, at, size)

    def add(i, totals):
      q, g = (_vectors(refs, 0, shape, i * size, size),
              [_load(gradient, shape, i * size, size)])
      queries = _tokens(refs, shape, i * size, size)
      dropped, d_scores = of_scores(q, k, v, g, queries, keys)
      return (_add(totals[0], _weighted_sums(d_scores, q, transposed=True)),
              _add(totals[1], _weighted_sums(dropped, g, transposed=True)))

    totals = jax.lax.fori_loop(
        *shape.visited(at, size, size), add, (_zeros(k), _zeros(v)))
    for i, parts in enumerate(totals, 1):
      _store_gradient(refs, results, shape, i, block, at, parts)

  # One kernel writes all three gradients side by side: joining them later needs a copy.
  jax.lax.cond(number < count, by_query, by_key)
