"""The machine of this process: its accelerators, cores, cache folder and freed memory."""

import contextlib
import ctypes
import glob
import math
import os
import pathlib

from etils import epath

from bert_jax.runtime import quiet

# Upper bound on the freed memory that we keep, as a fraction of the machine's memory.
_MOST_OF_MACHINE = 0.5
_FIRST_STEPS = 3  # the limit starts from the memory that they need
_HEADROOM = 1.25  # the limit is that memory times this factor
_RARELY = 20  # steps; if memory is given back more often than this, the limit grows

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def has_accelerator() -> bool:
  """True if the kernel shows a TPU or a GPU; does not start JAX."""
  return any(map(glob.glob, (*quiet.TPU_DEVICES, '/dev/nvidia[0-9]*', '/dev/kfd')))


def cores() -> int:
  """The number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Linux
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def memory() -> float:
  """Bytes of the memory of this machine, or of the container that limits this process."""
  sizes = [math.inf]
  if hasattr(os, 'sysconf'):
    sizes.append(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
  for path in ('memory.max', 'memory/memory.limit_in_bytes'):
    with contextlib.suppress(OSError, ValueError):  # 'max' is no limit
      sizes.append(int(pathlib.Path('/sys/fs/cgroup', path).read_text()))
  return min(sizes)


def cache_folder() -> pathlib.Path:
  """The folder for files of this machine that bert_jax can make again."""
  return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
                      'bert_jax')


def keep_freed_memory():
  """Tells glibc to keep freed memory, in one arena; does nothing without glibc.

  XLA allocates the temporaries of every step anew. By default glibc returns each large block to the
  kernel and faults it in again page by page: a sixth to a quarter of a step's time on 2 cores.
  Call this before JAX starts its threads: running threads keep arenas of their own.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return
  mallopt(_M_MMAP_MAX, 0)
  mallopt(_M_ARENA_MAX, 1)
  mallopt(_M_TRIM_THRESHOLD, -1)  # never


class FreedMemory:
  """Gives freed memory back to the kernel if it exceeds the need of a step by a quarter.

  Blocks of gigabytes do not always fit again into the holes that they left: without a limit a run
  held 12 GB where it used 4. If steps come to need more, memory is given back again and again until
  the limit has grown to the need; the step after each time is slow.
  """

  def __init__(self):
    self._steps = 0
    self._given_back_at = -_RARELY
    self._limit = 0.0  # pages

  def after_step(self):
    """Call this after each step; it costs microseconds unless it gives memory back."""
    try:
      pages = int(epath.Path('/proc/self/statm').read_text().split()[1])
      self._steps += 1
      if self._steps <= _FIRST_STEPS:
        self._limit = max(self._limit, _HEADROOM * pages)
      elif pages > min(self._limit, _MOST_OF_MACHINE * os.sysconf('SC_PHYS_PAGES')):
        ctypes.CDLL(None).malloc_trim(0)
        if self._steps - self._given_back_at < _RARELY:
          self._limit *= _HEADROOM
        self._given_back_at = self._steps
    except (AttributeError, OSError, ValueError):
      return
