"""The platform that JAX computes on, and its compiled programs, which stay on disk."""

import contextlib
import glob
import hashlib
import importlib.util
import pathlib
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
_MAX_CACHE_BYTES = 5 * 2**30
_MIN_COMPILE_SECONDS = 0.2  # that are worth a file
# JAX's warning about its cache: reading or writing, the program, the error.
_TROUBLE = re.compile(
    "Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)")

_NVIDIA = pathlib.Path('/proc/driver/nvidia/version')
# The oldest driver for each plugin of JAX, and what to install for the driver that is here.
_DRIVERS = {'jax_cuda13_plugin': (580, "install '.[cuda12]', which needs 525, or a newer driver"),
            'jax_cuda12_plugin': (525, 'install a newer driver')}


def _driver_trouble() -> str:
  """Says that the NVIDIA driver is too old for the installed CUDA; '' = nothing is known."""
  match = _NVIDIA.exists() and re.search(r'\s(\d+)\.[\d.]+', _NVIDIA.read_text())
  for plugin, (oldest, advice) in _DRIVERS.items():
    if match and importlib.util.find_spec(plugin) and int(match[1]) < oldest:
      return f'the NVIDIA driver {match[0].strip()} is older than {oldest}: {advice}'
  return ''


def select_platform(platform: str):
  """Makes JAX use `platform`; raises UserError if it is unknown or has no device here."""
  errors.require_choice('platform', platform, PLATFORMS)
  if platform != 'auto':
    # One name alone: with several, JAX demands them all.
    gpu = 'cuda' if glob.glob('/dev/nvidia[0-9]*') or not glob.glob('/dev/kfd') else 'rocm'
    jax.config.update('jax_platforms', gpu if platform == 'gpu' else platform)
  try:
    backend = jax.default_backend()
  except (RuntimeError, AssertionError) as e:  # CUDA's plugin asserts, without a message
    raise UserError(f'platform={platform!r} has no device here: '
                    f'{_driver_trouble() or e}'.rstrip(': ')) from e
  is_asked_for = jax.config.jax_platforms == 'cpu'  # by JAX_PLATFORMS
  if platform == 'auto' and backend == 'cpu' and host.has_accelerator() and not is_asked_for:
    advice = _driver_trouble() or ('install requirements-tpu.txt or requirements-gpu.txt (or '
                                   'another process holds it)')
    raise UserError(f'there is an accelerator here, but JAX finds only CPUs: {advice}, or give '
                    '--config.platform=cpu')
  if platform not in ('auto', backend):
    raise UserError(f'platform={platform!r} has no device here: JAX finds {backend!r}')


def _machine() -> str:
  """Names the target of the code: a home folder may be shared by unlike CPUs."""
  if jax.default_backend() != 'cpu':
    return jax.default_backend()
  description = platform_lib.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().split('\n')
    description += ''.join(sorted({x for x in lines if x.startswith(('flags', 'model'))}))
  return 'cpu-' + hashlib.blake2b(description.encode(), digest_size=4).hexdigest()


def _mend_cache():
  """Deletes compiled programs that a kill cut short, instead of JAX's warning at every start.

  JAX names the program, not the file, and never replaces a file: all of this name go.
  """
  show = warnings.showwarning

  def show_others(message: Warning, *args: Any, **more: Any):
    trouble = _TROUBLE.match(str(message))
    if not trouble:
      show(message, *args, **more)
      return
    doing, program, error = trouble.groups()
    with contextlib.suppress(OSError):
      for path in epath.Path(jax.config.jax_compilation_cache_dir).glob(f'{program}-*-cache'):
        path.unlink(missing_ok=True)
    if doing == 'writing':
      console.print_lines([('note', f'a compiled program is not kept for the next start: {error}')])

  if show.__name__ != show_others.__name__:
    warnings.showwarning = show_others
    warnings.filterwarnings('always', _TROUBLE.pattern, UserWarning)


def keep_compiled():
  """Keeps compiled programs in ~/.cache/bert_jax/compiled; call it before the first compiles.

  JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
  If the folder cannot be written, nothing is kept. The oldest programs make room for new ones.
  """
  _mend_cache()
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
  """Prepares a command that runs a model: freed memory and compiled programs are kept.

  Call it before the first array is made.
  """
  if not host.has_accelerator():
    host.keep_freed_memory()
  keep_compiled()
