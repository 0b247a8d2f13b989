"""LayerNorm(x + dropout(y + bias)) in one Triton kernel each way, for NVIDIA GPUs.

XLA needs some ten kernels for it, and passes arrays of the size of the activations
between them in float32. Here each way reads its arrays once. The forward pass keeps the
mean and the inverse deviation of each token; the backward pass draws the dropout again.
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
from bert_jax.parallel import sharding

_MOST = 8192  # the widest vector: a program holds it in registers
# Values that a program takes at a time, by whether the width is a power of two. Measured
# on an H200 with widths of 1,024 and 768.
_VALUES = {True: 8192, False: 4096}
_TURNS = 16  # blocks of tokens that a program of the backward pass takes
_TOKENS = ('batch', 'seq', 'embed_act')


class _Shape(NamedTuple):
  """Static arguments of the kernels."""

  length: int  # L
  epsilon: float
  rate: float  # share of dropped values
  keeps_sum: bool  # also returns x + dropout(y + bias)
  interpret: bool  # True = run the kernel in Pallas' interpreter, off GPUs


class _Inputs(NamedTuple):
  """Arrays, or references to them in a kernel; N = B * L."""

  x: Any  # [N, D]
  y: Any  # [N, D]; None = normalize x alone
  bias: Any  # [D], added to y; None = zeros
  scale: Any  # [D] float32
  shift: Any  # [D] float32; None = zeros
  words: Any  # [2] uint32, of the dropout's key
  first: Any  # [1] uint32, the index of the first row, counted over all devices


class _Block(NamedTuple):
  """The tokens that a program takes at a time, in vectors padded to a power of two."""

  start: jax.Array  # the first token
  size: int  # tokens
  width: int  # D
  padded: int  # the width of the vectors

  @property
  def is_inside(self) -> jax.Array:
    """[1, padded] bool."""
    return (jnp.arange(self.padded) < self.width)[None, :]

  def load(self, ref, *index) -> jax.Array:
    """[size, padded] of a reference [.., padded], or [1, padded], in float32."""
    ref = ref.at[index] if index else ref
    mask = self.is_inside if len(ref.shape) == 2 else self.is_inside[0]
    x = pltriton.load(ref, mask=mask, other=0).astype(jnp.float32)
    return x if x.ndim == 2 else x[None, :]

  def store(self, ref, x: jax.Array, *index):
    """Stores [size, padded]."""
    mask = jnp.broadcast_to(self.is_inside, x.shape)
    pltriton.store(ref.at[index] if index else ref, x.astype(ref.dtype), mask=mask)

  def keep(self, shape: _Shape, refs: _Inputs) -> jax.Array:
    """The values that dropout keeps: [size, padded] bool."""
    tokens = (self.start + jnp.arange(self.size))[:, None]
    place = tokens % shape.length * self.width + jnp.arange(self.padded)[None, :]
    row = (tokens // shape.length).astype(jnp.uint32) + refs.first[0]
    return dropout_bits.keeps_activation((refs.words[0], refs.words[1]), row,
                                         place.astype(jnp.uint32), shape.rate)


def _sum(shape: _Shape, refs: _Inputs, block: _Block, keep, *index) -> jax.Array:
  """x + dropout(y + bias): [size, padded] float32."""
  total = block.load(refs.x, *index)
  if refs.y is None:
    return total
  y = block.load(refs.y, *index)
  if refs.bias is not None:
    y += block.load(refs.bias)
  if keep is not None:
    y = jnp.where(keep, y / np.float32(1 - shape.rate), 0)
  return total + y


def _forward_kernel(shape, size, width, refs, out, total, mean, deviation):
  """Normalizes a block of tokens."""
  block = _Block(pl.program_id(0) * size, size, width, refs.x.shape[1])
  keep = block.keep(shape, refs) if shape.rate else None
  x = _sum(shape, refs, block, keep)
  if total is not None:
    block.store(total, x)
  center = x.sum(-1) / width
  x = jnp.where(block.is_inside, x - center[:, None], 0)
  inverse = jax.lax.rsqrt((x * x).sum(-1) / width + np.float32(shape.epsilon))
  y = x * inverse[:, None] * block.load(refs.scale)
  block.store(out, y if refs.shift is None else y + block.load(refs.shift))
  mean[...], deviation[...] = center, inverse


def _backward_kernel(shape, size, width, turns, refs, mean, deviation, gradient, of_total,
                     results):
  """The gradients of some blocks of tokens, and their shares of those of the vectors."""
  padded = refs.x.shape[1]
  vectors = _Block(0, 1, width, padded)
  scale = vectors.load(refs.scale)
  first = pl.program_id(0) * turns  # read outside of the loop, which cannot in tests

  def add(turn, sums):
    start = turn * size
    block = _Block((first + turn) * size, size, width, padded)
    at = (pl.ds(start, size), slice(None))
    keep = block.keep(shape, refs) if shape.rate else None
    inverse = deviation[at[0]][:, None]
    x = _sum(shape, refs, block, keep, *at) - mean[at[0]][:, None]
    x = jnp.where(block.is_inside, x * inverse, 0)  # normalized
    g = block.load(gradient, *at)
    scaled = g * scale
    mean_scaled, mean_product = (
        (z.sum(-1) / width)[:, None] for z in (scaled, scaled * x))
    d_x = scaled - mean_scaled - x * mean_product
    d_x *= inverse
    if of_total is not None:
      d_x += block.load(of_total, *at)
    block.store(results.x, d_x, *at)
    d_y = jnp.where(keep, d_x / np.float32(1 - shape.rate), 0) if shape.rate else d_x
    if results.y is not None:
      block.store(results.y, d_y, *at)
    shares = {'scale': g * x, 'shift': g, 'bias': d_y}
    return tuple(total + shares[name].sum(0) for name, total in zip(names, sums))

  names = [name for name in ('scale', 'shift', 'bias')
           if getattr(results, name) is not None]
  zeros = tuple(jnp.zeros(padded, jnp.float32) for _ in names)
  for name, total in zip(names, jax.lax.fori_loop(0, turns, add, zeros)):
    pltriton.store(getattr(results, name), total, mask=vectors.is_inside[0])


def _sizes(count: int, width: int) -> tuple[int, int, int]:
  """(padded width, tokens of a block, blocks of a program of the backward pass)."""
  padded = pl.next_power_of_2(width)
  size = math.gcd(count, max(1, _VALUES[padded == width] // padded))
  return padded, size, math.gcd(count // size, _TURNS)


def _vector(width: int) -> pl.BlockSpec:
  """The same vector in every program."""
  return pl.BlockSpec((width,), lambda i: (0,))


def _block(*shape: int | None) -> pl.BlockSpec:
  """The program's block along the first axis."""
  return pl.BlockSpec(shape, lambda i: (i, *[0] * (len(shape) - 1)))


def _input_specs(inputs: _Inputs, tokens: int, padded: int) -> _Inputs:
  vector, block = _vector(padded), _block(tokens, padded)
  specs = _Inputs(block, block, vector, vector, vector, _vector(2), _vector(1))
  return _Inputs(*(None if x is None else spec for x, spec in zip(inputs, specs)))


def _call(kernel, shape: _Shape, programs: int, warps: int, in_specs, out_specs,
          out_shape, *arguments):
  size = sum(math.prod(x.shape) * x.dtype.itemsize
             for x in jax.tree.leaves((arguments, out_shape)))
  return pl.pallas_call(
      kernel, grid=(programs,), in_specs=in_specs, out_specs=out_specs,
      out_shape=out_shape, interpret=shape.interpret,
      name=kernel.func.__name__.strip('_').replace('kernel', 'norm'),
      # XLA cannot look into a kernel and counts it as free without an estimate.
      cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size),
      compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1))(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(shape: _Shape, inputs: _Inputs):
  return _forward(shape, inputs)[0]


def _forward(shape, inputs):
  count, width = inputs.x.shape
  padded, size, _ = _sizes(count, width)
  like = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
  number = jax.ShapeDtypeStruct((count,), jnp.float32)
  block = _block(size, padded)
  writes_sum = shape.keeps_sum and inputs.y is not None  # without y, the sum is x
  out, total, mean, deviation = _call(
      functools.partial(_forward_kernel, shape, size, width), shape, count // size, 4,
      [_input_specs(inputs, size, padded)],
      [block, block if writes_sum else None, _block(size), _block(size)],
      [like, like if writes_sum else None, number, number], inputs)
  if shape.keeps_sum and not writes_sum:
    total = inputs.x
  return (out, total), (inputs, mean, deviation)


def _backward(shape, saved, gradients):
  inputs, mean, deviation = saved
  count, width = inputs.x.shape
  padded, size, turns = _sizes(count, width)
  tokens = size * turns  # of a program
  block, share = _block(tokens, padded), _block(None, padded)
  shares = jax.ShapeDtypeStruct((count // tokens, width), jnp.float32)
  # Without dropout, y has the gradient of x.
  wanted = inputs._replace(y=inputs.y if shape.rate else None, words=None, first=None)
  shapes = _Inputs(*(x if x is None else shares if x.ndim == 1
                     else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted))
  specs = _Inputs(block, block, share, share, share, None, None)
  results, = _call(
      functools.partial(_backward_kernel, shape, size, width, turns), shape,
      count // tokens, 8,
      [_input_specs(inputs, tokens, padded), _block(tokens), _block(tokens), block,
       None if gradients[1] is None else block],
      [_Inputs(*(None if x is None else spec for x, spec in zip(shapes, specs)))],
      [shapes], inputs, mean, deviation, *gradients)
  if inputs.y is not None and not shape.rate:
    results = results._replace(y=results.x.astype(inputs.y.dtype))
  vectors = {name: getattr(results, name).sum(0).astype(getattr(inputs, name).dtype)
             for name in ('scale', 'shift', 'bias') if getattr(inputs, name) is not None}
  return results._replace(**vectors),


_norm.defvjp(_forward, _backward)


def can_run(width: int) -> bool:
  """True if the kernels compute norms of this width D where the trace runs."""
  # On a model axis, every device would exchange the gradients of x with its neighbors.
  return width <= _MOST and sharding.has_triton() and sharding.parts('heads') == 1


def norm(x: jax.Array, y: jax.Array | None, bias: jax.Array | None, scale: jax.Array,
         shift: jax.Array | None, *, epsilon: float, rate: float = 0.0,
         random: jax.Array | None = None, keeps_sum: bool = False
         ) -> tuple[jax.Array, jax.Array | None]:
  """LayerNorm(x + dropout(y + bias)) * scale + shift, computed in float32.

  Platforms other than GPUs interpret the kernels: slow, for tests.

  Args:
    x: [B, L, D].
    y: [B, L, D]; None = normalize x alone.
    bias: [D]; None = zeros.
    scale: [D].
    shift: [D]; None = zeros.
    epsilon: added to the variance.
    rate: share of dropped values.
    random: the key of the dropout, which drops what `nn.Dropout` drops with it; None if
      the rate is 0.
    keeps_sum: also return x + dropout(y + bias).

  Returns:
    ([B, L, D] in the dtype of x, the sum in that dtype or None).
  """
  batch, length, width = x.shape
  shape = _Shape(length, epsilon, rate if y is not None else 0.0, keeps_sum,
                 not sharding.has_triton())
  words = jax.random.key_data(random) if shape.rate else jnp.zeros(2, jnp.uint32)
  rows = jnp.arange(batch, dtype=jnp.uint32)

  def local(x, y, bias, scale, shift, words, rows):
    flat = [z if z is None else z.reshape(-1, width) for z in (x, y)]
    vectors = [z if z is None else z.astype(jnp.float32) for z in (scale, shift)]
    out, total = _norm(shape, _Inputs(*flat, bias, *vectors, words, rows[:1]))
    return out.reshape(x.shape), total if total is None else total.reshape(x.shape)

  vector = ('embed_act',)
  return sharding.on_each_chip(
      local, (_TOKENS, _TOKENS, vector, vector, vector, (None,), ('batch',)),
      [_TOKENS, _TOKENS])(x, y, bias, scale, shift, words, rows)
