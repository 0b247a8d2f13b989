"""The collectives of a compiled program, and the bytes that each device sends."""

from collections.abc import Iterable
import math
import re
from typing import NamedTuple

from jax.sharding import Mesh
import numpy as np

from bert_jax.planning import hlo

_KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all',
          'collective-permute')
_CHANNEL = re.compile(r'channel_id=(\d+)')
# XLA's compilers write groups of devices in three forms.
_IOTA = re.compile(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]"
                   r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_LISTS = re.compile(r'replica_groups=\{\{([\d,]+)\}')


class Collective(NamedTuple):
  """Operations of one kind over the same mesh axes."""

  kind: str  # all-reduce, all-gather, ...
  axes: tuple[str, ...]  # the mesh axes over which values are combined
  devices: int  # in each group
  count: int  # operations in a step
  bytes: int  # of the results on each device; for a reduce-scatter, of the operands

  @property
  def sent(self) -> float:
    """Bytes that each device sends in ring algorithms."""
    # An all-reduce is a reduce-scatter and an all-gather.
    share = (self.devices - 1) / self.devices
    factors = {'all-reduce': 2 * share, 'collective-permute': 1.0}
    return self.bytes * factors.get(self.kind, share)


def _result_size(result: str, asynchronous: bool) -> int:
  """Bytes of a result; an asynchronous start returns (operands, results[, contexts])."""
  # The GPU compiler writes the operands as a tuple in the tuple, without contexts.
  if asynchronous and result.startswith('(('):
    result, asynchronous = result[2 + hlo.closing(result[2:]):], False
  sizes = [array.size for array in hlo.arrays(result)]
  if not asynchronous or not result.startswith('('):
    return sum(sizes)
  # Contexts are small: with several operands, half of the sum is close to the results.
  return max(sizes) if len(sizes) < 5 else sum(sizes) // 2


def _iota(shape: str, transposed: str | None) -> np.ndarray:
  """The numbers 0, 1, ... in an array of `shape` with transposed axes."""
  order = np.arange(math.prod(hlo.integers(shape))).reshape(hlo.integers(shape))
  return order.transpose(hlo.integers(transposed)) if transposed else order


def _first_group(attributes: str, size: int) -> np.ndarray:
  """The devices of the first group, by their position in a mesh of `size` devices."""
  if match := _IOTA.search(attributes):
    groups, devices, shape, transposed = match.groups()
    return _iota(shape, transposed).reshape(int(groups), int(devices))[0]
  if match := _MESH.search(attributes):
    axes, shape, transposed, combined = match.groups()
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    order = _iota(shape or str(size), transposed).reshape(tuple(sizes.values()))
    combined = re.findall(r"'(\w+)'", combined)
    return order[tuple(slice(None) if name in combined else 0
                       for name in sizes)].reshape(-1)
  if match := _LISTS.search(attributes):
    return np.array(hlo.integers(match[1]))
  return np.arange(size)  # without groups: all devices


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes along which the devices of a group differ."""
  coordinates = np.array(np.unravel_index(group, mesh.devices.shape))
  return tuple(
      name for name, values in zip(mesh.axis_names, coordinates) if len(set(values)) > 1)


def read(text: str, mesh: Mesh) -> list[Collective]:
  """Reads the collectives in the HLO of a program; each iteration of a loop counts.

  Args:
    text: the HLO for each device of `mesh`.
    mesh: the devices.
  """
  totals, seen = {}, set()
  for computation, x, times in hlo.Module(text).walk(into_all=True):
    kind = x.opcode.removesuffix('-start')
    if kind not in _KINDS:
      continue
    # The TPU compiler repeats an exchange in each computation that it overlaps with.
    channel = _CHANNEL.search(x.attributes)
    if channel and channel[1] in seen:
      continue
    if channel:
      seen.add(channel[1])
    size = _result_size(x.result, x.opcode != kind)
    group = _first_group(x.attributes, mesh.size)
    if kind == 'reduce-scatter':
      size *= len(group)
    # The TPU compiler writes a fused reduce-scatter as an all-reduce in a computation of
    # this name. Its result is the whole operand.
    if computation.startswith('all-reduce-scatter'):
      kind = 'reduce-scatter'
    # Groups of one device send nothing.
    if len(group) > 1:
      key = kind, _axes(group, mesh), len(group)
      count, total = totals.get(key, (0, 0))
      totals[key] = count + times, total + times * size
  return [Collective(*key, *values) for key, values in sorted(totals.items())]


def weak_scaling(step: Iterable[Collective], mesh: Mesh,
                 sizes: Iterable[int]) -> dict[int, float]:
  """Bytes that each device sends in a step if the data axis and the batch grow together.

  Args:
    step: the collectives of a step on `mesh`.
    mesh: the mesh of the step.
    sizes: numbers of devices; a number that the other axes do not divide is skipped.

  Returns:
    {devices: bytes}; {} for a data axis of one device, whose program has no collectives
    to scale.
  """
  data = mesh.shape['data']
  if data == 1:
    return {}
  others, scaled = mesh.size // data, {}
  for size in sizes:
    if size % others == 0:
      # The rows of a device stay the same: only the groups over the data axis grow.
      grown = size // others
      scaled[size] = sum(
          c._replace(devices=max(c.devices * grown // data, 1)).sent
          if 'data' in c.axes else c.sent for c in step)
  return scaled
