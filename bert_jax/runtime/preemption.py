"""Preemption: on SIGTERM all processes of a run save and stop after the same step.

Cloud platforms send SIGTERM before they take a machine away. Ctrl-C ends a run at once,
or at the next step if Python drops the exception.
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

# Two signals within this time count as one: a platform may signal the run and its parent,
# which forwards the signal.
ONE_SIGNAL = 2.0  # seconds


class Stopped(Exception):
  """SIGTERM interrupted work that the resumed run repeats."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
  """Delays Ctrl-C to the end of the block, for libraries that do not handle it."""
  heard = []
  previous = signal.signal(signal.SIGINT, lambda *arguments: heard.append(arguments))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, previous)
  if heard and callable(previous):  # not SIG_IGN or SIG_DFL
    previous(*heard[0])


class Notice:
  """Listens for SIGTERM until it is closed; a second SIGTERM ends the process at once.

  One of several processes receives the signal first, but all have to stop after the same
  step. JAX's coordination service hears it and picks a step that no process has passed.
  Signals before this agreement do not count as the first or the second SIGTERM.

  Ctrl-C raises KeyboardInterrupt. Python drops an exception that is raised in a callback
  of the garbage collector; `reached` raises it again.
  """

  def __init__(self):
    self._heard_at: float | None = None
    self._calls = 0
    self._agreed = False  # all processes stop here; this one may have heard no signal
    self._several = jax.process_count() > 1
    self._interrupted = False
    # A background job of a shell starts with SIGINT ignored; that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
      signal.signal(signal.SIGINT, self._interrupt)
    self._previous = signal.getsignal(signal.SIGTERM)
    # In a run of several processes JAX installs its own handler for SIGTERM.
    if not self._several:
      signal.signal(signal.SIGTERM, self._hear)

  def _hear(self, *_):
    now = time.monotonic()
    self._heard_at = self._heard_at or now
    if now - self._heard_at > ONE_SIGNAL:
      print('bert_jax: stopped at once by a second SIGTERM: earlier checkpoints are '
            'intact, run the same command to resume', file=sys.stderr, flush=True)
      os._exit(EXIT_FAILED)

  def _interrupt(self, *_):
    self._interrupted = True
    raise KeyboardInterrupt

  def reached(self) -> bool:
    """True if the run stops here; every process must call it at the same points."""
    if self._interrupted:
      raise KeyboardInterrupt
    # JAX numbers these points and picks the first one that all processes can reach.
    self._calls += 1
    if (self._several and not self._agreed
        and multihost_utils.reached_preemption_sync_point(self._calls)):
      self._agreed = True
      # This process may get its first SIGTERM only now, while it saves.
      signal.signal(signal.SIGTERM, self._hear)
    return self._agreed or self._heard_at is not None

  def close(self):
    if signal.getsignal(signal.SIGINT) == self._interrupt:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    # With several processes the handler stays: if one dies now, the others hang.
    if not self._several:
      signal.signal(signal.SIGTERM, self._previous)
