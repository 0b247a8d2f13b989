"""Peak rates and memory of chips."""

from collections.abc import Sequence
import math
import os
from typing import NamedTuple

import jax

from bert_jax.runtime import host


class Chip(NamedTuple):
  """Peak figures of a device, as published by its maker."""

  flops: float  # dense bf16 FLOP/s
  memory: float  # bytes of HBM
  bandwidth: float  # bytes/s to and from HBM
  network: float  # bytes/s that all links to the other chips send together
  between_hosts: float = 0.0  # bytes/s to other hosts; 0 = by the links above


# By JAX's device kind. TPUs, per chip: cloud.google.com/tpu/docs. GPUs: NVIDIA's data
# sheets, without sparsity.
_V5E = Chip(197e12, 16 * 2**30, 819e9, 200e9)
_V5P = Chip(459e12, 95 * 2**30, 2765e9, 600e9)
_V6E = Chip(918e12, 32 * 2**30, 1640e9, 448e9)
# One InfiniBand adapter for each card, as in NVIDIA's DGX: 200 and 400 Gbit/s.
_HDR, _NDR = 25e9, 50e9
_CHIPS = {
    'TPU v4': Chip(275e12, 32 * 2**30, 1228e9, 300e9),
    'TPU v5 lite': _V5E,
    'TPU v5e': _V5E,
    'TPU v5': _V5P,
    'TPU v5p': _V5P,
    'TPU v6 lite': _V6E,
    'TPU v6e': _V6E,
    'TPU7x': Chip(2307e12, 192 * 2**30, 7380e9, 1200e9),
    'NVIDIA A100': Chip(312e12, 80e9, 2039e9, 300e9, _HDR),
    'NVIDIA A100-PCIE-40GB': Chip(312e12, 40e9, 1555e9, 300e9, _HDR),
    'NVIDIA A100-SXM4-40GB': Chip(312e12, 40e9, 1555e9, 300e9, _HDR),
    'NVIDIA H100': Chip(989e12, 80e9, 3350e9, 450e9, _NDR),
    'NVIDIA H100 PCIe': Chip(756e12, 80e9, 2000e9, 300e9),
    'NVIDIA H100 NVL': Chip(835e12, 94e9, 3900e9, 300e9),
    'NVIDIA H200': Chip(989e12, 141e9, 4800e9, 450e9, _NDR),
    'NVIDIA B200': Chip(2250e12, 180e9, 7700e9, 900e9, _NDR),
    'NVIDIA GB200': Chip(2500e12, 186e9, 8000e9, 900e9, _NDR),
    'NVIDIA H200 NVL': Chip(835e12, 141e9, 4800e9, 450e9),
}


def chip_of(devices: Sequence[jax.Device]) -> Chip | None:
  """The figures of one of these devices, a chip or a core; None = unknown."""
  kind = devices[0].device_kind
  if ' MIG ' in kind:  # a part of a GPU, whose share of the figures varies
    return None
  # The name of a GPU may end with its memory: 'NVIDIA H100 80GB HBM3' is an H100 SXM.
  names = [name for name in _CHIPS
           if kind == name or name.startswith('NVIDIA') and kind.startswith(name)]
  if not names:
    return None
  chip = _CHIPS[max(names, key=len)]
  cores = len(devices) / num_chips(devices)
  return Chip(*(value / cores for value in chip))


def network(devices: Sequence[jax.Device]) -> float:
  """Bytes/s that a device sends to the others, between hosts if there are several.

  The figures of the device must be known (`chip_of`).
  """
  chip = chip_of(devices)
  is_one_host = len({device.process_index for device in devices}) == 1
  return chip.network if is_one_host else min(chip.network, chip.between_hosts or math.inf)


def memory_limit(device: jax.Device) -> float:
  """Bytes of a device's memory that JAX uses; inf for TPUs, whose compiler checks it."""
  if device.platform == 'tpu':
    return math.inf
  chip = chip_of([device])
  if chip and device.platform != 'cpu' and jax.default_backend() == 'cpu':
    # A GPU that exists only in a plan. JAX takes three quarters of its memory by default.
    return float(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION') or 0.75) * chip.memory
  if device.platform == 'cpu':  # all CPU devices share the machine's memory
    return host.memory() / jax.device_count()
  return (device.memory_stats() or {}).get('bytes_limit', math.inf)


def num_chips(devices: Sequence[jax.Device]) -> int:
  """The number of chips of the devices."""
  # On some TPUs each of the two cores of a chip is a device, with the same coordinates.
  return len({(getattr(d, 'slice_index', 0), *getattr(d, 'coords', (d.id,)))
              for d in devices})
