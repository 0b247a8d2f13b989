"""Converts a JAX function to an ONNX graph with dynamic sizes.

The function is traced with symbolic sizes, and each equation of its jaxpr becomes one or a
few nodes. Operations on constants run during the conversion: for example, the stacked
parameters of a scan become the weights of each layer. The graph uses nodes that runtimes
fuse and quantize: MatMul with constant weights, Softmax, LayerNormalization, and
onnxruntime's pattern of GELU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.export
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import helper

from bert_jax.interop.onnx_export import nodes
from bert_jax.interop.onnx_export.graph import Graph, Size, Value, constant
from bert_jax.model.layers import LayerNorm

_FORMAT = 10  # the version of the file format: onnxruntime 1.20 and newer read it

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


def _scan(graph: Graph, inputs: list[Value], params: Mapping[str, Any]) -> list[Value]:
  """Unrolls a scan over layers; returns the carry after the last layer."""
  body = params['jaxpr']
  jaxpr = getattr(body, 'jaxpr', body)
  # The inputs of the body are constants, the carry, and one layer of every stacked array.
  stacked = sum(len(x.shape) > len(inner.aval.shape)
                for x, inner in zip(inputs, jaxpr.invars))
  first = len(inputs) - stacked
  carried = len(jaxpr.outvars)
  fixed, carry = inputs[:first - carried], inputs[first - carried:first]
  if any(a.aval.shape != b.shape for a, b in zip(jaxpr.outvars, carry)):
    raise NotImplementedError('a scan that returns values of every step')
  for i in range(params['length']):
    layer = [constant(x.tensor[i]) for x in inputs[first:]]
    carry = _run(graph, jaxpr, getattr(body, 'consts', ()), [*fixed, *carry, *layer])
  return carry


def _is_softmax(jaxpr: Any) -> bool:
  """Returns True if a function with its own gradient is `attention.softmax`."""
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
  if name in nodes.IDENTITIES:
    return inputs
  is_static = all(isinstance(size, int) for out in outs for size in out.shape)
  if is_static and name != 'dim_as_value' and all(x.is_constant for x in inputs):
    arrays = [np.broadcast_to(x.tensor, x.shape) for x in inputs]
    done = equation.primitive.bind(*arrays, **params)
    return [constant(x) for x in (done if equation.primitive.multiple_results else [done])]
  if name in ('split', 'unstack'):
    return nodes.parts(graph, name, inputs[0], params, outs)
  if name in nodes.ELEMENTWISE:
    return [nodes.elementwise(graph, name, inputs, outs[0])]
  if name not in nodes.PRIMITIVES:
    raise NotImplementedError(f'no node of ONNX for {name} of JAX')
  return [nodes.PRIMITIVES[name](graph, inputs, params, outs[0])]


def _run(graph: Graph, jaxpr: Any, constants: Sequence[Any],
         inputs: Sequence[Value]) -> list[Value]:
  """Converts the equations of a jaxpr; returns the values of its outputs."""
  values = dict(zip(jaxpr.constvars, map(constant, constants)))
  values |= zip(jaxpr.invars, inputs)

  def read(x):
    return constant(np.asarray(x.val, x.aval.dtype)) if hasattr(x, 'val') else values[x]

  for equation in jaxpr.eqns:
    if not equation.outvars:  # what remains of a call whose outputs became constants
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
        graph.sizes[str(size)] = Size(graph, graph.node('Shape', name, start=i, end=i + 1))
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
