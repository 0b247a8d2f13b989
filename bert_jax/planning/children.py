"""Runs functions in processes of their own, as many at a time as there are cores.

The TPU compiler keeps to one core, and two compilations at once in one process have crashed it.
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
  """A child that starts inside never sees SIGTERM or Ctrl-C: libtpu prints a stack trace for each.

  The parent ends the child.
  """
  resource_tracker.ensure_running()  # its start would unblock both
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(outcome: connection.Connection, function: Callable[..., Any], arguments: tuple):
  """Sends (result, None) or (None, exception)."""
  pool.begin_worker()
  try:
    message = function(*arguments), None
  except Exception as e:
    e.add_note(traceback.format_exc())
    message = None, e
  outcome.send(message)


def _run(calls: Sequence[Call], at_once: int) -> list[Any]:
  """The results of calls; _CRASHED for those whose process died."""
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
        sender.close()  # the child alone can send now: the pipe ends when it dies
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
  """The results of calls of functions, which other processes can import.

  A call whose process dies runs once more, alone. No process outlives this function or its caller.

  Raises:
    Failed: a process dies again.
  """
  results = _run(calls, at_once=os.cpu_count())
  for i, call in enumerate(calls):
    if results[i] is _CRASHED:
      (results[i],) = _run([call], at_once=1)
    if results[i] is _CRASHED:
      raise Failed('the compiler crashed twice on the same program: try another length, mesh or '
                   'topology, or an older libtpu')
  return results
