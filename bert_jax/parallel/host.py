"""The machine of this process: its cache, its accelerators, and memory for computing on a CPU."""

import ctypes
import glob
import os
import pathlib

from etils import epath

# The share of the machine's memory that is kept at most.
_MOST = 0.5

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def has_accelerator() -> bool:
  """Whether the kernel shows a TPU or a GPU; asks without starting JAX."""
  return any(map(glob.glob, ('/dev/accel*', '/dev/vfio/[0-9]*', '/dev/nvidia[0-9]*', '/dev/kfd')))


def cache_folder() -> pathlib.Path:
  """Where bert_jax keeps files of this machine that it can make again."""
  return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
                      'bert_jax')


def keep_freed_memory():
  """Tells glibc to keep the memory that is freed, in one arena; elsewhere it does nothing.

  XLA allocates the temporaries of every step anew. glibc would give each large block back to the
  kernel and fault it in again page by page: a sixth to a quarter of a step's time on 2 cores.
  To be called before JAX starts its threads: those that run keep arenas of their own.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return
  mallopt(_M_MMAP_MAX, 0)
  mallopt(_M_ARENA_MAX, 1)
  mallopt(_M_TRIM_THRESHOLD, -1)  # never


def give_back_memory():
  """Gives freed memory back to the kernel if the process holds half of the machine's.

  Blocks of gigabytes do not always fit again into the holes that they left: kept for ever, 20 GB
  were held where 3 are used. To be called after a step; it costs microseconds until it acts.
  """
  try:
    resident = int(epath.Path('/proc/self/statm').read_text().split()[1])
    if resident > _MOST * os.sysconf('SC_PHYS_PAGES'):
      ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError, ValueError):
    return
