"""The nodes of ONNX for the primitives of JAX.

Each function takes (graph, inputs, parameters of the primitive, shape and dtype of the
output) and returns the output. An elementwise node takes tensors as they are stored, and
broadcasts; other nodes take them whole.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import helper

from bert_jax.interop.onnx_export.graph import Graph, Shape, Value, constant

_BEFORE_FIRST = np.iinfo(np.int64).min  # the end of a slice that runs down to index 0

ELEMENTWISE = {
    'abs': 'Abs', 'add': 'Add', 'add_any': 'Add', 'and': 'And', 'cos': 'Cos', 'div': 'Div',
    'eq': 'Equal', 'erf': 'Erf', 'exp': 'Exp', 'ge': 'GreaterOrEqual', 'gt': 'Greater',
    'le': 'LessOrEqual', 'log': 'Log', 'logistic': 'Sigmoid', 'lt': 'Less', 'max': 'Max',
    'min': 'Min', 'mul': 'Mul', 'neg': 'Neg', 'not': 'Not', 'or': 'Or', 'pow': 'Pow',
    'sign': 'Sign', 'sin': 'Sin', 'sqrt': 'Sqrt', 'sub': 'Sub', 'tanh': 'Tanh',
    'select_n': 'Where', 'ceil': 'Ceil', 'floor': 'Floor'}
_REDUCTIONS = {'reduce_sum': 'ReduceSum', 'reduce_max': 'ReduceMax',
               'reduce_min': 'ReduceMin'}


def _joined(inputs: Sequence[Value], rank: int) -> Shape:
  """The stored shape of the result of an elementwise node."""
  padded = [(1,) * (rank - len(x.stored)) + tuple(x.stored) for x in inputs]
  return tuple(next((size for size in sizes if not _is_one(size)), 1)
               for sizes in zip(*padded))


def _is_one(size: Any) -> bool:
  return isinstance(size, (int, np.integer)) and size == 1


def elementwise(graph: Graph, name: str, inputs: Sequence[Value], out: Any) -> Value:
  """Converts a primitive of ELEMENTWISE."""
  stored = _joined(inputs, len(out.shape))
  if name == 'select_n':  # the condition, the value for False, the value for True
    inputs = [inputs[0], inputs[2], inputs[1]]
  # onnxruntime fuses x * 0.5 * (1 + erf(x / sqrt(2))) only with the division.
  is_half = [x.is_constant and x.tensor.size == 1
             and math.isclose(x.tensor.item(), 0.5**0.5, rel_tol=1e-6) for x in inputs]
  if name == 'mul' and any(is_half):
    inputs = [inputs[is_half.index(False)], constant(np.float32(2**0.5))]
    name = 'div'
  return Value(graph.node(ELEMENTWISE[name], *map(graph.name, inputs)), out.shape, stored)


def _unary(build: Callable[..., str]) -> Callable[..., Value]:
  """Makes the converter of an elementwise primitive of one input; `build` adds nodes."""

  def run(graph, inputs, params, out):
    x, = inputs
    return Value(build(graph, graph.name(x), params, out), out.shape, x.stored)

  return run


def _cast(graph, x, params, out):
  return graph.node('Cast', x, to=helper.np_dtype_to_tensor_dtype(np.dtype(out.dtype)))


def _power(graph, x, params, out):
  return graph.node('Pow', x, graph.weight(np.asarray(params['y'], out.dtype)))


def _log1p(graph, x, params, out):
  return graph.node('Log', graph.node('Add', x, graph.weight(np.ones((), out.dtype))))


def _clamp(graph, inputs, params, out):
  low, x, high = inputs
  above = graph.node('Max', graph.name(x), graph.name(low))
  return Value(graph.node('Min', above, graph.name(high)), out.shape,
               _joined(inputs, len(out.shape)))


def _reduce(kind: str):
  def run(graph, inputs, params, out):
    axes = graph.weight(np.array(params['axes'], np.int64))
    name = graph.node(kind, graph.whole(inputs[0]), axes, keepdims=0)
    return Value(name, out.shape, out.shape)

  return run


def _broadcast(graph, inputs, params, out):
  x, places = inputs[0], params['broadcast_dimensions']
  stored = [1] * len(out.shape)
  for place, size in zip(places, x.stored):
    stored[place] = size
  if x.is_constant:
    return Value(x.tensor.reshape(stored), out.shape, tuple(stored))
  new = [i for i in range(len(out.shape)) if i not in places]
  name = graph.node('Unsqueeze', x.tensor, graph.weight(np.array(new))) if new else x.tensor
  return Value(name, out.shape, tuple(stored))


def _reshape(graph, inputs, params, out):
  name = graph.node('Reshape', graph.whole(inputs[0]), graph.shape(out.shape))
  return Value(name, out.shape, out.shape)


def _transpose(graph, inputs, params, out):
  x, order = inputs[0], params['permutation']
  name = graph.node('Transpose', graph.name(x), perm=list(order))
  return Value(name, out.shape, tuple(x.stored[i] for i in order))


def _squeeze(graph, inputs, params, out):
  x, axes = inputs[0], params['dimensions']
  name = graph.node('Squeeze', graph.name(x), graph.weight(np.array(axes, np.int64)))
  return Value(name, out.shape, tuple(
      size for i, size in enumerate(x.stored) if i not in axes))


def _slice(graph, inputs, params, out):
  x, (first, last) = inputs[0], (params['start_indices'], params['limit_indices'])
  steps = params['strides'] or (1,) * len(first)
  name = graph.node('Slice', graph.whole(x), graph.shape(first), graph.shape(last),
                    graph.weight(np.arange(len(first))), graph.weight(np.array(steps)))
  return Value(name, out.shape, out.shape)


def _pad(graph, inputs, params, out):
  x, value = inputs
  low, high, between = zip(*params['padding_config'])
  if any(between):
    raise NotImplementedError('padding between elements')
  name = graph.node('Pad', graph.whole(x), graph.shape((*low, *high)), graph.name(value))
  return Value(name, out.shape, out.shape)


def _concatenate(graph, inputs, params, out):
  name = graph.node('Concat', *map(graph.whole, inputs), axis=params['dimension'])
  return Value(name, out.shape, out.shape)


def _reverse(graph, inputs, params, out):
  axes = params['dimensions']
  numbers = lambda n: graph.weight(np.array([n] * len(axes)))
  name = graph.node('Slice', graph.whole(inputs[0]), numbers(-1), numbers(_BEFORE_FIRST),
                    graph.weight(np.array(axes)), numbers(-1))
  return Value(name, out.shape, out.shape)


def _stack(graph, inputs, params, out):
  axis = graph.weight(np.array([params['axis']]))
  parts = [graph.node('Unsqueeze', graph.whole(x), axis) for x in inputs]
  return Value(graph.node('Concat', *parts, axis=params['axis']), out.shape, out.shape)


def _iota(graph, inputs, params, out):
  axis = params['dimension']
  scalars = [graph.weight(np.array(0)), graph.node(
      'Squeeze', graph.size(out.shape[axis])), graph.weight(np.array(1))]
  name = _cast(graph, graph.node('Range', *scalars), params, out)
  stored = tuple(size if i == axis else 1 for i, size in enumerate(out.shape))
  others = [i for i in range(len(stored)) if i != axis]
  if others:
    name = graph.node('Unsqueeze', name, graph.weight(np.array(others)))
  return Value(name, out.shape, stored)


def _size_value(graph, inputs, params, out):
  name = graph.node('Squeeze', graph.size(params['dim']))
  return Value(_cast(graph, name, params, out), (), ())


def _cumsum(graph, inputs, params, out):
  name = graph.node('CumSum', graph.whole(inputs[0]), graph.weight(np.array(params['axis'])),
                    reverse=int(params['reverse']))
  return Value(name, out.shape, out.shape)


def _dot(graph, inputs, params, out):
  """MatMul for products of matrices, Gemm for a transposed matrix, Einsum for the rest."""
  (a_sum, b_sum), (a_batch, b_batch) = params['dimension_numbers']
  a, b = inputs
  batch, (a_rank, b_rank) = len(a_batch), (len(a.shape), len(b.shape))
  result = lambda name: Value(name, out.shape, out.shape)
  if not batch and tuple(a_sum) == (a_rank - 1,) and b_rank == 2:
    if tuple(b_sum) == (0,):
      return result(graph.node('MatMul', graph.whole(a), graph.whole(b)))
    if a_rank == 2:  # as the decoder multiplies by the table of the embeddings
      return result(graph.node('Gemm', graph.whole(a), graph.whole(b), transB=1))
  leads = tuple(range(batch))
  if (tuple(a_batch), tuple(b_batch)) == (leads, leads) and len(a_sum) == 1 and (
      a_rank, b_rank) == (batch + 2, batch + 2):
    swapped = [*leads, batch + 1, batch]
    left, right = graph.whole(a), graph.whole(b)
    if a_sum[0] == batch:
      left = graph.node('Transpose', left, perm=swapped)
    if b_sum[0] == batch + 1:
      right = graph.node('Transpose', right, perm=swapped)
    return result(graph.node('MatMul', left, right))
  letters = iter('abcdefghijklmnopqrstuvwxyz')
  of_a, of_b = [next(letters) for _ in a.shape], [next(letters) for _ in b.shape]
  for i, j in zip((*a_sum, *a_batch), (*b_sum, *b_batch)):
    of_b[j] = of_a[i]
  kept = [of_a[i] for i in a_batch]
  kept += [x for i, x in enumerate(of_a) if i not in (*a_sum, *a_batch)]
  kept += [x for i, x in enumerate(of_b) if i not in (*b_sum, *b_batch)]
  equation = f'{"".join(of_a)},{"".join(of_b)}->{"".join(kept)}'
  return result(graph.node('Einsum', graph.whole(a), graph.whole(b), equation=equation))


def _gather(graph, inputs, params, out):
  """A slice of one axis, entries of one axis, or (with a batch) positions of each row."""
  x, index = inputs
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  axis, *others = numbers.start_index_map
  if not others and not numbers.collapsed_slice_dims and index.shape == (1,):
    # A slice of one axis whose start is computed.
    first = _cast(graph, graph.whole(index), params, np.empty(0, np.int64))
    name = graph.node('Slice', graph.whole(x), first,
                      graph.node('Add', first, graph.size(sizes[axis])),
                      graph.weight(np.array([axis])))
    return Value(name, out.shape, out.shape)
  batch = tuple(numbers.operand_batching_dims)
  taken = [size for i, size in enumerate(sizes) if i not in (axis, *batch)]
  kept = [size for i, size in enumerate(x.shape) if i not in (axis, *batch)]
  if others or numbers.collapsed_slice_dims != (axis,) or taken != kept:
    raise NotImplementedError(f'a gather with {numbers}')
  if batch:
    if batch != (0,) or axis != 1:
      raise NotImplementedError(f'a gather with {numbers}')
    name = graph.node('GatherND', graph.whole(x), _cast(
        graph, graph.whole(index), params, np.empty(0, np.int64)), batch_dims=1)
    return Value(name, out.shape, out.shape)
  # The last axis of the indices is an index vector of length 1.
  flat = _squeeze(graph, [index], {'dimensions': (len(index.shape) - 1,)},
                  jax.ShapeDtypeStruct(index.shape[:-1], jnp.int32))
  name = graph.node('Gather', graph.whole(x), graph.whole(flat), axis=axis)
  return Value(name, out.shape, out.shape)


PRIMITIVES = {
    **{name: _reduce(kind) for name, kind in _REDUCTIONS.items()},
    'broadcast_in_dim': _broadcast, 'reshape': _reshape, 'transpose': _transpose,
    'squeeze': _squeeze, 'slice': _slice, 'pad': _pad, 'concatenate': _concatenate,
    'stack': _stack, 'iota': _iota, 'cumsum': _cumsum, 'dot_general': _dot,
    'gather': _gather, 'rev': _reverse, 'dim_as_value': _size_value, 'clamp': _clamp,
    'convert_element_type': _unary(_cast), 'integer_pow': _unary(_power),
    'log1p': _unary(_log1p),
    'square': _unary(lambda graph, x, *_: graph.node('Mul', x, x)),
    'rsqrt': _unary(lambda graph, x, *_: graph.node('Reciprocal', graph.node('Sqrt', x)))}
IDENTITIES = ('stop_gradient', 'copy', 'copy_p', 'optimization_barrier',
              'sharding_constraint', 'layout_constraint')


def parts(graph: Graph, name: str, x: Value, params: Mapping[str, Any],
          outs: Sequence[Any]) -> list[Value]:
  """Converts split and unstack, which have several outputs."""
  axis = params['axis']
  sizes = params.get('sizes') or (1,) * len(outs)
  names = graph.node('Split', graph.whole(x), graph.weight(np.array(sizes)), axis=axis,
                     outputs=len(outs))
  if name == 'unstack':
    names = [graph.node('Squeeze', part, graph.weight(np.array([axis]))) for part in names]
  return [Value(part, out.shape, out.shape) for part, out in zip(names, outs)]
