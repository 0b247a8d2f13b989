"""Selects JAX's platform, and keeps compiled programs on disk."""

import contextlib
import glob
import hashlib
import importlib.util
import math
import platform as platform_lib
import re
from typing import Any
import warnings

from etils import epath
import jax

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.runtime import console, host

PLATFORMS = ('auto', 'cpu', 'gpu', 'tpu')
GPU = ('gpu', 'cuda')  # platform names of local devices and of the devices of a plan
# The lowest compute capability of a GPU that multiplies bfloat16, and that runs the
# kernels of Triton (Ampere, 2020). Colab's free T4 has 7.5.
OF_BFLOAT16 = 8.0
_MAX_CACHE_BYTES = 5 * 2**30
_MIN_COMPILE_SECONDS = 0.2  # shorter compilations are not worth a file
# JAX's warning about its cache: (reading or writing, the program, the error).
_TROUBLE = re.compile(
    "Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)")

_NVIDIA = epath.Path('/proc/driver/nvidia/version')
# {plugin of JAX: (the oldest driver that it supports, advice for an older driver)}
_DRIVERS = {
    'jax_cuda13_plugin': (580, "install '.[cuda12]', which needs 525, or a newer driver"),
    'jax_cuda12_plugin': (525, 'install a newer driver')}


def _driver_trouble() -> str:
  """Explains that the NVIDIA driver is too old for JAX; '' = new enough, or unknown."""
  match = _NVIDIA.exists() and re.search(r'\s(\d+)\.[\d.]+', _NVIDIA.read_text())
  for plugin, (oldest, advice) in _DRIVERS.items():
    if match and importlib.util.find_spec(plugin) and int(match[1]) < oldest:
      return f'the NVIDIA driver {match[0].strip()} is older than {oldest}: {advice}'
  return ''


def select_platform(platform: str):
  """Makes JAX use `platform`; raises UserError if it is unknown or has no device here."""
  errors.require_choice('platform', platform, PLATFORMS)
  if platform != 'auto':
    # Name one GPU platform only: JAX requires every platform that it is given.
    gpu = ('cuda' if glob.glob('/dev/nvidia[0-9]*') or not glob.glob('/dev/kfd')
           else 'rocm')
    jax.config.update('jax_platforms', gpu if platform == 'gpu' else platform)
  try:
    backend = jax.default_backend()
  except (RuntimeError, AssertionError) as e:  # CUDA's plugin asserts without a message
    raise UserError(f'platform={platform!r} has no device here: '
                    f'{_driver_trouble() or e}'.rstrip(': ')) from e
  # If a run finds only CPUs next to an accelerator, the installation is usually broken.
  wants_cpu = jax.config.jax_platforms == 'cpu'  # by JAX_PLATFORMS
  if (platform, backend) == ('auto', 'cpu') and host.has_accelerator() and not wants_cpu:
    advice = _driver_trouble() or ('install requirements-tpu.txt or requirements-gpu.txt '
                                   '(or another process holds it)')
    raise UserError('this machine has an accelerator, but JAX finds only CPUs: '
                    f'{advice}, or give --config.platform=cpu')
  errors.require(platform in ('auto', backend),
                 f'platform={platform!r} has no device here: JAX finds {backend!r}')


def _generation() -> str:
  """The generation of this machine's GPUs, such as 9.0 or AMD's gfx942; '' without one."""
  if jax.default_backend() != 'gpu':
    return ''
  return str(getattr(jax.local_devices()[0], 'compute_capability', ''))


def is_amd() -> bool:
  """True if this machine's GPUs are from AMD, for which no kernel is written."""
  return _generation().startswith('gfx')


def compute_capability() -> float:
  """The compute capability of this machine's NVIDIA GPUs, such as 9.0; else infinite.

  Without a GPU, only a plan compiles programs for GPUs, and it knows only newer GPUs.
  """
  return math.inf if is_amd() else float(_generation() or math.inf)


def triton_obstacle() -> str:
  """Why the GPUs of a program cannot run Triton kernels; '' if they can."""
  if is_amd():
    return 'the kernels are for NVIDIA GPUs'
  if compute_capability() < OF_BFLOAT16:
    return f'compute capability {compute_capability()} is below {OF_BFLOAT16}'
  # JAX 0.12 deprecates Pallas' Triton backend.
  has_triton = importlib.util.find_spec('jax.experimental.pallas.triton') is not None
  return '' if has_triton else f'jax {jax.__version__} has no Triton kernels'


def fast_dtype(platform: str) -> str:
  """Returns the faster dtype of products on devices of a platform, such as cpu."""
  if platform == 'cpu':
    is_fast = host.has_fast_bfloat16()
  else:
    is_fast = platform not in GPU or compute_capability() >= OF_BFLOAT16
  return 'bfloat16' if is_fast else 'float32'


def _machine() -> str:
  """Names the compilation target: hosts with different CPUs may share a home folder."""
  if jax.default_backend() != 'cpu':
    return jax.default_backend()
  description = platform_lib.machine()
  with contextlib.suppress(OSError):
    lines = epath.Path('/proc/cpuinfo').read_text().split('\n')
    description += ''.join(sorted({x for x in lines if x.startswith(('flags', 'model'))}))
  return 'cpu-' + hashlib.blake2b(description.encode(), digest_size=4).hexdigest()


def _repair_cache():
  """Deletes compiled programs that a kill truncated, so that JAX warns only once.

  JAX never overwrites a cache entry, and its warning names the program, not the file.
  So all entries of this program are deleted.
  """
  show = warnings.showwarning

  def show_others(message: Warning, *args: Any, **more: Any):
    trouble = _TROUBLE.match(str(message))
    if not trouble:
      show(message, *args, **more)
      return
    doing, program, error = trouble.groups()
    with contextlib.suppress(OSError):
      for path in epath.Path(jax.config.jax_compilation_cache_dir).glob(
          f'{program}-*-cache'):
        path.unlink(missing_ok=True)
    if doing == 'writing':
      console.print_lines([('note', f'a compiled program is not cached: {error}')])

  # A second run in this process must not wrap the function again.
  if show.__name__ != show_others.__name__:
    warnings.showwarning = show_others
    warnings.filterwarnings('always', _TROUBLE.pattern, UserWarning)


def keep_compiled():
  """Caches compiled programs in ~/.cache/bert_jax/compiled; call before any compilation.

  JAX_COMPILATION_CACHE_DIR names another folder; JAX_ENABLE_COMPILATION_CACHE=false
  disables the cache, and so does a folder that is not writable. The oldest programs make
  room for new ones.
  """
  _repair_cache()
  if jax.config.jax_compilation_cache_dir:
    return
  folder = host.cache_folder() / 'compiled' / _machine()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for path in sorted(folder.glob('*-cache'), key=lambda path: -path.stat().st_mtime):
      total += path.stat().st_size
      if total > _MAX_CACHE_BYTES:
        path.unlink(missing_ok=True)
  except OSError:
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_COMPILE_SECONDS)


def begin_command():
  """Prepares a command that runs a model: keeps freed memory and compiled programs.

  Call it before the first array is created.
  """
  if not host.has_accelerator():
    host.keep_freed_memory()
  keep_compiled()
