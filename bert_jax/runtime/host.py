"""The machine of this process: its cache, its accelerators, and memory for computing on a CPU."""

import ctypes
import glob
import os
import pathlib

from etils import epath

# Of the memory that is kept: at most this share of the machine's, and so many times that of the
# first steps, or more if it would be given back more often than after so many steps.
_MOST, _MORE, _FIRST, _SELDOM = 0.5, 1.25, 3, 20

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def has_accelerator() -> bool:
  """Whether the kernel shows a TPU or a GPU; asks without starting JAX."""
  return any(map(glob.glob, ('/dev/accel*', '/dev/vfio/[0-9]*', '/dev/nvidia[0-9]*', '/dev/kfd')))


def cores() -> int:
  """How many this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Linux
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


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


class FreedMemory:
  """What is kept of it from one step to the next: what a step needs, and a quarter more.

  Blocks of gigabytes do not always fit again into the holes that they left: kept for ever, 12 GB
  were held where 4 are used. Where steps come to need more, memory is given back again and again
  until the limit has grown to that; the step after it is a slow one.
  """

  def __init__(self):
    self._calls, self._given_back, self._limit = 0, -_SELDOM, 0.0

  def after_step(self):
    """To be called after each step; it costs microseconds until it acts."""
    try:
      pages = int(epath.Path('/proc/self/statm').read_text().split()[1])
      self._calls += 1
      if self._calls <= _FIRST:
        self._limit = max(self._limit, _MORE * pages)
      elif pages > min(self._limit, _MOST * os.sysconf('SC_PHYS_PAGES')):
        ctypes.CDLL(None).malloc_trim(0)
        if self._calls - self._given_back < _SELDOM:
          self._limit *= _MORE
        self._given_back = self._calls
    except (AttributeError, OSError, ValueError):
      return
