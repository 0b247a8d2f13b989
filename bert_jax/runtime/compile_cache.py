"""What XLA compiled is kept between runs: a second start need not compile it again."""

import contextlib
import hashlib
import pathlib
import platform

import jax

from bert_jax.runtime import host

_MOST = 5 * 2**30  # bytes that are kept
_LEAST = 0.2  # seconds of compiling that are worth a file


def _machine() -> str:
  """Names what the code is made for: a home folder may be shared by unlike CPUs."""
  if jax.default_backend() != 'cpu':
    return jax.default_backend()
  described = platform.machine()
  with contextlib.suppress(OSError):
    text = pathlib.Path('/proc/cpuinfo').read_text()
    described += ''.join(sorted({x for x in text.split('\n') if x.startswith(('flags', 'model'))}))
  return 'cpu-' + hashlib.blake2b(described.encode(), digest_size=4).hexdigest()


def _drop_oldest(folder: pathlib.Path):
  """Leaves the newest `_MOST` bytes."""
  kept = 0
  for path in sorted(folder.glob('*-cache'), key=lambda path: path.stat().st_mtime, reverse=True):
    kept += path.stat().st_size
    if kept > _MOST:
      path.unlink(missing_ok=True)


def keep():
  """Keeps compiled programs in ~/.cache/bert_jax/compiled; to be called before the first compiles.

  JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
  Where no file can be written there is none.
  """
  if jax.config.jax_compilation_cache_dir:
    return
  folder = host.cache_folder() / 'compiled' / _machine()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    _drop_oldest(folder)
  except OSError:
    return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _LEAST)
