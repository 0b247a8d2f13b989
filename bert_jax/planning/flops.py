"""Counts the FLOPs of a compiled program from its text, if the compiler does not."""

import math
import re

from bert_jax.planning import hlo

_SHAPE = re.compile(r'^\w+\[([\d,]*)\]')
_CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}')


def _shape(x: hlo.Instruction) -> list[int]:
  return hlo.integers(_SHAPE.match(x.result)[1])


def products(text: str) -> float:
  """FLOPs of all matrix products of a program, including fusions and loops.

  A multiply-add counts 2. Products in kernels, such as attention, are not in the text.
  """
  module, total = hlo.Module(text), 0.0
  for computation, x, times in module.walk(into_all=True):
    if x.opcode == 'dot':
      factor = _shape(module.computations[computation][x.operands[0]])
      axes = hlo.integers(_CONTRACTED.search(x.attributes)[1])
      total += times * 2 * math.prod(_shape(x)) * math.prod(factor[i] for i in axes)
  return total
