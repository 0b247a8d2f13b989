"""What the chips send each other: the collectives of a compiled program and their bytes."""

from collections.abc import Iterable
import math
import re
from typing import NamedTuple

from jax.sharding import Mesh
import numpy as np

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4,
          'f32': 4, 's64': 8, 'u64': 8, 'f64': 8}
_INSTRUCTION = re.compile(
    rf'^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({"|".join(KINDS)})(-start)?\((.*)$')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{\s*$')
_SHAPE = re.compile(r'(\w+)\[([\d,]*)\]')
_IOTA = re.compile(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]"
                   r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_LISTS = re.compile(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}')


class Collective(NamedTuple):
  """Operations of one kind over the same mesh axes."""

  kind: str  # one of KINDS
  axes: tuple[str, ...]  # of the mesh, over which values are combined
  devices: int  # that take part in each
  count: float  # operations
  bytes: float  # of their results on each device; of reduce-scatters, of what goes in

  @property
  def sent(self) -> float:
    """Bytes that each device sends, along a ring."""
    return sent(self.kind, self.bytes, self.devices)


def sent(kind: str, size: float, devices: int) -> float:
  """Bytes that each of so many devices sends for a collective of `size` bytes, along a ring."""
  share = (devices - 1) / devices
  return size * {'all-reduce': 2 * share, 'collective-permute': 1.0}.get(kind, share)


def _size(shapes: str) -> int:
  return sum(_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(','))))
             for dtype, dims in _SHAPE.findall(shapes))


def _result_size(result: str, asynchronous: bool) -> int:
  """Bytes of a result; that of an asynchronous start is (operands, results[, contexts])."""
  if not asynchronous or not result.startswith('('):
    return _size(result)
  shapes = [f'{dtype}[{dims}]' for dtype, dims in _SHAPE.findall(result)]
  return max(map(_size, shapes)) if len(shapes) < 5 else _size(result) // 2


def _iota(dims: str, transposed: str | None) -> np.ndarray:
  shape = tuple(map(int, dims.split(',')))
  order = np.arange(math.prod(shape)).reshape(shape)
  return order.transpose(tuple(map(int, transposed.split(',')))) if transposed else order


def _first_group(line: str, size: int) -> np.ndarray:
  """The devices of the first group, by their place in the mesh, in any of the compiler's forms."""
  if found := _IOTA.search(line):
    return _iota(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0]
  if found := _MESH.search(line):
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
    order = np.arange(size) if not found[2] else _iota(found[2], found[3])
    order = order.reshape(tuple(sizes.values()))
    combined = re.findall(r"'(\w+)'", found[4])
    return order[tuple(slice(None) if name in combined else 0 for name in sizes)].reshape(-1)
  if (found := _LISTS.search(line)) and found[1]:
    return np.array(list(map(int, re.findall(r'\{([\d,]+)\}', found[1])[0].split(','))))
  return np.arange(size)  # no groups = all


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
  places = np.array(np.unravel_index(group, mesh.devices.shape))
  return tuple(name for name, place in zip(mesh.axis_names, places) if len(set(place)) > 1)


def read(text: str, mesh: Mesh) -> list[Collective]:
  """The collectives in the text of a compiled program; those in loops are counted once.

  Args:
    text: HLO of the program of each device.
    mesh: whose devices, in order, the program's partitions are.
  """
  found, computation = {}, ''
  for line in text.splitlines():
    if entered := _COMPUTATION.match(line):
      computation = entered[1]
    if not (match := _INSTRUCTION.match(line)):
      continue
    result, kind, start, rest = match.groups()
    size = _result_size(result, bool(start))
    group = _first_group(rest, mesh.size)
    if kind == 'reduce-scatter':
      size *= len(group)
    if computation.startswith('all-reduce-scatter'):  # the TPU compiler's name for the two in one
      kind = 'reduce-scatter'
    key = kind, _axes(group, mesh), len(group)
    count, total = found.get(key, (0, 0))
    if len(group) > 1:
      found[key] = count + 1, total + size
  return [Collective(*key, *values) for key, values in sorted(found.items())]


def extrapolate(one: Iterable[Collective], two: Iterable[Collective],
                layers: float) -> list[Collective]:
  """The collectives of a model of so many layers from those of models of one and of two."""
  first, second = ({c[:3]: (c.count, c.bytes) for c in found} for found in (one, two))
  found = []
  for key in sorted(first.keys() | second.keys()):
    a, b = (np.array(x.get(key, (0, 0)), float) for x in (first, second))
    count, size = a + (layers - 1) * (b - a)
    if count > 0 and size > 0:
      found.append(Collective(*key, float(count), float(size)))
  return found


def weak_scaling(found: Iterable[Collective], mesh: Mesh, sizes: Iterable[int]) -> dict[int, float]:
  """Bytes that each device sends in a step if only the mesh's data axis grows, its rows with it.

  Args:
    found: the collectives of a step on `mesh`.
    mesh: where it was compiled.
    sizes: numbers of devices; those that the other axes do not divide are left out.

  Returns:
    {devices: bytes}; nothing for a mesh without a data axis, which tells nothing of one.
  """
  if mesh.shape['data'] == 1:
    return {}
  other = mesh.size // mesh.shape['data']
  scaled = {}
  for size in sizes:
    data, rest = divmod(size, other)
    if rest or not data:
      continue
    scaled[size] = sum(
        sent(c.kind, c.bytes, max(c.devices * data // mesh.shape['data'], 1))
        if 'data' in c.axes else c.sent for c in found)
  return scaled
