"""LayerNorm(x + dropout(y + bias)) in Triton kernels for NVIDIA GPUs, one for each pass.

XLA needs about ten kernels, and passes float32 arrays as large as the activations between
them. Here the kernel of each pass reads its arrays once. The forward pass keeps the
mean and the inverse deviation of each token; the backward pass draws the dropout again.
Instructions, not memory, limit the kernels, so they use few: a warp takes a vector, and
hashes the places of a token once for several rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp
import numpy as np

from bert_jax.model import dropout_bits, gpu_math
from bert_jax.parallel import sharding

_MOST = 8192  # the widest vector: a program holds it in registers
_WIDTH = 768  # the most values of a vector that one warp holds, 24 in each thread
_PART = 256  # the most values that a warp loads at a time, 8 in each thread
_WARPS = 4  # of a program whose vectors fit into one warp each
_TURNS = 8  # most groups of vectors that one program takes
_TOKENS = ('batch', 'seq', 'embed_act')


class _Shape(NamedTuple):
  """Static arguments of the kernels."""

  width: int  # D
  epsilon: float
  rate: float  # share of dropped values
  returns_sum: bool  # also returns x + dropout(y + bias)
  interpret: bool  # True = run the kernel in Pallas' interpreter, off GPUs


class _Inputs(NamedTuple):
  """Arrays, or a program's references to its part of them."""

  x: Any  # [B, L, D]
  y: Any  # [B, L, D]; None = normalize x alone
  bias: Any  # [D], added to y; None = zeros
  scale: Any  # [D] float32
  shift: Any  # [D] float32; None = zeros
  words: Any  # [2] uint32, of the dropout's key
  first: Any  # [1] uint32, the index of the first row, counted over all devices


class _Tile(NamedTuple):
  """The part that a program computes: some rows of some tokens."""

  rows: int  # at a time
  turns: int  # groups of rows
  tokens: int  # of each row
  warps: int
  columns: tuple[tuple[int, int], ...]  # (start, size) of the parts of a vector

  @classmethod
  def of(cls, batch: int, length: int, width: int) -> '_Tile':
    """Chooses the tile for vectors [B, L, D]."""
    # One warp sums a whole vector, unless the registers of its threads do not suffice.
    warps = pl.next_power_of_2(pl.cdiv(width, _WIDTH))
    rows = math.gcd(batch, max(1, _WARPS // warps))
    most = gpu_math.turns(batch * length // rows, _TURNS)
    turns = math.gcd(batch // rows, most)
    columns, start, size = [], 0, _PART * warps
    while start < width:  # powers of two, because Triton has no other sizes
      size = min(size, 1 << ((width - start).bit_length() - 1))
      columns.append((start, size))
      start += size
    return cls(rows, turns, math.gcd(length, most // turns), rows * warps, tuple(columns))

  def load(self, ref, *index) -> list[jax.Array]:
    """The parts [rows, size] of the vectors ref[index] in float32."""
    return [ref[*index, pl.ds(*part)].astype(jnp.float32) for part in self.columns]

  def repeat(self, ref) -> list[jax.Array]:
    """The parts [rows, size] of one vector in float32."""
    # Each row reads the vector again: an exchange between the threads would cost more.
    columns = (start + jax.lax.broadcasted_iota(jnp.int32, (self.rows, size), 1)
               for start, size in self.columns)
    return [ref[at].astype(jnp.float32) for at in columns]

  def store(self, ref, parts: list[jax.Array], *index):
    """Stores the parts of the vectors ref[index]."""
    for x, part in zip(parts, self.columns):
      ref[*index, pl.ds(*part)] = x.astype(ref.dtype)

  def visit(self, shape: '_Shape', refs: '_Inputs', take, carry=()):
    """Calls take(index, keep, carry) for each group of vectors; returns the last carry.

    `keep` has the places that dropout keeps, a list of [rows, size] bool; empty without
    dropout.
    """
    first_row = pl.program_id(0) * self.turns * self.rows
    first_token = pl.program_id(1) * self.tokens

    def take_token(token, carry):
      # The hash of a place is the same in all rows.
      first = (first_token + token) * shape.width
      places = [(first + start + jnp.arange(size)).astype(jnp.uint32)[None, :]
                for start, size in self.columns] if shape.rate else []
      places = [dropout_bits.hash_index(x, refs.words[0]) for x in places]

      def take_rows(turn, carry):
        rows = turn * self.rows
        numbers = (first_row + rows + jnp.arange(self.rows)).astype(jnp.uint32)
        of_row = dropout_bits.hash_index(numbers + refs.first[0], refs.words[1])[:, None]
        keep = [dropout_bits.keeps_activation(of_row, x, shape.rate) for x in places]
        return take((pl.ds(rows, self.rows), token), keep, carry)

      return jax.lax.fori_loop(0, self.turns, take_rows, carry)

    return jax.lax.fori_loop(0, self.tokens, take_token, carry)


def _total(parts: list[jax.Array]) -> jax.Array:
  """The sums of the vectors in parts: [rows, 1]."""
  return sum(x.sum(-1) for x in parts)[:, None]


def _drop(shape: _Shape, keep: list[jax.Array],
          parts: list[jax.Array]) -> list[jax.Array]:
  if not keep:
    return parts
  scale = np.float32(1 / (1 - shape.rate))
  return [jnp.where(kept, x * scale, 0) for kept, x in zip(keep, parts)]


def _sum(shape: _Shape, tile: _Tile, refs: _Inputs, index, keep) -> list[jax.Array]:
  """x + dropout(y + bias) in parts."""
  x = tile.load(refs.x, *index)
  if refs.y is None:
    return x
  y = tile.load(refs.y, *index)
  if refs.bias is not None:
    y = [a + b for a, b in zip(y, tile.repeat(refs.bias))]
  return [a + b for a, b in zip(x, _drop(shape, keep, y))]


def _forward_kernel(shape, tile, refs, out, total, mean, inverse_deviation):
  """Normalizes some vectors; `inverse_deviation` gets the inverse standard deviations."""
  def take(index, keep, carry):
    x = _sum(shape, tile, refs, index, keep)
    if total is not None:
      tile.store(total, x, *index)
    center = _total(x) / shape.width
    x = [part - center for part in x]
    inverse = jax.lax.rsqrt(_total([part * part for part in x]) / shape.width
                            + np.float32(shape.epsilon))
    y = [part * inverse * scale for part, scale in zip(x, tile.repeat(refs.scale))]
    if refs.shift is not None:
      y = [a + b for a, b in zip(y, tile.repeat(refs.shift))]
    tile.store(out, y, *index)
    mean[index], inverse_deviation[index] = center[:, 0], inverse[:, 0]
    return carry

  tile.visit(shape, refs, take)


def _backward_kernel(shape, tile, refs, mean, inverse_deviation, gradient, of_total,
                     results):
  """Computes the gradients of some vectors, and partial gradients of the parameters."""
  names = [x for x in ('scale', 'shift', 'bias') if getattr(results, x) is not None]

  def take(index, keep, sums):
    inverse, center = inverse_deviation[index][:, None], mean[index][:, None]
    x = [(part - center) * inverse  # normalized
         for part in _sum(shape, tile, refs, index, keep)]
    g = tile.load(gradient, *index)
    scaled = [a * b for a, b in zip(g, tile.repeat(refs.scale))]
    constant = -inverse * _total(scaled) / shape.width
    slope = -inverse * _total([a * b for a, b in zip(scaled, x)]) / shape.width
    d_x = [a * inverse + (b * slope + constant) for a, b in zip(scaled, x)]
    if of_total is not None:
      d_x = [a + b for a, b in zip(d_x, tile.load(of_total, *index))]
    tile.store(results.x, d_x, *index)
    d_y = _drop(shape, keep, d_x)
    if results.y is not None:
      tile.store(results.y, d_y, *index)
    partial_sums = {'scale': [a * b for a, b in zip(g, x)], 'shift': g, 'bias': d_y}
    return [[a + b for a, b in zip(total, partial_sums[name])]
            for name, total in zip(names, sums)]

  # Sums over the rows of a program cross its warps, so they come only at its end.
  zeros = [[jnp.zeros((tile.rows, size), jnp.float32) for _, size in tile.columns]
           for _ in names]
  for name, parts in zip(names, tile.visit(shape, refs, take, zeros)):
    tile.store(getattr(results, name), [x.sum(0) for x in parts])


def _specs(x: Any, tile: _Tile) -> pl.BlockSpec | None:
  """A program's part of an array [B, L, ...], or a whole vector for all programs."""
  if x is None:
    return None
  if x.ndim == 1:
    return pl.BlockSpec(x.shape, lambda *_: (0,))
  block = (tile.rows * tile.turns, tile.tokens, *x.shape[2:])
  return pl.BlockSpec(block, lambda i, j: (i, j, *[0] * (x.ndim - 2)))


def _call(kernel, shape: _Shape, tile: _Tile, out_shape, out_specs, *arguments):
  size = sum(math.prod(x.shape) * x.dtype.itemsize
             for x in jax.tree.leaves((arguments, out_shape)))
  specs = [_Inputs(*(_specs(x, tile) for x in arguments[0])),
           *(_specs(x, tile) for x in arguments[1:])]
  batch, length, _ = arguments[0].x.shape
  return pl.pallas_call(
      functools.partial(kernel, shape, tile),
      grid=(batch // (tile.rows * tile.turns), length // tile.tokens), in_specs=specs,
      out_specs=out_specs, out_shape=out_shape, interpret=shape.interpret,
      name=kernel.__name__.strip('_').replace('kernel', 'norm'),
      # XLA cannot look into a kernel: without an estimate it counts the kernel as free.
      cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=size),
      compiler_params=pltriton.CompilerParams(num_warps=tile.warps, num_stages=1),
  )(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(shape: _Shape, inputs: _Inputs):
  return _forward(shape, inputs)[0]


def _forward(shape, inputs):
  tile = _Tile.of(*inputs.x.shape)
  like = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
  number = jax.ShapeDtypeStruct(inputs.x.shape[:2], jnp.float32)
  writes_sum = shape.returns_sum and inputs.y is not None  # without y, the sum is x
  results = [like, like if writes_sum else None, number, number]
  out, total, mean, inverse_deviation = _call(
      _forward_kernel, shape, tile, results, [_specs(x, tile) for x in results], inputs)
  if shape.returns_sum and not writes_sum:
    total = inputs.x
  return (out, total), (inputs, mean, inverse_deviation)


def _backward(shape, saved, gradients):
  inputs, mean, inverse_deviation = saved
  batch, length, width = inputs.x.shape
  tile = _Tile.of(batch, length, width)
  # Each program sums its share of the gradients of the vectors.
  partial_sums = jax.ShapeDtypeStruct(
      (batch // (tile.rows * tile.turns), length // tile.tokens, width), jnp.float32)
  share = pl.BlockSpec((None, None, width), lambda i, j: (i, j, 0))
  # Without dropout, y has the gradient of x.
  wanted = inputs._replace(y=inputs.y if shape.rate else None, words=None, first=None)
  shapes = _Inputs(*(x if x is None else partial_sums if x.ndim == 1
                     else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted))
  specs = _Inputs(*(share if x is partial_sums else _specs(x, tile) for x in shapes))
  results, = _call(_backward_kernel, shape, tile, [shapes], [specs], inputs, mean,
                   inverse_deviation, *gradients)
  if inputs.y is not None and not shape.rate:
    results = results._replace(y=results.x.astype(inputs.y.dtype))
  vectors = {name: getattr(results, name).sum((0, 1)).astype(getattr(inputs, name).dtype)
             for name in ('scale', 'shift', 'bias') if getattr(inputs, name) is not None}
  return results._replace(**vectors),


_norm.defvjp(_forward, _backward)


def can_run(width: int) -> bool:
  """True if the current trace can use the kernels for norms of this width D."""
  # On a model axis, every device would exchange the gradients of x with its neighbors.
  return width <= _MOST and sharding.has_triton() and sharding.num_shards('heads') == 1


def norm(x: jax.Array, y: jax.Array | None, bias: jax.Array | None, scale: jax.Array,
         shift: jax.Array | None, *, epsilon: float, rate: float = 0.0,
         random: jax.Array | None = None, returns_sum: bool = False
         ) -> tuple[jax.Array, jax.Array | None]:
  """LayerNorm(x + dropout(y + bias)) * scale + shift, computed in float32.

  Off GPUs, Pallas interprets the kernels, which is slow: for tests only.

  Args:
    x: [B, L, D].
    y: [B, L, D]; None = normalize x alone.
    bias: [D]; None = zeros.
    scale: [D].
    shift: [D]; None = zeros.
    epsilon: added to the variance.
    rate: share of dropped values.
    random: the dropout key, with which `nn.Dropout` would drop the same values; None if
      the rate is 0.
    returns_sum: also return x + dropout(y + bias).

  Returns:
    ([B, L, D] in the dtype of x, the sum in that dtype or None).
  """
  batch, _, width = x.shape
  shape = _Shape(width, epsilon, rate if y is not None else 0.0, returns_sum,
                 not sharding.has_triton())
  words = jax.random.key_data(random) if shape.rate else jnp.zeros(2, jnp.uint32)
  rows = jnp.arange(batch, dtype=jnp.uint32)

  def local(x, y, bias, scale, shift, words, rows):
    vectors = [z if z is None else z.astype(jnp.float32) for z in (scale, shift)]
    return _norm(shape, _Inputs(x, y, bias, *vectors, words, rows[:1]))

  vector = ('embed_act',)
  return sharding.on_each_chip(
      local, (_TOKENS, _TOKENS, vector, vector, vector, (None,), ('batch',)),
      [_TOKENS, _TOKENS])(x, y, bias, scale, shift, words, rows)
