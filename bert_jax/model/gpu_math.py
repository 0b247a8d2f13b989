"""Functions that the Triton kernels share; the arithmetic is in NVIDIA's assembly.

Triton emits no fused multiply-adds, and guards exponentials and divisions against very
small numbers that do not occur here. That takes a third more instructions, and
instructions limit these kernels as much as memory bandwidth does. Pallas' interpreter
runs no assembly: with `interpret` the functions compute the same without it.
"""

import math
import struct

import jax
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

# Factors of t, t^2, ... in the formula 7.1.26 of Abramowitz and Stegun (1964) for erf.
_FACTORS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_T, _BELL = 0.3275911 * math.sqrt(0.5), -0.5 * math.log2(math.e)


def _assemble(text: str, *arguments: jax.Array) -> jax.Array:
  """Runs NVIDIA's assembly, which computes $0 from float32 arguments $1, $2."""
  like = jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)
  registers = ','.join(['=&f'] + ['f'] * len(arguments))
  x, = pltriton.elementwise_inline_asm(
      text, args=arguments, constraints=registers, pack=1, result_shape_dtypes=[like])
  return x


def _ptx() -> str:
  """PTX for the normal distribution function of $1, given exp(-$1^2 / 2) in $2."""
  def number(value):
    return f'0f{struct.unpack(">I", struct.pack(">f", value))[0]:08X}'

  highest, *others = (number(0.5 * x) for x in reversed(_FACTORS))
  return '\n'.join([
      '{ .reg .f32 t, p, q; .reg .pred above;',
      f'abs.f32 t, $1; fma.rn.f32 t, t, {number(_T)}, {number(1)};',
      'rcp.approx.ftz.f32 t, t;',
      f'mov.f32 p, {highest};', *(f'fma.rn.f32 p, p, t, {x};' for x in others),
      f'mul.f32 p, p, t; mul.f32 p, p, $2; sub.f32 q, {number(1)}, p;',
      f'setp.gt.f32 above, $1, {number(0)}; selp.f32 $0, q, p, above; }}'])


def turns(groups: int, most: int) -> int:
  """Returns the groups of vectors that a program takes: a power of two, at most `most`.

  A program takes several only if at least 1,024 programs remain to keep the GPU busy.
  """
  return 1 << max(0, min(most, groups // 1024).bit_length() - 1)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
  """2^x of float32; 0 below 2^-126."""
  return jnp.exp2(x) if interpret else _assemble('ex2.approx.ftz.f32 $0, $1;', x)


def normal(x: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
  """(bell: exp(-x^2 / 2), the normal distribution function of x), float32.

  Pallas' Triton has no erf. The formula of `_FACTORS` differs from erf by at most 1.5e-7,
  about a rounding error of float32, and its exponential is also the derivative's.
  """
  bell = exp2(x * x * _BELL, interpret)
  if not interpret:
    return bell, _assemble(_ptx(), x, bell)
  t = 1 / (1 + jnp.abs(x) * _T)
  tail = bell * sum(0.5 * factor * t**i for i, factor in enumerate(_FACTORS, 1))
  return bell, jnp.where(x > 0, 1 - tail, tail)
