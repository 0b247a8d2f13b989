"""A function over many items in worker processes, in order, with bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
from concurrent.futures.process import BrokenProcessPool
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from typing import Any

from bert_jax.errors import Failed

# Read by every Python that this process starts: 'action:message:category'.
_NO_WARNING = 'ignore:resource_tracker:UserWarning'


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
  """Keeps worker processes that start inside from importing the main module.

  A script that calls run.run without `if __name__ == '__main__'` would begin anew in each of them.
  """
  main = vars(sys.modules['__main__'])
  names = {name: main[name] for name in ('__file__', '__spec__') if name in main}
  main.update(dict.fromkeys(names))  # multiprocessing finds the module by them
  try:
    yield
  finally:
    main.update(names)


def begin_worker():
  """Prepares a worker process: it ignores signals and ends with its parent."""
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # the processes are the parallelism
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  parent = multiprocessing.parent_process().sentinel

  def die_with_parent():  # else the workers of a killed parent would wait for ever
    multiprocessing.connection.wait([parent])
    os._exit(1)

  threading.Thread(target=die_with_parent, daemon=True).start()


@contextlib.contextmanager
def processes(workers: int, warm_up: Callable[[], Any], initializer: Callable = begin_worker,
              initargs: tuple = ()) -> Iterator[concurrent.futures.Executor]:
  """Worker processes, which start at once and call `warm_up`; they end with the context.

  Each begins with `initializer(*initargs)`, which calls `begin_worker`.
  """
  # Python's tracker of semaphores cleans up after a parent that ended at once, and would say so.
  if _NO_WARNING not in sys.warnoptions:
    sys.warnoptions.append(_NO_WARNING)
  # Not fork: the parent may have threads (JAX's, tokenizers').
  executor = concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context('spawn'), initializer=initializer, initargs=initargs)
  try:
    for _ in range(workers):
      executor.submit(warm_up)
    yield executor
  finally:
    # Waits: a child process of multiprocessing closes the queue at its exit, and workers that had
    # not been told to end by then would wait forever.
    executor.shutdown(cancel_futures=True)


def ordered_map(executor: concurrent.futures.Executor, function: Callable[[Any], Any],
                items: Iterable[Any], at_once: int, field: str = '--workers') -> Iterator[Any]:
  """Yields function(item) for each item, in order; holds at most `at_once` items.

  The function must be picklable. Raises Failed if a worker dies; `field` is the number of workers.
  """
  waiting = deque()
  try:
    for item in items:
      waiting.append(executor.submit(function, item))
      if len(waiting) >= at_once:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  except BrokenProcessPool as e:
    raise Failed('a worker process died, killed perhaps for want of memory: run the same command '
                 f'again to go on, with fewer {field} if need be') from e
