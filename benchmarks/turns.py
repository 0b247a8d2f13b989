"""A process that makes steps in turns with others; needs nothing but Python."""

from collections.abc import Callable
import json
import resource
import sys
import time

BATCHES = 16  # that each side has; then they come again


def _peak_memory() -> int:
  """Bytes that the process held at most: on the GPU if it uses one."""
  if 'torch' in sys.modules and sys.modules['torch'].cuda.is_available():
    return sys.modules['torch'].cuda.max_memory_allocated()
  if 'jax' in sys.modules:
    held = sys.modules['jax'].local_devices()[0].memory_stats()  # None on a CPU
    if held:
      return held['peak_bytes_in_use']
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(step: Callable[[int], float], versions: str):
  """Makes the first step, then as many as each line of standard input asks for."""
  began = time.perf_counter()
  step(0)
  print(json.dumps({'first': time.perf_counter() - began, 'versions': versions}), flush=True)
  done = 1
  for line in sys.stdin:
    times = []
    for i in range(done, done + int(line)):
      began = time.perf_counter()
      loss = step(i)
      times.append(time.perf_counter() - began)
    done += len(times)
    print(json.dumps({'seconds': times, 'loss': loss, 'memory': _peak_memory()}), flush=True)
