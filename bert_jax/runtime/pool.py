"""Maps a function over items in worker processes, in order, with bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from typing import Any

from bert_jax.errors import Failed

# A warning filter 'action:message:category', which child processes inherit.
_NO_WARNING = 'ignore:resource_tracker:UserWarning'


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
  """Keeps worker processes that start in this context from importing the main module.

  A script that calls run.run without `if __name__ == '__main__'` would otherwise run
  again in every worker.
  """
  main = vars(sys.modules['__main__'])
  # multiprocessing locates the main module by these two.
  names = {name: main[name] for name in ('__file__', '__spec__') if name in main}
  main.update(dict.fromkeys(names))
  try:
    yield
  finally:
    main.update(names)


def begin_worker():
  """Prepares a worker process: it ignores signals and ends with its parent."""
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # one thread: the pool has all cores
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  parent = multiprocessing.parent_process().sentinel

  def die_with_parent():
    # Workers of a killed parent would otherwise wait forever.
    multiprocessing.connection.wait([parent])
    os._exit(1)

  threading.Thread(target=die_with_parent, daemon=True).start()


@contextlib.contextmanager
def processes(workers: int, warm_up: Callable[[], Any],
              initializer: Callable = begin_worker,
              initargs: tuple = ()) -> Iterator[concurrent.futures.Executor]:
  """Starts worker processes, which call `warm_up` at once and end with the context.

  Each worker first calls `initializer(*initargs)`, which calls `begin_worker`.
  """
  # Python's resource tracker warns when it cleans up after a parent that calls os._exit.
  if _NO_WARNING not in sys.warnoptions:
    sys.warnoptions.append(_NO_WARNING)
  # Not fork: the parent may have threads (of JAX, of tokenizers).
  executor = concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context('spawn'),
      initializer=initializer, initargs=initargs)
  try:
    for _ in range(workers):
      executor.submit(warm_up)
    yield executor
  finally:
    # Wait here: a child process of multiprocessing closes the queue at its exit, and
    # workers that have not heard of the end by then would wait forever.
    executor.shutdown(cancel_futures=True)


def ordered_map(executor: concurrent.futures.Executor, function: Callable[[Any], Any],
                items: Iterable[Any], at_once: int,
                field: str = '--workers') -> Iterator[Any]:
  """Yields function(item) for each item, in order; holds at most `at_once` items.

  Args:
    executor: the pool, see `processes`.
    function: a picklable function.
    items: an iterable, which is read only as fast as results are consumed.
    at_once: maximum number of items in flight.
    field: the setting for the number of workers, for the error message.

  Raises:
    Failed: a worker died.
  """
  waiting = deque()
  try:
    for item in items:
      waiting.append(executor.submit(function, item))
      if len(waiting) >= at_once:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  except concurrent.futures.BrokenExecutor as e:
    # The kernel's OOM killer is the usual cause, and it leaves no message.
    raise Failed(
        'a worker process died, perhaps because memory ran out: run the same command '
        f'again to resume, with fewer {field} if needed') from e
