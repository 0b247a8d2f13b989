"""Programs compiled in processes of their own, as many at a time as there are cores.

The TPU compiler keeps to one core, and two of them in one process have been seen to crash it.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import multiprocessing
from multiprocessing import connection
from multiprocessing import resource_tracker
import os
import signal
import threading
import traceback
from typing import Any
from typing import TypeVar

from bert_jax.errors import Failed
from bert_jax.runtime import pool as pool_lib

T = TypeVar('T')


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
  """A child that starts in it never sees SIGTERM or Ctrl-C: libtpu prints a stack trace for each.

  The parent ends the child.
  """
  resource_tracker.ensure_running()  # its start would unblock both
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent():
  connection.wait([multiprocessing.parent_process().sentinel])
  os._exit(1)


def _answer(answer: connection.Connection, function: Callable[..., Any], arguments: tuple):
  """Runs in the child: sends the result or the exception of a function."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  try:
    result = function(*arguments), None
  except Exception as e:
    e.add_note(traceback.format_exc())
    result = None, e
  answer.send(result)


@pool_lib.without_main_module()
def run(calls: Sequence[tuple[Callable[..., T], tuple]]) -> list[T]:
  """The results of functions and their arguments, which other processes can import.

  A call whose process dies runs once more, alone. No process outlives this function or its caller.

  Raises:
    Failed: a process dies again.
  """
  context = multiprocessing.get_context('spawn')
  results, died, running = [None] * len(calls), set(), {}
  waiting = collections.deque(range(len(calls)))
  try:
    while waiting or running:
      while waiting and len(running) < (1 if waiting[0] in died else os.cpu_count()):
        receiver, sender = context.Pipe(duplex=False)
        i = waiting.popleft()
        process = context.Process(target=_answer, args=(sender, *calls[i]))
        running[receiver] = i, process
        with _blocked_signals():
          process.start()
        sender.close()  # the child has the only one: the pipe ends with it
      for receiver in connection.wait(list(running)):
        i, process = running[receiver]
        try:
          results[i], error = receiver.recv()
        except EOFError as e:
          if i in died:
            raise Failed('the compiler crashed twice on the same program: try another length, mesh '
                         'or topology, or an older libtpu') from e
          died.add(i)
          waiting.append(i)
          error = None
        if error:
          raise error
        process.join()
        del running[receiver]
  finally:
    for _, process in running.values():
      if process.pid:
        process.kill()
        process.join()
  return results
