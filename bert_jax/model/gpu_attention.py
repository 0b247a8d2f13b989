"""Attention in Triton kernels for NVIDIA GPUs, with dropout, windows and rotation.

No [L, L] array is in memory, as in flash attention (Dao et al. 2022,
https://arxiv.org/abs/2205.14135). The forward pass takes a block of queries, visits the
blocks of keys in its reach, and saves the log-sum-exp of each query's scores. The
backward pass recomputes the weights and the dropout mask. In rows of up to 128 tokens
with heads up to 64 wide, it takes a row as one block: a program computes all three
gradients of a head from one set of weights. In other rows, it computes the weights twice,
once by query and once by key.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from bert_jax.model import gpu_attention_kernels as kernels
from bert_jax.model.attention import Dropout, Heads
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.gpu_attention_kernels import Inputs, Shape
from bert_jax.parallel import sharding

_WIDTHS = (32, 64, 128)  # K, powers of two for the products
_LONGEST = 8192  # tokens in the longest row of the tests
_WHOLE = 128  # the longest row whose backward pass is one block
_ROWS = ('batch', 'seq')
_HEADS = ('batch', 'seq', 'heads', None, 'kv')


class _Launch(NamedTuple):
  """Block sizes, warps and pipeline stages; tuned on an H200 with heads of width 64."""

  blocks: tuple[int, int]  # queries, keys
  warps: int
  stages: int


def _launch(shape: Shape, is_forward: bool) -> _Launch:
  if is_forward:
    if shape.length <= _WHOLE:
      sizes, stages = (64, 64), 1 if shape.length > 64 else 2
    elif shape.width > 64 or shape.reach is not None:
      sizes, stages = (64, 64), 2
    else:  # dropout needs registers, so it takes smaller blocks
      sizes, stages = (128, 32 if shape.rate else 64), 3
    return _Launch((shape.block(sizes[0]), shape.block(sizes[1])), 4, stages)
  if _is_whole(shape):
    size = shape.block(_WHOLE)
    return _Launch((size, size), 8 if size > 64 else 4, 1)
  stages = 2 if shape.width > 64 else 3 if shape.reach is None else 1
  return _Launch((shape.block(64), shape.block(64)), 4, stages)


def _is_whole(shape: Shape) -> bool:
  """True if the backward pass of a row is one block; wide heads lack the registers."""
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


def _call(kernel, shape: Shape, launch: _Launch, programs: tuple[int, ...], products: int,
          inputs: Inputs, by_token: list, by_head: list, results: list,
          result_specs: list):
  """Runs a kernel on every row and head.

  The kernel takes `inputs`, then `by_token`, [B, L, H, ...], then `by_head`, [B, H, ...].
  Each head computes `products` matrix products.
  """
  batch, length, heads, _, width = inputs.qkv.shape
  has_angles = inputs.angles is not None

  # A block has one part of an array: query, key or value, or cos or sin. So the kernel
  # takes `qkv` three times and `angles` twice.
  def part(i):
    return pl.BlockSpec((None, length, None, None, width),
                        lambda b, h, *_: (b, 0, h, i, 0))

  def angles(i):
    return pl.BlockSpec((None, None, length, None, width // 2),
                        lambda b, *_: (i, b, 0, 0, 0))

  def whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

  specs = Inputs(
      [part(i) for i in range(3)], [angles(i) for i in range(2)] if has_angles else None,
      inputs.bias if inputs.bias is None else pl.BlockSpec(
          (None, 3, width), lambda b, h, *_: (h, 0, 0)),
      pl.BlockSpec((None, length), lambda b, *_: (b, 0)),
      *(x if x is None else whole(x) for x in inputs[4:]))
  weights = batch * heads * length * length
  size = sum(math.prod(x.shape) * x.dtype.itemsize
             for x in jax.tree.leaves((inputs, by_token, by_head, results)))
  return pl.pallas_call(
      functools.partial(kernel, shape, launch.blocks), grid=(batch, heads, *programs),
      in_specs=[specs, *(_by_token(x.shape) for x in by_token),
                *(_by_head(x.shape) for x in by_head)],
      out_specs=result_specs, out_shape=results, interpret=shape.interpret,
      name=kernel.__name__.replace('kernel', 'attention'),
      # XLA cannot look into a kernel: without an estimate it counts the kernel as free.
      cost_estimate=pl.CostEstimate(flops=2 * products * weights * width,
                                    transcendentals=weights, bytes_accessed=size),
      compiler_params=pltriton.CompilerParams(
          num_warps=launch.warps, num_stages=launch.stages),
  )(inputs._replace(qkv=[inputs.qkv] * 3,
                    angles=[inputs.angles] * 2 if has_angles else None),
    *by_token, *by_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shape: Shape, inputs: Inputs) -> jax.Array:
  return _forward(shape, inputs)[0]


def _forward(shape, inputs):
  batch, length, heads, _, width = inputs.qkv.shape
  launch = _launch(shape, is_forward=True)
  results = [jax.ShapeDtypeStruct((batch, length, heads, width), inputs.qkv.dtype),
             jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
  blocks = pl.cdiv(length, launch.blocks[0])
  out, sums = _call(
      kernels.forward_kernel, shape, launch, (blocks,), 2, inputs, [], [], results,
      [_by_token(results[0].shape), _by_head(results[1].shape)])
  return out, (inputs, None if _is_whole(shape) else out, sums)


def _backward(shape, saved, gradient):
  inputs, out, sums = saved
  batch, length, heads, _, width = inputs.qkv.shape
  launch = _launch(shape, is_forward=False)
  blocks = pl.cdiv(length, launch.blocks[0])
  if _is_whole(shape):
    kernel, by_head, programs, products = kernels.whole_backward_kernel, [sums], (), 5
  else:
    # [B, H, L], equal to sum(weights * d_weights) of each query, without the weights.
    means = jnp.einsum('blhk,blhk->bhl', out.astype(jnp.float32),
                       gradient.astype(jnp.float32))
    kernel, by_head, programs, products = (
        kernels.backward_kernel, [sums, means], (2 * blocks,), 7)
  d_qkv = jax.ShapeDtypeStruct(inputs.qkv.shape, inputs.qkv.dtype)
  # Each program sums the gradient of the bias over its own tokens.
  partial_sums = None if inputs.bias is None else jax.ShapeDtypeStruct(
      (batch, heads, blocks, 3, width), jnp.float32)
  d_qkv, d_bias = _call(
      kernel, shape, launch, programs, products, inputs, [gradient], by_head,
      [d_qkv, partial_sums],
      [_by_token(d_qkv.shape), partial_sums and _by_head(partial_sums.shape)])
  if d_bias is not None:
    d_bias = d_bias.sum((0, 2)).astype(inputs.bias.dtype)
  return inputs._replace(qkv=d_qkv, angles=None, bias=d_bias, text_ids=None, words=None,
                         rows=None, heads=None, causal=None),


_attend.defvjp(_forward, _backward)


def obstacle(config: BertConfig, length: int, heads: int) -> str:
  """Returns the reason why the kernels cannot be used; '' if they can.

  Args:
    config: of the model.
    length: L.
    heads: H of one device.
  """
  if not kernels.LEAST <= length <= _LONGEST:
    return f'rows of {length} tokens are not within [{kernels.LEAST}, {_LONGEST}]'
  if config.head_size not in _WIDTHS:
    return f'heads are {config.head_size} wide, not {" or ".join(map(str, _WIDTHS))}'
  return ''


def attend(heads: Heads, text_ids: jax.Array, dropout: Dropout, reach: int | None = None,
           causal: jax.Array | None = None) -> jax.Array:
  """Attention by the kernels, each device on its rows and heads.

  Off GPUs, Pallas interprets the kernels, which is slow: for tests only.

  Args:
    heads: its `projected` and `angles`; the kernels add the bias and rotate.
    text_ids: [B, L] int32, 0 on padding. A token attends to tokens with the same id.
    dropout: of the weights.
    reach: visible tokens on either side; None = the whole text.
    causal: [B] bool, rows whose tokens see only themselves and earlier ones; None = none.

  Returns:
    [B, L, H, K] in the dtype of the query.
  """
  batch, length, count, width = heads.query.shape
  shape = Shape(length, width, dropout.rate, reach,
                 not sharding.has_triton())
  words = jax.random.key_data(dropout.key()) if dropout.rate else jnp.zeros(2, jnp.uint32)
  # Global indices, so that dropout does not depend on the mesh.
  rows, numbers = (jnp.arange(n, dtype=jnp.uint32) for n in (batch, count))
  qkv, bias = heads.projected
  qkv = qkv.reshape(batch, length, count, 3, width)
  if bias is not None:
    bias = bias.astype(qkv.dtype).reshape(count, 3, width)

  def local(*arrays):
    return _attend(shape, Inputs(*arrays))

  inputs = (_HEADS, (None, *_ROWS, None, None), ('heads', None, 'kv'), _ROWS, (None,),
            ('batch',), ('heads',), ('batch',))
  causal = None if causal is None else causal.astype(jnp.int32)
  return sharding.on_each_chip(local, inputs, ('batch', 'seq', 'heads', 'kv'))(
      qkv, heads.angles, bias, text_ids, words, rows, numbers, causal)
