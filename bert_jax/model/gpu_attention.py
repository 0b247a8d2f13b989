"""Attention in Triton kernels for NVIDIA GPUs, with dropout and local windows.

No [L, L] array is in memory, as in flash attention (Dao et al. 2022,
https://arxiv.org/abs/2205.14135). The forward pass takes a block of queries, visits the
blocks of keys in its reach, and saves the logarithm of each query's sum. The backward
pass recomputes the weights and the dropout mask. A row of up to 128 tokens is one block
there: a program then computes all three gradients of a head from one set of weights.
Longer rows need the weights twice, once by query and once by key.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp
import numpy as np

from bert_jax.model import dropout_bits
from bert_jax.model.attention import Dropout, Heads
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import MASKED
from bert_jax.parallel import sharding

_WIDTHS = (32, 64, 128)  # K, powers of two for the products
_LEAST = 16  # tokens in a block: the fewest that a product takes
_LONGEST = 8192  # tokens in a row of the tests
_WHOLE = 128  # the longest row whose backward pass is one block
_LOG2_E = math.log2(math.e)
_ROWS = ('batch', 'seq')
_HEADS = ('batch', 'seq', 'heads', None, 'kv')


class _Shape(NamedTuple):
  """Static arguments of the kernels."""

  length: int  # L
  width: int  # K
  rate: float  # share of dropped weights
  reach: int | None  # visible tokens on either side; None = the whole text
  interpret: bool  # True = run the kernel in Pallas' interpreter, off GPUs

  def block(self, most: int) -> int:
    """The tokens in a block: a power of two, at most `most`."""
    return min(most, max(_LEAST, pl.next_power_of_2(self.length)))

  def visited(self, start: jax.Array, size: int, block: int) -> tuple:
    """The blocks of keys that the queries in [start, start + size) see, and reversely."""
    count = pl.cdiv(self.length, block)
    if self.reach is None:
      return 0, count
    first = jnp.maximum(start - self.reach, 0) // block
    last = jnp.minimum(start + size - 1 + self.reach, self.length - 1) // block
    return first, jnp.minimum(last + 1, count)


class _Inputs(NamedTuple):
  """Arrays, or a program's references to its row and head."""

  qkv: Any  # [B, L, H, 3, K]; in a kernel query, key and value, each [L, K]
  bias: Any  # [H, 3, K], to be added; in a kernel [3, K]; None = zeros
  text_ids: Any  # [B, L] int32; in a kernel [L]
  words: Any  # [2] uint32, of the dropout's key
  rows: Any  # [B] uint32, the indices of the rows, counted over all devices
  heads: Any  # [H] uint32, the indices of the heads, counted over all devices


class _Seed(NamedTuple):
  """What the dropped weights of a program depend on, besides their place in the row."""

  words: tuple[jax.Array, jax.Array]
  row: jax.Array
  head: jax.Array


class _Tokens(NamedTuple):
  """A block of tokens of a row."""

  start: jax.Array  # the place of the first one in the row
  at: jax.Array  # [tokens] int32, the places in the row
  ids: jax.Array  # [tokens] int32, the text ids; -1 past the end of the row


def _load(ref, shape: _Shape, start, size: int, other=0) -> jax.Array:
  """`size` tokens of a reference [L, ...]; `other` past the end of the row."""
  index = (pl.ds(start, size), *[slice(None)] * (len(ref.shape) - 1))
  if shape.length % size == 0:
    return ref[index]
  is_inside = start + jnp.arange(size) < shape.length
  mask = is_inside if len(ref.shape) == 1 else jnp.broadcast_to(
      is_inside[:, None], (size, *ref.shape[1:]))
  return pltriton.load(ref.at[index], mask=mask, other=other)


def _store(ref, shape: _Shape, start, x: jax.Array, *part: int):
  """Stores tokens of `ref[:, *part]`, [L, ...], except past the end of the row."""
  # Old versions of Pallas do not take Python's integers together with a mask.
  index = (pl.ds(start, x.shape[0]), *map(np.int32, part), *[slice(None)] * (x.ndim - 1))
  x = x.astype(ref.dtype)
  if shape.length % x.shape[0] == 0:
    ref[index] = x
    return
  is_inside = start + jnp.arange(x.shape[0]) < shape.length
  mask = is_inside if x.ndim == 1 else jnp.broadcast_to(is_inside[:, None], x.shape)
  pltriton.store(ref.at[index], x, mask=mask)


def _tokens(refs: _Inputs, shape: _Shape, start, size: int) -> _Tokens:
  ids = _load(refs.text_ids, shape, start, size, other=-1)
  return _Tokens(start, start + jnp.arange(size), ids)


def _vectors(refs: _Inputs, i: int, shape: _Shape, start, size: int) -> jax.Array:
  """Queries (i = 0), keys (1) or values (2) of some tokens: [tokens, K]."""
  x = _load(refs.qkv[i], shape, start, size)
  return x if refs.bias is None else x + refs.bias[i, :][None, :]


def _seed(refs: _Inputs) -> _Seed:
  """Read outside of the loops, which cannot read program ids in tests."""
  return _Seed((refs.words[0], refs.words[1]), refs.rows[pl.program_id(0)],
               refs.heads[pl.program_id(1)])


def _scores(shape: _Shape, query, key, queries: _Tokens, keys: _Tokens) -> jax.Array:
  """The scores for a softmax in base 2: [queries, keys] float32."""
  scores = pltriton.dot(query, key, trans_b=True)
  scores *= np.float32(_LOG2_E / math.sqrt(shape.width))
  # A query in the padding sees the padding, so that its sum is not zero.
  visible = queries.ids[:, None] == keys.ids[None, :]
  if shape.reach is not None:
    visible &= jnp.abs(queries.at[:, None] - keys.at[None, :]) <= shape.reach
  return jnp.where(visible, scores, MASKED)


def _drop(shape: _Shape, seed: _Seed, queries: _Tokens, keys: _Tokens,
          *weights: jax.Array) -> tuple[jax.Array, ...]:
  """Drops the same places of each [queries, keys] array."""
  if not shape.rate:
    return weights
  keep = dropout_bits.keeps_weight(*seed, queries.at[:, None],
                                   keys.at[None, :], shape.length, shape.rate)
  return tuple(jnp.where(keep, x / np.float32(1 - shape.rate), 0) for x in weights)


def _forward_kernel(shape, sizes, refs, out, sums):
  """Attention of a block of queries."""
  seed, start = _seed(refs), pl.program_id(2) * sizes[0]
  q = _vectors(refs, 0, shape, start, sizes[0])
  queries = _tokens(refs, shape, start, sizes[0])

  def add(j, carry):
    total, most, sums = carry
    at = j * sizes[1]
    keys = _tokens(refs, shape, at, sizes[1])
    scores = _scores(shape, q, _vectors(refs, 1, shape, at, sizes[1]), queries, keys)
    new_most = jnp.maximum(most, scores.max(-1))
    weights = jnp.exp2(scores - new_most[:, None])
    shrink = jnp.exp2(most - new_most)
    sums = sums * shrink + weights.sum(-1)
    weights, = _drop(shape, seed, queries, keys, weights)
    v = _vectors(refs, 2, shape, at, sizes[1])
    total = total * shrink[:, None] + pltriton.dot(weights.astype(v.dtype), v)
    return total, new_most, sums

  empty = (jnp.zeros(q.shape, jnp.float32), jnp.full(sizes[:1], 2 * MASKED, jnp.float32),
           jnp.zeros(sizes[:1], jnp.float32))
  total, most, sum_of_weights = jax.lax.fori_loop(
      *shape.visited(start, *sizes), add, empty)
  _store(out, shape, start, total / sum_of_weights[:, None])
  _store(sums, shape, start, most + jnp.log2(sum_of_weights))


def _weights(shape: _Shape, seed: _Seed, q, k, queries: _Tokens, keys: _Tokens, sums,
             d_weights) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(weights, weights after dropout, `d_weights` after dropout), [queries, keys]."""
  scores = _scores(shape, q, k, queries, keys)
  # Past the end of the row the weights are zero, so that sums over tokens are right.
  log_sums = _load(sums, shape, queries.start, q.shape[0], other=-MASKED)
  weights = jnp.exp2(scores - log_sums[:, None])
  return weights, *_drop(shape, seed, queries, keys, weights, d_weights)


def _store_gradient(results, shape: _Shape, i: int, number, start, x: jax.Array):
  """Stores the gradient of a block of vectors, and its share of the bias's gradient."""
  d_qkv, d_bias = results
  _store(d_qkv, shape, start, x, i)
  if d_bias is not None:
    d_bias[number, i, :] = x.sum(0)


def _whole_backward_kernel(shape, sizes, refs, gradient, sums, *results):
  """The gradients of query, key and value of a row of one block."""
  size, scale = sizes[0], np.float32(1 / math.sqrt(shape.width))
  q, k, v = (_vectors(refs, i, shape, 0, size) for i in range(3))
  g, tokens = _load(gradient, shape, 0, size), _tokens(refs, shape, 0, size)
  weights, dropped, d_weights = _weights(
      shape, _seed(refs), q, k, tokens, tokens, sums, pltriton.dot(g, v, trans_b=True))
  d_value = pltriton.dot(dropped.astype(g.dtype), g, trans_a=True)
  mean = (weights * d_weights).sum(-1, keepdims=True)
  d_scores = (weights * (d_weights - mean) * scale).astype(q.dtype)
  d_query, d_key = pltriton.dot(d_scores, k), pltriton.dot(d_scores, q, trans_a=True)
  for i, x in enumerate((d_query, d_key, d_value)):
    _store_gradient(results, shape, i, 0, 0, x)


def _backward_kernel(shape, sizes, refs, gradient, sums, means, *results):
  """The gradient of a block of queries, or the gradients of a block of keys and values."""
  seed, size, scale = _seed(refs), sizes[0], np.float32(1 / math.sqrt(shape.width))
  program, count = pl.program_id(2), pl.cdiv(shape.length, size)

  def of_scores(q, k, v, g, queries, keys):
    """(weights after dropout, gradient of the scores), [queries, keys]."""
    weights, dropped, d_weights = _weights(
        shape, seed, q, k, queries, keys, sums, pltriton.dot(g, v, trans_b=True))
    mean = _load(means, shape, queries.start, size)[:, None]
    return dropped.astype(g.dtype), (weights * (d_weights - mean) * scale).astype(q.dtype)

  def by_query():
    start = program * size
    q, g = _vectors(refs, 0, shape, start, size), _load(gradient, shape, start, size)
    queries = _tokens(refs, shape, start, size)

    def add(j, d_query):
      k, v = (_vectors(refs, i, shape, j * size, size) for i in (1, 2))
      keys = _tokens(refs, shape, j * size, size)
      return d_query + pltriton.dot(of_scores(q, k, v, g, queries, keys)[1], k)

    d_query = jax.lax.fori_loop(*shape.visited(start, size, size), add,
                                jnp.zeros(q.shape, jnp.float32))
    _store_gradient(results, shape, 0, program, start, d_query)

  def by_key():
    number = program - count
    at = number * size
    k, v = (_vectors(refs, i, shape, at, size) for i in (1, 2))
    keys = _tokens(refs, shape, at, size)

    def add(i, totals):
      q, g = (_vectors(refs, 0, shape, i * size, size),
              _load(gradient, shape, i * size, size))
      queries = _tokens(refs, shape, i * size, size)
      dropped, d_scores = of_scores(q, k, v, g, queries, keys)
      return (totals[0] + pltriton.dot(d_scores, q, trans_a=True),
              totals[1] + pltriton.dot(dropped, g, trans_a=True))

    totals = jax.lax.fori_loop(
        *shape.visited(at, size, size), add, (jnp.zeros(k.shape, jnp.float32),) * 2)
    for i, x in enumerate(totals, 1):
      _store_gradient(results, shape, i, number, at, x)

  # One kernel writes all three gradients side by side, without a copy between two.
  jax.lax.cond(program < count, by_query, by_key)


class _Launch(NamedTuple):
  """Sizes of the blocks and of the programs; measured on an H200."""

  blocks: tuple[int, int]  # queries, keys
  warps: int
  stages: int


def _launch(shape: _Shape, is_forward: bool) -> _Launch:
  if is_forward:
    is_small = shape.length <= _WHOLE or shape.width > 64
    return _Launch((shape.block(64 if is_small else 128), shape.block(64)), 4, 2)
  if _is_whole(shape):
    size = shape.block(_WHOLE)
    return _Launch((size, size), 8 if size > 64 else 4, 1)
  return _Launch((shape.block(64), shape.block(64)), 4, 2)


def _is_whole(shape: _Shape) -> bool:
  """True if the backward pass of a row is one block; wider heads have too few registers."""
  return shape.length <= _WHOLE and shape.width <= 64


def _by_token(shape: tuple[int, ...]) -> pl.BlockSpec:
  """A program's part [L, ...] of an array [B, L, H, ...]."""
  inside = shape[3:]
  return pl.BlockSpec((None, shape[1], None, *inside),
                      lambda b, h, *_: (b, 0, h, *[0] * len(inside)))


def _by_head(shape: tuple[int, ...]) -> pl.BlockSpec:
  """A program's part [...] of an array [B, H, ...]."""
  inside = shape[2:]
  return pl.BlockSpec((None, None, *inside), lambda b, h, *_: (b, h, *[0] * len(inside)))


def _call(kernel, shape: _Shape, launch: _Launch, programs: tuple[int, ...], products: int,
          inputs: _Inputs, by_token: list, by_head: list, results: list, result_specs: list):
  """Runs a kernel on every row and head.

  The kernel takes `inputs`, then `by_token`, [B, L, H, ...], then `by_head`, [B, H, ...].
  Each head computes `products` matrix products.
  """
  batch, length, heads, _, width = inputs.qkv.shape

  def part(i):
    return pl.BlockSpec((None, length, None, None, width),
                        lambda b, h, *_: (b, 0, h, i, 0))

  def whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

  specs = _Inputs(
      [part(i) for i in range(3)],
      inputs.bias if inputs.bias is None else pl.BlockSpec(
          (None, 3, width), lambda b, h, *_: (h, 0, 0)),
      pl.BlockSpec((None, length), lambda b, *_: (b, 0)), *map(whole, inputs[3:]))
  weights = batch * heads * length * length
  size = sum(math.prod(x.shape) * x.dtype.itemsize
             for x in jax.tree.leaves((inputs, by_token, by_head, results)))
  return pl.pallas_call(
      functools.partial(kernel, shape, launch.blocks), grid=(batch, heads, *programs),
      in_specs=[specs, *(_by_token(x.shape) for x in by_token),
                *(_by_head(x.shape) for x in by_head)],
      out_specs=result_specs, out_shape=results, interpret=shape.interpret,
      name=kernel.__name__.strip('_').replace('kernel', 'attention'),
      # XLA cannot look into a kernel and counts it as free without an estimate.
      cost_estimate=pl.CostEstimate(flops=2 * products * weights * width,
                                    transcendentals=weights, bytes_accessed=size),
      compiler_params=pltriton.CompilerParams(
          num_warps=launch.warps, num_stages=launch.stages),
  )(inputs._replace(qkv=[inputs.qkv] * 3), *by_token, *by_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: _Shape, inputs: _Inputs) -> jax.Array:
  return _forward(shape, inputs)[0]


def _forward(shape, inputs):
  batch, length, heads, _, width = inputs.qkv.shape
  launch = _launch(shape, is_forward=True)
  results = [jax.ShapeDtypeStruct((batch, length, heads, width), inputs.qkv.dtype),
             jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
  out, sums = _call(_forward_kernel, shape, launch, (pl.cdiv(length, launch.blocks[0]),), 2,
                    inputs, [], [], results,
                    [_by_token(results[0].shape), _by_head(results[1].shape)])
  return out, (inputs, None if _is_whole(shape) else out, sums)


def _backward(shape, saved, gradient):
  inputs, out, sums = saved
  batch, length, heads, _, width = inputs.qkv.shape
  launch, kernel, by_head, programs, products = (
      _launch(shape, is_forward=False), _whole_backward_kernel, [sums], (), 5)
  blocks = pl.cdiv(length, launch.blocks[0])
  if not _is_whole(shape):
    # The mean of a query's weight gradients, which is the same as over its weights.
    means = jnp.einsum('blhk,blhk->bhl', out.astype(jnp.float32),
                       gradient.astype(jnp.float32))
    kernel, by_head, programs, products = (
        _backward_kernel, [sums, means], (2 * blocks,), 7)
  d_qkv = jax.ShapeDtypeStruct(inputs.qkv.shape, inputs.qkv.dtype)
  shares = None if inputs.bias is None else jax.ShapeDtypeStruct(
      (batch, heads, blocks, 3, width), jnp.float32)
  d_qkv, d_bias = _call(
      kernel, shape, launch, programs, products, inputs, [gradient], by_head,
      [d_qkv, shares], [_by_token(d_qkv.shape), shares and _by_head(shares.shape)])
  if d_bias is not None:
    d_bias = d_bias.sum((0, 2)).astype(inputs.bias.dtype)
  return inputs._replace(qkv=d_qkv, bias=d_bias, text_ids=None, words=None, rows=None,
                         heads=None),


_attend.defvjp(_forward, _backward)


def obstacle(config: BertConfig, length: int, heads: int) -> str:
  """Returns the reason why the kernels cannot be used; '' if they can.

  Args:
    config: of the model.
    length: L.
    heads: H of one device.
  """
  if not _LEAST <= length <= _LONGEST:
    return f'{length} is not within [{_LEAST}, {_LONGEST}]'
  if config.head_size not in _WIDTHS:
    return f'heads of {config.head_size} are not of {", ".join(map(str, _WIDTHS))}'
  return '' if heads else 'there are more devices on the model axis than heads'


def attend(heads: Heads, text_ids: jax.Array, dropout: Dropout,
           reach: int | None = None) -> jax.Array:
  """Attention by the kernels, each device on its rows and heads.

  Platforms other than GPUs interpret them: slow, for tests.

  Args:
    heads: query, key and value.
    text_ids: [B, L] int32, 0 on padding. A token attends to tokens with the same id.
    dropout: of the weights.
    reach: visible tokens on either side; None = the whole text.

  Returns:
    [B, L, H, K] in the dtype of the query.
  """
  batch, length, count, width = heads.query.shape
  shape = _Shape(length, width, dropout.rate, reach,
                 not sharding.has_triton())
  words = jax.random.key_data(dropout.key()) if dropout.rate else jnp.zeros(2, jnp.uint32)
  # Global indices, so that dropout does not depend on the mesh.
  rows, numbers = (jnp.arange(n, dtype=jnp.uint32) for n in (batch, count))
  qkv, bias = heads.side_by_side()
  qkv = qkv.reshape(batch, length, count, 3, width)
  if bias is not None:
    bias = bias.astype(qkv.dtype).reshape(count, 3, width)

  def local(*arrays):
    return _attend(shape, _Inputs(*arrays))

  inputs = (_HEADS, ('heads', None, 'kv'), _ROWS, (None,), ('batch',), ('heads',))
  return sharding.on_each_chip(local, inputs, ('batch', 'seq', 'heads', 'kv'))(
      qkv, bias, text_ids, words, rows, numbers)
