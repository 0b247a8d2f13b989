"""Compiled programs are kept on disk: a second start does not compile them again."""

import contextlib
import hashlib
import pathlib
import platform

import jax

from bert_jax.runtime import host

_MOST_BYTES = 5 * 2**30
_LEAST_SECONDS = 0.2  # of compiling that are worth a file


def _machine() -> str:
  """Names the target of the code: a home folder may be shared by unlike CPUs."""
  if jax.default_backend() != 'cpu':
    return jax.default_backend()
  description = platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().split('\n')
    description += ''.join(sorted({x for x in lines if x.startswith(('flags', 'model'))}))
  return 'cpu-' + hashlib.blake2b(description.encode(), digest_size=4).hexdigest()


def _drop_oldest(folder: pathlib.Path):
  total = 0
  for path in sorted(folder.glob('*-cache'), key=lambda path: path.stat().st_mtime, reverse=True):
    total += path.stat().st_size
    if total > _MOST_BYTES:
      path.unlink(missing_ok=True)


def keep():
  """Keeps compiled programs in ~/.cache/bert_jax/compiled; call it before the first compiles.

  JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
  If the folder cannot be written, nothing is kept.
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
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)
