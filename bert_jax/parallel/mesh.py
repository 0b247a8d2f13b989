"""The device mesh: ('replica', 'data', 'model'), and how host batches come onto it."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from bert_jax.errors import UserError
from bert_jax.parallel import host

AXES = ('replica', 'data', 'model')
BATCH_AXES = ('replica', 'data')
PLATFORMS = ('auto', 'cpu', 'gpu', 'tpu')


def select_platform(platform: str):
  """Makes JAX use `platform`; a named platform that is not there stops the run.

  Raises:
    UserError: an unknown platform, or one without a device here.
  """
  if platform not in PLATFORMS:
    raise UserError(f'platform={platform!r} is unknown: use {", ".join(PLATFORMS)}')
  if platform != 'auto':
    jax.config.update('jax_platforms', {'gpu': 'cuda,rocm'}.get(platform, platform))
  try:
    found = jax.default_backend()
  except RuntimeError as e:
    raise UserError(f'platform={platform!r} has no device here: {e}') from e
  if platform == 'auto' and found == 'cpu' and host.has_accelerator():
    raise UserError('there is an accelerator here, but JAX finds only CPUs: install '
                    'requirements-tpu.txt or requirements-gpu.txt (or another process holds it), '
                    'or give --config.platform=cpu')
  if platform not in ('auto', found):
    raise UserError(f'platform={platform!r} has no device here: JAX finds {found!r}')


def make_mesh(replica: int = 1, data: int = -1, model: int = 1, *,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over all devices, or over those given; one axis may be -1 and takes the rest.

  Raises:
    UserError: sizes that the number of devices does not fit.
  """
  sizes = [replica, data, model]
  devices = jax.devices() if devices is None else devices
  named = 'x'.join(map(str, sizes))
  if min(sizes) < -1 or 0 in sizes or sizes.count(-1) > 1:
    raise UserError(f'mesh {named} (replica x data x model): sizes are positive, and one may be -1')
  known = math.prod(s for s in sizes if s > 0)
  if -1 in sizes:
    sizes[sizes.index(-1)] = len(devices) // known
  if math.prod(sizes) != len(devices):
    raise UserError(f'mesh {named} (replica x data x model) does not fit the {len(devices)} '
                    'devices')
  # Auto: Linen's constraints need it; Explicit axes are the default of make_mesh.
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES),
                       devices=devices)


def check_fits(mesh: Mesh, batch_size: int, accumulation: int, num_heads: int):
  """Raises UserError if the mesh does not divide a microbatch or the heads."""
  rows = mesh.shape['replica'] * mesh.shape['data'] * accumulation
  if batch_size % rows:
    raise UserError(f'batch_size={batch_size} is not divisible by {rows} (mesh.replica x '
                    'mesh.data x optimizer.accumulation): choose a multiple')
  if num_heads % mesh.shape['model']:
    raise UserError(f'model.num_heads={num_heads} is not divisible by mesh.model='
                    f'{mesh.shape["model"]}')


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over the batch axes, everything else whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, PartitionSpec())


def put_batch(batch: Any, mesh: Mesh) -> Any:
  """Places this process's share of a batch, host arrays [B / processes, ...], on the mesh."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def process_share(batch_size: int, process: int, processes: int) -> slice:
  """The rows of the global batch that one of several processes feeds."""
  rows = batch_size // processes
  return slice(process * rows, (process + 1) * rows)
