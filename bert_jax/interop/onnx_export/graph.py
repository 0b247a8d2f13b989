"""A graph of ONNX under construction: its nodes, weights and sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

Shape = tuple[Any, ...]  # numbers, and symbolic sizes of jax.export


class Value(NamedTuple):
  """A value of the jaxpr: the name of a tensor in the graph, or a constant.

  `stored` is the shape of that tensor or constant. Its size is 1 on an axis where the
  value repeats one entry. Elementwise nodes broadcast this axis; for other nodes,
  `Graph.whole` expands the tensor.
  """

  tensor: str | np.ndarray
  shape: Shape
  stored: Shape

  @property
  def is_constant(self) -> bool:
    return isinstance(self.tensor, np.ndarray)


def constant(array: Any) -> Value:
  """Wraps an array, which stays out of the graph until a node needs it."""
  array = np.asarray(array)
  return Value(array, array.shape, array.shape)


class Size:
  """A size of a tensor in the graph, an int64 array [1], with its arithmetic."""

  def __init__(self, graph: 'Graph', name: str):
    self.graph, self.name = graph, name

  def _apply(self, node: str, other: 'int | Size', is_reversed: bool = False) -> 'Size':
    name = other.name if isinstance(other, Size) else self.graph.weight(np.array([other]))
    pair = (name, self.name) if is_reversed else (self.name, name)
    return Size(self.graph, self.graph.node(node, *pair))

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
    self.sizes: dict[str, Size] = {}  # by the text of the symbolic size
    self._names: dict[Any, str] = {}  # of weights, by their content
    self._kept: list[np.ndarray] = []  # keeps arrays alive, so that no id is reused

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
      self.sizes[text] = value if isinstance(value, Size) else Size(self, self.size(value))
    return self.sizes[text].name

  def _extreme(self, node: str) -> Callable[[Any, Any], Size]:
    """max or min of two sizes, one of which may be a number."""

    def run(a, b):
      first, second = (Size(self, self.size(x)) if isinstance(x, int) else x for x in (a, b))
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
    """Returns the name of the tensor of a value, in its stored shape."""
    return self.weight(value.tensor) if value.is_constant else value.tensor

  def whole(self, value: Value) -> str:
    """Returns the name of a tensor that has the whole shape of a value."""
    if value.stored == value.shape:
      return self.name(value)
    return self.node('Expand', self.name(value), self.shape(value.shape))
