"""Runs functions in child processes, one per core at a time.

The TPU compiler uses one core, and it has crashed on two concurrent compilations in one
process.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import multiprocessing
from multiprocessing import connection, resource_tracker
import os
import signal
import traceback
from typing import Any

from bert_jax.errors import Failed
from bert_jax.runtime import pool

Call = tuple[Callable[..., Any], tuple]  # a function and its arguments
_CRASHED = object()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
  """Blocks SIGTERM and Ctrl-C in children that start in this context.

  libtpu prints a stack trace for each signal. The parent ends its children instead.
  """
  # The start of the tracker unblocks both signals, so it must come first.
  resource_tracker.ensure_running()
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(outcome: connection.Connection, function: Callable[..., Any],
           arguments: tuple):
  """Calls a function in a child process; sends (result, None) or (None, exception)."""
  pool.begin_worker()
  try:
    message = function(*arguments), None
  except Exception as e:
    e.add_note(traceback.format_exc())  # pickling drops the traceback
    message = None, e
  outcome.send(message)


def _run(calls: Sequence[Call], at_once: int) -> list[Any]:
  """The results of calls; _CRASHED for each call whose process died."""
  context = multiprocessing.get_context('spawn')
  results, running, waiting = [_CRASHED] * len(calls), {}, list(range(len(calls)))
  try:
    while waiting or running:
      while waiting and len(running) < at_once:
        i = waiting.pop(0)
        receiver, sender = context.Pipe(duplex=False)
        with _blocked_signals():
          process = context.Process(target=_child, args=(sender, *calls[i]))
          process.start()
          running[receiver] = i, process
        # With the child as the only sender, the pipe closes when the child dies.
        sender.close()
      for receiver in connection.wait(list(running)):
        i, process = running[receiver]
        with contextlib.suppress(EOFError):
          results[i], error = receiver.recv()
          if error:
            raise error
        process.join()
        del running[receiver]
  finally:
    for _, process in running.values():
      process.kill()
      process.join()
  return results


@pool.without_main_module()
def run(calls: Sequence[Call]) -> list[Any]:
  """Calls functions in child processes and returns their results.

  If a process dies, its call runs once more, alone. No process outlives this function or
  its caller.

  Args:
    calls: functions that a child process can import, with their arguments.

  Raises:
    Failed: the process of a call died twice.
  """
  results = _run(calls, at_once=os.cpu_count())
  for i, call in enumerate(calls):
    # Alone, so that this compiler has all of the memory.
    if results[i] is _CRASHED:
      (results[i],) = _run([call], at_once=1)
    if results[i] is _CRASHED:
      raise Failed('the compiler crashed twice on the same program: try another length, '
                   'mesh or topology, or an older libtpu')
  return results
