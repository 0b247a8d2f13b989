"""Describes NVIDIA GPUs to XLA's compiler, to compile for them without access to one."""

import importlib.util
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from bert_jax.errors import require

_PACKAGE = 'jax_cuda13_plugin'
INSTALL = "pip install 'jax[cuda13]' (or -r requirements-gpu.txt)"


class _Target(NamedTuple):
  """Facts about a card, as the compiler's cost model takes them.

  From openxla/xla, xla/backends/gpu/target_config/specs. `_TEXT` has the facts that all
  of these cards share.
  """

  device: str  # JAX's device kind
  capability: tuple[int, int]
  cores: int  # streaming multiprocessors
  units: int  # float32 units of a core
  clock: float  # GHz
  memory: int  # bytes
  bandwidth: int  # bytes/s
  cache: int  # bytes of level 2
  shared: int  # bytes of shared memory of a core
  cards: int  # on a host, connected by NVLink


_TARGETS = {
    'a100': _Target('NVIDIA A100-SXM4-80GB', (8, 0), 108, 64, 1.41, 85_100_068_864,
                    2_039_040_000_000, 41_943_040, 167_936, 8),
    'h100': _Target('NVIDIA H100 80GB HBM3', (9, 0), 132, 128, 1.98, 84_942_979_072,
                    3_352_320_000_000, 52_428_800, 233_472, 8),
    'h200': _Target('NVIDIA H200 141GB HBM3e', (9, 0), 132, 128, 1.98, 151_397_597_184,
                    4_800_000_000_000, 52_428_800, 233_472, 8),
    'b200': _Target('NVIDIA B200', (10, 0), 148, 128, 1.965, 191_514_411_008,
                    7_672_320_000_000, 132_644_864, 233_472, 8),
    'gb200': _Target('NVIDIA GB200', (10, 0), 152, 128, 2.062, 197_897_748_480,
                     7_928_064_000_000, 135_528_448, 233_472, 4)}
# {name: cards on a host}
KNOWN = {name: target.cards for name, target in _TARGETS.items()}
_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  shared_memory_per_core: {t.shared} core_count: {t.cores} fpus_per_core: {t.units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {t.bandwidth} l2_cache_size: {t.cache} clock_rate_ghz: {t.clock}
  device_memory_size: {t.memory} device_vendor: "NVIDIA Corporation" name: "{t.device}"
  cuda_compute_capability {{
    major: {t.capability[0]} minor: {t.capability[1]} feature_extension: {feature}
  }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" device_address_bits: 64 ecc_enabled: true
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{t.device}"
"""


def missing() -> str:
  """Returns how to install the GPU compiler if it is missing; '' if it is there."""
  return '' if importlib.util.find_spec(_PACKAGE) else (
      f'the GPU compiler is not installed: {INSTALL}; no GPU is needed')


def _shape(name: str) -> tuple[_Target, int, int]:
  """('h100:2x8') -> (H100, 2 hosts, 8 cards on each); raises UserError."""
  card, _, shape = name.partition(':')
  most = ', '.join(f'{name}:{most}' for name, most in KNOWN.items())
  known = f'use CARD:NUMBER for one host, up to {most}, or CARD:HOSTSxNUMBER, such as h100:2x8'
  require(card in _TARGETS, f'--topology={name} is unknown: {known}')
  hosts, _, cards = shape.rpartition('x')
  is_given = cards.isdecimal() and (hosts or '1').isdecimal()
  require(is_given and 1 <= int(cards) <= _TARGETS[card].cards and int(hosts or 1) > 0,
          f'--topology={name}: a host has 1 to {_TARGETS[card].cards} cards: {known}')
  return _TARGETS[card], int(hosts or 1), int(cards)


def get(name: str) -> list[jax.Device]:
  """The GPUs of a name such as h100:8 or h100:2x8; they need not exist on this machine.

  Raises:
    UserError: the name is unknown, or the GPU compiler is not installed.
  """
  target, hosts, cards = _shape(name)
  require(not missing(), f'--topology={name}: {missing()}')
  # Otherwise the plugin asks for a driver.
  os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
  is_hopper = target.capability[0] >= 9
  text = _TEXT.format(t=target, optin=target.shared - 1024,
                      feature='ACCELERATED_FEATURES' if is_hopper else 'NONE')
  return topologies.get_topology_desc(
      platform='cuda', topology_name=name, target_config=text,
      topology=f'1x{hosts}x{cards}').devices
