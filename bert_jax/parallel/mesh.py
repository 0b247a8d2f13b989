"""The device mesh ('replica', 'data', 'model'), and the placement of host batches."""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from bert_jax.errors import require

AXES = ('replica', 'data', 'model')
BATCH_AXES = ('replica', 'data')


def make_mesh(replica: int = 1, data: int = -1, model: int = 1, *,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes a mesh over `devices`, by default all; one axis may be -1 = all remaining.

  Raises:
    UserError: the sizes do not fit the number of devices, or a replica spans two slices.
  """
  sizes = [replica, data, model]
  devices = jax.devices() if devices is None else devices
  named = 'x'.join(map(str, sizes))
  require(min(sizes) >= -1 and 0 not in sizes and sizes.count(-1) <= 1,
          f'mesh {named} (replica x data x model): sizes are positive, and one may be -1')
  known = math.prod(s for s in sizes if s > 0)
  if -1 in sizes:
    sizes[sizes.index(-1)] = len(devices) // known
  require(math.prod(sizes) == len(devices),
          f'mesh {named} (replica x data x model) does not fit the {len(devices)} devices')
  # Linen's constraints need Auto axes; the default of jax.make_mesh is Explicit.
  auto = (AxisType.Auto,) * len(AXES)
  # XLA counts hosts of GPUs in the same attribute, but only TPUs have slices.
  slices = len({getattr(d, 'slice_index', 0) for d in devices if d.platform == 'tpu'}) or 1
  require(sizes[0] % slices == 0,
          f'mesh {named} (replica x data x model) over {slices} slices: make mesh.replica '
          f'a multiple of {slices}, so that slices exchange only gradients')
  # An axis may need a part of a physical axis of chips.
  split = {'allow_split_physical_axes': True}
  # The network between slices is slow, so only the replica axis crosses it.
  if slices > 1:
    ordered = mesh_utils.create_hybrid_device_mesh(
        (sizes[0] // slices, *sizes[1:]), (slices, 1, 1), devices, **split)
  else:
    ordered = mesh_utils.create_device_mesh(sizes, devices, **split)
  return Mesh(ordered, AXES, axis_types=auto)


def check_fits(mesh: Mesh, batch_size: int, accumulation: int, num_heads: int):
  """Raises UserError if the mesh does not divide a microbatch or the heads."""
  rows = mesh.shape['replica'] * mesh.shape['data'] * accumulation
  require(batch_size % rows == 0,
          f'batch_size={batch_size} is not divisible by {rows} (mesh.replica x mesh.data x '
          'optimizer.accumulation): choose a multiple')
  require(num_heads % mesh.shape['model'] == 0,
          f'model.num_heads={num_heads} is not divisible by mesh.model='
          f'{mesh.shape["model"]}')


def split_rows(batch: Any, parts: int) -> Any:
  """[rows, ...] -> [parts, rows / parts, ...]; each part has rows of every device."""
  return jax.tree.map(
      lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Shards rows over the batch axes; all other dimensions stay whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """A copy of the whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


class Feed(NamedTuple):
  """The parts of every batch that a process puts on its devices.

  JAX orders the devices of a slice by their physical neighbors, so the devices of one
  host are not always adjacent along the batch. Processes whose devices differ only along
  mesh.model feed the same parts.
  """

  places: tuple[int, ...] = (0,)  # the parts that this process feeds, ascending
  of: int = 1  # the number of parts of a batch
  first: bool = True  # False if a process of lower index feeds the same parts

  def rows(self, batch_size: int) -> np.ndarray:
    """The indices, in a batch, of the rows that the process feeds."""
    return np.arange(batch_size).reshape(self.of, -1)[list(self.places)].reshape(-1)


@functools.lru_cache
def feed(mesh: Mesh) -> Feed:
  """The parts of a batch that this process feeds."""
  devices_at = mesh.devices.reshape(mesh.shape['replica'] * mesh.shape['data'], -1)
  feeders = [{device.process_index for device in devices} for devices in devices_at]
  me = jax.process_index()
  places = tuple(i for i, processes in enumerate(feeders) if me in processes)
  return Feed(places, len(feeders), all(me == min(feeders[i]) for i in places))


def put_batch(batch: Any, mesh: Mesh) -> Any:
  """Places this process's rows of a batch on the mesh; returns global arrays [B, ...].

  Args:
    batch: a tree of host arrays [rows of this process, ...].
    mesh: the devices.
  """
  sharding, mine = batch_sharding(mesh), feed(mesh)

  def put(x):
    size = len(x) // len(mine.places)  # rows at each place

    def rows_at(index):
      # The host array has only the places of this process, one after another.
      start = mine.places.index((index[0].start or 0) // size) * size
      return x[start:start + size]

    return jax.make_array_from_callback((size * mine.of, *x.shape[1:]), sharding, rows_at)

  return jax.tree.map(put, batch)
