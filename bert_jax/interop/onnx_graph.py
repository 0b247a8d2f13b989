"""Converts a JAX function to an ONNX graph with dynamic sizes.

The function is traced with symbolic sizes, and each primitive of its jaxpr becomes one or
a few nodes. Operations on constants run at once: the stacked parameters of a scan become
the weights of each layer. The nodes are those that runtimes fuse and quantize: MatMul with
constant weights, Softmax, LayerNormalization, and onnxruntime's pattern of GELU.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.export
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import helper, numpy_helper

from bert_jax.model.layers import LayerNorm

_FORMAT = 10  # the version of the file format: onnxruntime 1.20 and newer read it
_BEFORE_FIRST = np.iinfo(np.int64).min  # the end of a slice that runs down to index 0

Shape = tuple[Any, ...]  # numbers, and symbolic sizes of jax.export


class Value(NamedTuple):
  """A value of the jaxpr: the name of a tensor in the graph, or a constant.

  `stored` is the shape of that tensor or constant. It is 1 where the value repeats one
  entry: elementwise nodes broadcast it, and before other nodes it is expanded.
  """

  tensor: str | np.ndarray
  shape: Shape
  stored: Shape

  @property
  def is_constant(self) -> bool:
    return isinstance(self.tensor, np.ndarray)


def _constant(array: Any) -> Value:
  array = np.asarray(array)
  return Value(array, array.shape, array.shape)


# A LayerNorm as one equation of the jaxpr, which becomes one node.
_LAYER_NORM = core.Primitive('layer_norm')
_LAYER_NORM.def_abstract_eval(lambda x, scale, bias, *, epsilon: x)


def _keep_norms(call: Callable, arguments: Sequence[Any], keywords: Mapping[str, Any],
                context: nn.module.InterceptorContext) -> jax.Array:
  """Replaces the computation of each LayerNorm while the function is traced."""
  if not isinstance(context.module, LayerNorm) or context.method_name != '__call__':
    return call(*arguments, **keywords)
  own = context.module.variables['params']
  bias = own.get('bias', jnp.zeros_like(own['scale']))
  return _LAYER_NORM.bind(*arguments, own['scale'], bias,
                          epsilon=context.module.config.layer_norm_eps)


class _Size:
  """A size of a tensor in the graph, an int64 array [1]; symbolic sizes are sums of these."""

  def __init__(self, graph: 'Graph', name: str):
    self.graph, self.name = graph, name

  def _apply(self, node: str, other: 'int | _Size', is_reversed: bool = False) -> '_Size':
    name = other.name if isinstance(other, _Size) else self.graph.weight(np.array([other]))
    pair = (name, self.name) if is_reversed else (self.name, name)
    return _Size(self.graph, self.graph.node(node, *pair))

  def __add__(self, other):
    return self._apply('Add', other)

  def __mul__(self, other):
    return self._apply('Mul', other)

  def __sub__(self, other):
    return self._apply('Sub', other)

  def __rsub__(self, other):
    return self._apply('Sub', other, is_reversed=True)

  def __neg__(self):
    return self._apply('Mul', -1)

  def __pow__(self, exponent):
    return self if exponent == 1 else self * self**(exponent - 1)

  __radd__, __rmul__ = __add__, __mul__


class Graph:
  """The nodes and weights of a graph under construction."""

  def __init__(self):
    self.nodes: list[onnx.NodeProto] = []
    self.weights: dict[str, onnx.TensorProto] = {}
    self.sizes: dict[str, _Size] = {}  # by the text of the symbolic size
    self._names: dict[Any, str] = {}  # of weights, by their content
    self._kept: list[np.ndarray] = []  # so that no id of an array occurs twice

  def node(self, kind: str, *inputs: str, outputs: int = 0, **attributes: Any) -> Any:
    """Adds a node; returns the name of its output, or the names of its `outputs`."""
    first = f'{kind}_{len(self.nodes)}'
    names = [f'{first}_{i}' for i in range(outputs)] if outputs else [first]
    self.nodes.append(helper.make_node(kind, inputs, names, name=first, **attributes))
    return names if outputs else first

  def weight(self, array: np.ndarray) -> str:
    """Returns the name of a constant tensor; equal small ones are stored once."""
    array = np.asarray(array)
    if array.size <= 64:
      key = (array.dtype.str, array.shape, array.tobytes())
    else:
      key = id(array)
      self._kept.append(array)
    if key not in self._names:
      self._names[key] = name = f'weight_{len(self.weights)}'
      self.weights[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
    return self._names[key]

  def size(self, size: Any) -> str:
    """Returns the name of a size as an int64 array [1]."""
    if isinstance(size, (int, np.integer)):
      return self.weight(np.array([size]))
    text = str(size)
    if text not in self.sizes:
      # jax.export writes symbolic sizes as Python expressions: b*l, max(0, l - 1).
      names = {'__builtins__': {}, 'max': self._extreme('Max'), 'min': self._extreme('Min')}
      value = eval(text.replace('^', '**'), names, self.sizes)
      self.sizes[text] = value if isinstance(value, _Size) else _Size(self, self.size(value))
    return self.sizes[text].name

  def _extreme(self, node: str) -> Callable[[Any, Any], _Size]:
    def run(a, b):
      first, second = (_Size(self, self.size(x)) if isinstance(x, int) else x for x in (a, b))
      return first._apply(node, second)

    return run

  def shape(self, shape: Shape) -> str:
    """Returns the name of a shape as an int64 array."""
    if all(isinstance(size, (int, np.integer)) for size in shape):
      return self.weight(np.array(shape, np.int64))
    key = f'[{", ".join(map(str, shape))}]'
    if key not in self._names:
      self._names[key] = self.node('Concat', *map(self.size, shape), axis=0)
    return self._names[key]

  def name(self, value: Value) -> str:
    """Returns the tensor of a value as it is stored."""
    return self.weight(value.tensor) if value.is_constant else value.tensor

  def whole(self, value: Value) -> str:
    """Returns the tensor of a value in its own shape."""
    if value.stored == value.shape:
      return self.name(value)
    return self.node('Expand', self.name(value), self.shape(value.shape))


# ---- Primitives: (graph, inputs, parameters, shape and dtype of the output) -> value ----

_ELEMENTWISE = {
    'abs': 'Abs', 'add': 'Add', 'add_any': 'Add', 'and': 'And', 'cos': 'Cos', 'div': 'Div',
    'eq': 'Equal', 'erf': 'Erf', 'exp': 'Exp', 'ge': 'GreaterOrEqual', 'gt': 'Greater',
    'le': 'LessOrEqual', 'log': 'Log', 'logistic': 'Sigmoid', 'lt': 'Less', 'max': 'Max',
    'min': 'Min', 'mul': 'Mul', 'neg': 'Neg', 'not': 'Not', 'or': 'Or', 'pow': 'Pow',
    'sign': 'Sign', 'sin': 'Sin', 'sqrt': 'Sqrt', 'sub': 'Sub', 'tanh': 'Tanh',
    'select_n': 'Where', 'ceil': 'Ceil', 'floor': 'Floor'}
_REDUCTIONS = {'reduce_sum': 'ReduceSum', 'reduce_max': 'ReduceMax',
               'reduce_min': 'ReduceMin'}


def _joined(inputs: Sequence[Value], rank: int) -> Shape:
  """The shape of an elementwise node over stored tensors."""
  padded = [(1,) * (rank - len(x.stored)) + tuple(x.stored) for x in inputs]
  return tuple(next((size for size in sizes if not _is_one(size)), 1)
               for sizes in zip(*padded))


def _is_one(size: Any) -> bool:
  return isinstance(size, (int, np.integer)) and size == 1


def _elementwise(graph: Graph, name: str, inputs: Sequence[Value], out: Any) -> Value:
  stored = _joined(inputs, len(out.shape))
  if name == 'select_n':  # the condition, the value for False, the value for True
    inputs = [inputs[0], inputs[2], inputs[1]]
  # onnxruntime fuses x * 0.5 * (1 + erf(x / sqrt(2))), with a division.
  is_half = [x.is_constant and x.tensor.size == 1
             and math.isclose(x.tensor.item(), 0.5**0.5, rel_tol=1e-6) for x in inputs]
  if name == 'mul' and any(is_half):
    inputs = [inputs[is_half.index(False)], _constant(np.float32(2**0.5))]
    name = 'div'
  return Value(graph.node(_ELEMENTWISE[name], *map(graph.name, inputs)), out.shape, stored)


def _unary(build: Callable[..., str]) -> Callable[..., Value]:
  """A primitive of one input that several nodes compute elementwise."""

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
  """Products as MatMul if each factor has at most one axis of its own beside the batch."""
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
  """Rows of a table, an index into one axis, or (with a batch) positions of each row."""
  x, index = inputs
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  axis, *others = numbers.start_index_map
  if not others and not numbers.collapsed_slice_dims and index.shape == (1,):
    # A slice of one axis whose first place is a number.
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
  # The last axis of the indices is the index vector, of length 1.
  place = Value(index.tensor, index.shape, index.stored)
  flat = _squeeze(graph, [place], {'dimensions': (len(index.shape) - 1,)},
                  jax.ShapeDtypeStruct(index.shape[:-1], jnp.int32))
  name = graph.node('Gather', graph.whole(x), graph.whole(flat), axis=axis)
  return Value(name, out.shape, out.shape)


_PRIMITIVES = {
    **{name: _reduce(kind) for name, kind in _REDUCTIONS.items()},
    'broadcast_in_dim': _broadcast, 'reshape': _reshape, 'transpose': _transpose,
    'squeeze': _squeeze, 'slice': _slice, 'pad': _pad, 'concatenate': _concatenate,
    'stack': _stack, 'iota': _iota, 'cumsum': _cumsum, 'dot_general': _dot,
    'gather': _gather, 'rev': _reverse, 'dim_as_value': _size_value, 'clamp': _clamp,
    'convert_element_type': _unary(_cast), 'integer_pow': _unary(_power),
    'log1p': _unary(_log1p),
    'square': _unary(lambda graph, x, *_: graph.node('Mul', x, x)),
    'rsqrt': _unary(lambda graph, x, *_: graph.node('Reciprocal', graph.node('Sqrt', x)))}
_IDENTITIES = ('stop_gradient', 'copy', 'copy_p', 'optimization_barrier',
               'sharding_constraint', 'layout_constraint')


def _parts(graph: Graph, name: str, x: Value, params: Mapping[str, Any],
           outs: Sequence[Any]) -> list[Value]:
  """split and unstack, which have several outputs."""
  axis = params['axis']
  sizes = params.get('sizes') or (1,) * len(outs)
  names = graph.node('Split', graph.whole(x), graph.weight(np.array(sizes)), axis=axis,
                     outputs=len(outs))
  if name == 'unstack':
    names = [graph.node('Squeeze', part, graph.weight(np.array([axis]))) for part in names]
  return [Value(part, out.shape, out.shape) for part, out in zip(names, outs)]


def _scan(graph: Graph, inputs: list[Value], params: Mapping[str, Any]) -> list[Value]:
  """A loop over layers, unrolled; it returns only what one layer passes to the next."""
  body = params['jaxpr']
  jaxpr = getattr(body, 'jaxpr', body)
  # The inputs of the body are constants, the carry, and one layer of every stacked array.
  stacked = sum(len(x.shape) > len(inner.aval.shape) for x, inner in zip(inputs, jaxpr.invars))
  first = len(inputs) - stacked
  carried = len(jaxpr.outvars)
  fixed, carry = inputs[:first - carried], inputs[first - carried:first]
  if any(a.aval.shape != b.shape for a, b in zip(jaxpr.outvars, carry)):
    raise NotImplementedError('a scan that returns values of every step')
  for i in range(params['length']):
    layer = [_constant(x.tensor[i]) for x in inputs[first:]]
    carry = _run(graph, jaxpr, getattr(body, 'consts', ()), [*fixed, *carry, *layer])
  return carry


def _is_softmax(jaxpr: Any) -> bool:
  """Whether a function with its own gradient is `attention.softmax`."""
  names = [equation.primitive.name for equation in jaxpr.eqns]
  return {'reduce_max', 'exp', 'reduce_sum', 'div'} <= set(names)


def _equation(graph: Graph, equation: Any, inputs: list[Value]) -> list[Value]:
  """Converts one equation of a jaxpr."""
  name, params = equation.primitive.name, equation.params
  outs = [x.aval for x in equation.outvars]
  inner = next((params[key] for key in ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
                if key in params), None)
  if equation.primitive is _LAYER_NORM:
    norm = graph.node('LayerNormalization', *map(graph.whole, inputs), axis=-1,
                      epsilon=params['epsilon'])
    return [Value(norm, outs[0].shape, outs[0].shape)]
  if name.startswith('custom_vjp_call') and _is_softmax(getattr(inner, 'jaxpr', inner)):
    softmax = graph.node('Softmax', graph.whole(inputs[0]), axis=-1)
    return [Value(softmax, outs[0].shape, outs[0].shape)]
  if name == 'scan':
    return _scan(graph, inputs, params)
  if inner is not None:
    return _run(graph, getattr(inner, 'jaxpr', inner), getattr(inner, 'consts', ()), inputs)
  if name in _IDENTITIES:
    return inputs
  is_static = all(isinstance(size, int) for out in outs for size in out.shape)
  if is_static and name != 'dim_as_value' and all(x.is_constant for x in inputs):
    arrays = [np.broadcast_to(x.tensor, x.shape) for x in inputs]
    done = equation.primitive.bind(*arrays, **params)
    return [_constant(x) for x in (done if equation.primitive.multiple_results else [done])]
  if name in ('split', 'unstack'):
    return _parts(graph, name, inputs[0], params, outs)
  if name in _ELEMENTWISE:
    return [_elementwise(graph, name, inputs, outs[0])]
  if name not in _PRIMITIVES:
    raise NotImplementedError(f'no node of ONNX for {name} of JAX')
  return [_PRIMITIVES[name](graph, inputs, params, outs[0])]


def _run(graph: Graph, jaxpr: Any, constants: Sequence[Any],
         inputs: Sequence[Value]) -> list[Value]:
  """Converts the equations of a jaxpr; returns the values of its outputs."""
  values = dict(zip(jaxpr.constvars, map(_constant, constants)))
  values |= zip(jaxpr.invars, inputs)

  def read(x):
    return _constant(np.asarray(x.val, x.aval.dtype)) if hasattr(x, 'val') else values[x]

  for equation in jaxpr.eqns:
    if not equation.outvars:  # the rest of a call whose outputs were constants
      continue
    outputs = _equation(graph, equation, [read(x) for x in equation.invars])
    values |= zip(equation.outvars, outputs)
  return [read(x) for x in jaxpr.outvars]


def convert(function: Callable[..., Sequence[jax.Array]], inputs: Mapping[str, str],
            outputs: Sequence[str], *, longest: int, opset: int) -> onnx.ModelProto:
  """Converts a function to a model in ONNX.

  Args:
    function: takes one int32 array for each input, and returns float32 arrays. Its
      parameters are constants of the graph.
    inputs: the axes of each input by its name, such as {'input_ids': 'b, l'}. The graph
      takes int64 arrays.
    outputs: the names of the results.
    longest: the largest size of the axis l.
    opset: the version of ONNX's operators.

  Raises:
    NotImplementedError: a primitive of the function has no counterpart.
  """
  scope = jax.export.SymbolicScope((f'l <= {longest}',))
  shapes = [jax.export.symbolic_shape(axes, scope=scope) for axes in inputs.values()]
  arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
  with nn.intercept_methods(_keep_norms):
    closed = jax.make_jaxpr(function)(*arguments)
  graph, values = Graph(), []
  for name, shape in zip(inputs, shapes):
    for i, size in enumerate(shape):
      if str(size) not in graph.sizes:
        graph.sizes[str(size)] = _Size(graph, graph.node('Shape', name, start=i, end=i + 1))
    values.append(Value(graph.node('Cast', name, to=onnx.TensorProto.INT32), shape, shape))
  results = _run(graph, closed.jaxpr, closed.consts, values)
  for name, value in zip(outputs, results, strict=True):
    graph.nodes.append(helper.make_node('Identity', [graph.whole(value)], [name]))

  def declared(names, kind, all_shapes):
    axes = {'b': 'batch_size', 'l': 'sequence_length', 'c': 'num_choices'}
    return [helper.make_tensor_value_info(
        name, kind, [size if isinstance(size, int) else axes.get(str(size), str(size))
                     for size in shape]) for name, shape in zip(names, all_shapes)]

  made = helper.make_graph(
      graph.nodes, 'bert_jax', declared(inputs, onnx.TensorProto.INT64, shapes),
      declared(outputs, onnx.TensorProto.FLOAT, [value.shape for value in results]),
      list(graph.weights.values()))
  return helper.make_model(made, ir_version=_FORMAT, producer_name='bert_jax',
                           opset_imports=[helper.make_opsetid('', opset)])
