"""Figures of chips, and TPU slices to compile for without having them."""

from collections.abc import Sequence
import importlib.util
import math
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from bert_jax.errors import UserError


class Chip(NamedTuple):
  """Peak figures of a device, by its maker."""

  flops: float  # dense bf16 FLOP/s
  memory: float  # bytes of HBM
  bandwidth: float  # bytes/s to and from HBM
  network: float  # bytes/s to the other chips of a slice or host, sent at once on all links


# By JAX's name of the device. TPU, per chip: cloud.google.com/tpu/docs; GPU: NVIDIA's data sheets,
# without sparsity.
_V5E = Chip(197e12, 16 * 2**30, 819e9, 200e9)
_V5P = Chip(459e12, 95 * 2**30, 2765e9, 600e9)
_V6E = Chip(918e12, 32 * 2**30, 1640e9, 448e9)
_CHIPS = {
    'TPU v4': Chip(275e12, 32 * 2**30, 1228e9, 300e9),
    'TPU v5 lite': _V5E,
    'TPU v5e': _V5E,
    'TPU v5': _V5P,
    'TPU v5p': _V5P,
    'TPU v6 lite': _V6E,
    'TPU v6e': _V6E,
    'TPU7x': Chip(2307e12, 192 * 2**30, 7380e9, 1200e9),
    'NVIDIA A100': Chip(312e12, 80e9, 2039e9, 300e9),
    'NVIDIA H100': Chip(989e12, 80e9, 3350e9, 450e9),
    'NVIDIA H100 PCIe': Chip(756e12, 80e9, 2000e9, 300e9),
    'NVIDIA H100 NVL': Chip(835e12, 94e9, 3900e9, 300e9),
    'NVIDIA H200': Chip(989e12, 141e9, 4800e9, 450e9),
    'NVIDIA H200 NVL': Chip(835e12, 141e9, 4800e9, 450e9),
}

# Slices for rent; the compiler knows more of the same generations.
KNOWN = {
    'v4': ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
    'v5e': ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
    'v5p': ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16'),
    'v6e': ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'),
    'tpu7x': ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8'),
}


def chip_of(devices: Sequence[jax.Device]) -> Chip | None:
  """The figures of each of these devices, a chip or a core of it; None if they are not known."""
  kind = devices[0].device_kind
  # GPUs may add their memory: 'NVIDIA H100 80GB HBM3' is neither the PCIe nor the NVL form.
  names = [name for name in _CHIPS
           if kind == name or name.startswith('NVIDIA') and kind.startswith(name)]
  if not names:
    return None
  chip = _CHIPS[max(names, key=len)]
  cores = len(devices) / num_chips(devices)
  return Chip(*(value / cores for value in chip))


def memory_limit(device: jax.Device) -> float:
  """The memory of a device here in bytes; infinite for a TPU, whose compiler knows it."""
  if device.platform == 'tpu':
    return math.inf
  if device.platform == 'cpu':  # all CPU devices share the machine's memory
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / jax.device_count()
  return device.memory_stats()['bytes_limit']


def num_chips(devices: Sequence[jax.Device]) -> int:
  """The number of chips of the devices; JAX sees the two cores of some TPUs as two devices."""
  return len({(getattr(d, 'slice_index', 0), *getattr(d, 'coords', (d.id,))) for d in devices})


def get(name: str, slices: int = 1) -> list[jax.Device]:
  """The devices of a TPU slice by its name (v5e:4x4), to compile for; none has to be here.

  With `slices` the devices of several slices, which the network of the data centre joins.

  Raises:
    UserError: an unknown slice, or libtpu is not installed.
  """
  generation, _, shape = name.partition(':')
  if shape not in KNOWN.get(generation, ()):
    known = '; '.join(f'{g}:{", ".join(shapes)}' for g, shapes in KNOWN.items())
    raise UserError(f'--topology={name} is unknown: there are {known}, and local')
  if not importlib.util.find_spec('libtpu'):
    raise UserError(f'--topology={name}: the TPU compiler is not installed: pip install -r '
                    'requirements-tpu.txt')
  for variable, value in (('TPU_SKIP_MDS_QUERY', '1'), ('TPU_WORKER_HOSTNAMES', 'localhost'),
                          ('TPU_ACCELERATOR_TYPE', 'v5litepod-16'),
                          ('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')):
    os.environ.setdefault(variable, value)  # libtpu asks for them where there is no TPU
  single = math.prod(map(int, shape.split('x'))) == 1
  options = {'chips_per_host_bounds': (1, 1, 1)} if single else {}
  if slices > 1:
    options['num_slices'] = slices
  return topologies.get_topology_desc(platform='tpu', topology_name=name, **options).devices
