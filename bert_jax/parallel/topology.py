"""Describes TPU slices and GPUs, to compile for them without access to one."""

import importlib.util
import math
import os

import jax
from jax.experimental import topologies

from bert_jax.errors import require
from bert_jax.parallel import gpu_topology
from bert_jax.runtime import quiet

# The slices that cloud.google.com offers; the compiler knows more shapes.
_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8')
KNOWN = {'v4': _CUBES, 'v5e': _FLAT, 'v5p': (*_CUBES, '8x8x16'), 'v6e': _FLAT,
         'tpu7x': _CUBES}


def get(name: str, slices: int = 1) -> list[jax.Device]:
  """The devices of a TPU slice or of GPUs; they need not exist on this machine.

  Args:
    name: a slice, such as v5e:4x4, or GPUs, such as h100:8.
    slices: number of TPU slices, which the network of the data center connects.

  Raises:
    UserError: the name is unknown, or the compiler is not installed.
  """
  generation, _, shape = name.partition(':')
  if generation in gpu_topology.KNOWN:
    return gpu_topology.get(name)
  known = '; '.join(f'{g}:{", ".join(shapes)}' for g, shapes in KNOWN.items())
  gpus = ', '.join(f'{card}:{most}' for card, most in gpu_topology.KNOWN.items())
  require(shape in KNOWN.get(generation, ()),
          f'--topology={name} is unknown: use {known}; GPUs, {gpus}; or local')
  require(importlib.util.find_spec('libtpu') is not None,
          f'--topology={name}: the TPU compiler is not installed: pip install '
          '-r requirements-tpu.txt')
  # Otherwise libtpu asks the network for a TPU.
  for variable, value in quiet.ABSENT_TPU.items():
    os.environ.setdefault(variable, value)
  options = {'num_slices': slices}
  if math.prod(map(int, shape.split('x'))) == 1:
    options['chips_per_host_bounds'] = (1, 1, 1)
  # On a real v4 the two cores of a chip are one device.
  if generation == 'v4':
    options['chip_config_name'] = 'megacore'
  return topologies.get_topology_desc(
      platform='tpu', topology_name=name, **options).devices
