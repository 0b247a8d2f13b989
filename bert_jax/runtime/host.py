"""The host of this process: accelerators, cores, memory and cache folder."""

import contextlib
import ctypes
import functools
import glob
import importlib.metadata
import os
import pathlib

from bert_jax.runtime import quiet

# Upper bound on the memory that the process keeps, as a fraction of all memory.
_MOST_OF_MACHINE = 0.5
_FIRST_STEPS = 3  # the limit starts from the peak memory of these steps
_HEADROOM = 1.25  # the limit is that peak times this factor
_RARELY = 20  # steps; if memory is released more often than this, the limit grows

# Parameter names of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def has_accelerator() -> bool:
  """True if the kernel lists a TPU or a GPU; does not start JAX."""
  return any(map(glob.glob, (*quiet.TPU_DEVICES, '/dev/nvidia[0-9]*', '/dev/kfd')))


def cores() -> int:
  """The number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # Linux
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def has_fast_bfloat16() -> bool:
  """True if XLA multiplies bfloat16 several times faster than float32 on this CPU.

  The CPU needs instructions for it, and XLA has used them since jax 0.11. Linux only.
  """
  try:
    flags = pathlib.Path('/proc/cpuinfo').read_text().split()
  except OSError:
    return False
  major, minor = importlib.metadata.version('jax').split('.')[:2]
  is_new = (int(major), int(minor)) >= (0, 11)
  return is_new and not {'avx512_bf16', 'amx_bf16'}.isdisjoint(flags)


@functools.cache
def memory() -> int:
  """Bytes of memory of this host, or of the container that limits this process."""
  sizes = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
  for path in ('memory.max', 'memory/memory.limit_in_bytes'):  # cgroup v2, v1
    with contextlib.suppress(OSError, ValueError):  # 'max' means unlimited
      sizes.append(int(pathlib.Path('/sys/fs/cgroup', path).read_text()))
  return min(sizes)


def cache_folder() -> pathlib.Path:
  """The folder for files that bert_jax can rebuild: locks, copies, compiled programs."""
  return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache',
                      'bert_jax')


def keep_freed_memory():
  """Makes glibc keep freed memory, in one arena; does nothing without glibc.

  XLA reallocates its temporaries in every step. By default glibc returns each large
  block to the kernel, and the next step faults it in again page by page. On 2 cores
  that takes a sixth to a quarter of the step time. Call this before JAX starts its
  threads: running threads keep their own arenas.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return
  mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap, which keeps them
  mallopt(_M_ARENA_MAX, 1)
  mallopt(_M_TRIM_THRESHOLD, -1)  # never trim


class FreedMemory:
  """Returns freed memory to the kernel once the process exceeds a limit.

  The limit is at first 1.25 times the peak memory of the first steps. Freed blocks of
  gigabytes fragment the heap: without a limit, a run held 12 GB while it used 4 GB. If
  later steps need more memory, each release makes the next step slow, so the limit grows
  until releases are rare.
  """

  def __init__(self):
    self._steps = 0
    self._released_at = -_RARELY
    self._limit = 0.0  # pages

  def after_step(self):
    """Call this after each step; it takes microseconds unless it releases memory."""
    try:
      pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
      self._steps += 1
      if self._steps <= _FIRST_STEPS:
        self._limit = max(self._limit, _HEADROOM * pages)
      elif pages > min(self._limit, _MOST_OF_MACHINE * memory() / os.sysconf('SC_PAGE_SIZE')):
        ctypes.CDLL(None).malloc_trim(0)
        # A release soon after the last one means that steps now need more.
        if self._steps - self._released_at < _RARELY:
          self._limit *= _HEADROOM
        self._released_at = self._steps
    except (AttributeError, OSError, ValueError):
      return
