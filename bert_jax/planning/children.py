"""Programs compiled in processes of their own, as many at a time as there are cores.

The TPU compiler keeps to one core, and two of them in one process have been seen to crash it.
"""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
import multiprocessing
import os
from typing import TypeVar

from bert_jax.data import pool as pool_lib
from bert_jax.errors import Failed

T = TypeVar('T')


@pool_lib.without_main_module()
def run(calls: Sequence[tuple[Callable[..., T], tuple]]) -> list[T]:
  """The results of functions and their arguments, which other processes can import.

  What a process died of is tried once more, by itself.

  Raises:
    Failed: it died again.
  """
  context = multiprocessing.get_context('spawn')
  results, died = [None] * len(calls), []
  with futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
    running = [pool.submit(function, *arguments) for function, arguments in calls]
    for i, future in enumerate(running):
      try:
        results[i] = future.result()
      except BrokenProcessPool:
        died.append(i)
  for i in died:
    function, arguments = calls[i]
    with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
      try:
        results[i] = pool.submit(function, *arguments).result()
      except BrokenProcessPool as e:
        raise Failed('the compiler crashed twice on the same program: try another length, mesh or '
                     'topology, or an older libtpu') from e
  return results
