"""SIGTERM, which a platform sends before it takes a machine away: all processes stop together.

Ctrl-C ends a run at once, and is not lost where Python drops exceptions.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import time

import jax
from jax.experimental import multihost_utils

from bert_jax.errors import EXIT_FAILED

# A platform may signal the run and its parent, which passes the signal on: these two are one.
ONE_SIGNAL = 2.0  # seconds


class Stopped(Exception):
  """SIGTERM interrupted work that is done again when the run goes on."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
  """Delays Ctrl-C to the end of the block, for code of others that does not expect it."""
  heard = []
  previous = signal.signal(signal.SIGINT, lambda *arguments: heard.append(arguments))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, previous)
  if heard and callable(previous):  # it is not ignored
    previous(*heard[0])


class Notice:
  """Listens for SIGTERM until it is closed; a second one, seconds later, ends the process at once.

  Of several processes one hears it first, and all have to stop after the same step: JAX's
  coordination service agrees on a step that none has passed.

  Ctrl-C raises KeyboardInterrupt. Python drops an exception in a callback of the garbage collector:
  then `reached` raises it again.
  """

  def __init__(self):
    self._heard_at: float | None = None
    self._calls = 0
    self._several = jax.process_count() > 1
    self._interrupted = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nobody ignores it
      signal.signal(signal.SIGINT, self._interrupt)
    self._previous = signal.getsignal(signal.SIGTERM)
    if not self._several:  # JAX installs a handler of its own in each of several processes
      signal.signal(signal.SIGTERM, self._hear)

  def _hear(self, *_):
    now = time.monotonic()
    self._heard_at = self._heard_at or now
    if now - self._heard_at > ONE_SIGNAL:
      print('bert_jax: stopped at once by a second SIGTERM: what was saved before is sound, run '
            'the same command to go on', file=sys.stderr, flush=True)
      os._exit(EXIT_FAILED)

  def _interrupt(self, *_):
    self._interrupted = True
    raise KeyboardInterrupt

  def reached(self) -> bool:
    """True if the run stops here; every process has to call it at the same places."""
    if self._interrupted:
      raise KeyboardInterrupt
    self._calls += 1  # JAX numbers the places, and agrees on the first that all can stop at
    if self._several and multihost_utils.reached_preemption_sync_point(self._calls):
      self._hear()
      signal.signal(signal.SIGTERM, self._hear)
    return self._heard_at is not None

  def close(self):
    if signal.getsignal(signal.SIGINT) == self._interrupt:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    # Several processes keep the handler: one that SIGTERM ended now would leave the others waiting.
    if not self._several:
      signal.signal(signal.SIGTERM, self._previous)
