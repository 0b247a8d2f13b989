"""SIGTERM, which a platform sends before it takes a machine away: heard by all at the same step."""

import os
import signal
import sys
import time

import jax
from jax.experimental import multihost_utils

from bert_jax.errors import EXIT_FAILED

# A platform may signal the run and what started it, which passes the signal on: that is one.
ONE_SIGNAL = 2.0  # seconds


def _end_at_once():
  print('bert_jax: stopped at once by a second SIGTERM: what was saved before is sound, run the '
        'same command to go on', file=sys.stderr, flush=True)
  os._exit(EXIT_FAILED)


class Stopped(Exception):
  """SIGTERM was heard in the middle of something that is done again when the run goes on."""


class Notice:
  """Listens for SIGTERM while it is open; a second one, seconds later, ends the process at once.

  Of several processes one hears it first, and all have to stop after the same step: JAX's
  coordination service agrees on one that none has passed.
  """

  def __init__(self):
    self._heard_at, self._asked = None, 0
    self._several = jax.process_count() > 1
    # JAX has a handler of its own in each of several processes.
    self._previous = signal.getsignal(signal.SIGTERM)
    if not self._several:
      signal.signal(signal.SIGTERM, self._hear)

  def _hear(self, *_):
    now = time.monotonic()
    self._heard_at = self._heard_at or now
    if now - self._heard_at > ONE_SIGNAL:
      _end_at_once()

  def reached(self) -> bool:
    """Whether to stop here; every process has to ask at the same places."""
    self._asked += 1  # JAX numbers the places, and agrees on the first that all can stop at
    if self._several and multihost_utils.reached_preemption_sync_point(self._asked):
      self._hear()
      signal.signal(signal.SIGTERM, self._hear)
    return self._heard_at is not None

  def close(self):
    """Listens no more."""
    signal.signal(signal.SIGTERM, self._previous)
