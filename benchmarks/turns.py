"""Processes that make steps in turns; needs only Python.

Several benchmarks may start at once on one GPU. `busy` marks a benchmark that compiles.
`alone` waits until none of the others compiles or measures.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import functools
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

BATCHES = 16  # batches that each side has; then they repeat
# Names a file that the benchmarks of one GPU lock.
_LOCK = 'BERT_JAX_BENCHMARKS_LOCK'
_STARTED = 'BERT_JAX_BENCHMARKS_STARTED'  # when the process of a side was started
# All sides share the memory of one GPU.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')


@functools.cache
def _lock_file() -> io.IOBase | None:
  return open(os.environ[_LOCK], 'a+') if os.environ.get(_LOCK) else None


def _lock(mode: int):
  if file := _lock_file():
    fcntl.flock(file, fcntl.LOCK_UN)  # two processes that held it would wait for each other
    fcntl.flock(file, mode)


def busy():
  """Makes the other benchmarks wait before they measure, until this process ends."""
  _lock(fcntl.LOCK_SH)


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Measures while no other benchmark compiles or measures."""
  _lock(fcntl.LOCK_EX)
  try:
    yield
  finally:
    busy()


def _peak_memory() -> int:
  """Returns the peak memory of the process in bytes, on the GPU if it uses one."""
  if 'torch' in sys.modules and sys.modules['torch'].cuda.is_available():
    return sys.modules['torch'].cuda.max_memory_allocated()
  if 'jax' in sys.modules:
    held = sys.modules['jax'].local_devices()[0].memory_stats()  # None on a CPU
    if held:
      return held['peak_bytes_in_use']
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(step: Callable[[int], Any], versions: str, warm: int = 0,
          runs_ahead: bool = False):
  """Makes the first step, then the steps that each line of standard input asks for.

  A line has two numbers: steps that are not timed, then steps that are.

  Args:
    step: makes the step with the given number, and returns its loss for `float`.
    versions: library names and versions.
    warm: more steps before the first turn: PyTorch compiles again for another shape.
    runs_ahead: whether only the last loss of a turn is read, as in a training loop on an
      accelerator. The turn then has one time: the mean of its steps.
  """
  began = time.time()
  float(step(0))
  start = time.time() - float(os.environ.get(_STARTED, began))
  for i in range(1, 1 + warm):
    float(step(i))
  print(json.dumps({'start': start, 'versions': versions}), flush=True)
  done = 1 + warm
  for line in sys.stdin:
    cold, steps = map(int, line.split())
    for i in range(done, done + cold):
      float(step(i))
    done += cold
    times, group = [], steps if runs_ahead else 1
    for first in range(done, done + steps, group):
      began = time.perf_counter()
      for i in range(first, first + group):
        loss = step(i)
      loss = float(loss)
      times.append((time.perf_counter() - began) / group)
    done += steps
    print(json.dumps({'seconds': times, 'loss': loss, 'memory': _peak_memory()}), flush=True)


class Side:
  """A process that runs `serve`: it waits while the others make their steps.

  Attributes:
    versions: the versions of its libraries.
    start: seconds from its start to the end of its first step, with imports and
      compilation, beside the sides that start at the same time.
    seconds: the time of each counted step, or the mean of each turn.
    memory: peak memory in bytes.
  """

  def __init__(self, command: list[str], tokens: float, **env: str):
    """Starts the process: a step has `tokens` tokens, `env` is added to the environment."""
    self._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | env | {_STARTED: str(time.time())})
    self._tokens, self.seconds, self.memory = tokens, [], 0

  def ready(self) -> 'Side':
    """Waits for the first step."""
    answer = self._answer()
    self.versions, self.start = answer['versions'], answer['start']
    return self

  def _answer(self) -> dict[str, Any]:
    for line in self._process.stdout:
      if line.startswith('{'):
        return json.loads(line)
    raise RuntimeError(f'{self._process.args} has ended')

  def run(self, steps: int, cold: int = 1):
    """Makes a turn. The first `cold` steps are not counted, because their caches are cold."""
    self._process.stdin.write(f'{cold} {steps}\n')
    self._process.stdin.flush()
    answer = self._answer()
    self.seconds += answer['seconds']
    self.memory = answer['memory']

  @property
  def median(self) -> float:
    """Seconds of a step."""
    return statistics.median(self.seconds)

  @property
  def tokens_per_second(self) -> float:
    """Real tokens per second, without padding."""
    return self._tokens / self.median

  def kill(self):
    """Ends the process at once."""
    self._process.kill()

  def close(self):
    """Ends the process after its work."""
    self._process.stdin.close()
    self._process.wait()
