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


class Notice:
  """Listens for SIGTERM while it is open; a second one, seconds later, ends the process at once.

  Of several processes one hears it first, and all have to stop after the same step: JAX's
  coordination service agrees on one that none has passed.
  """

  def __init__(self):
    self._heard_at = None
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

  def reached(self, step: int) -> bool:
    """Whether to stop after `step`; every process has to ask after every step."""
    if self._several and multihost_utils.reached_preemption_sync_point(step):
      self._hear()
      signal.signal(signal.SIGTERM, self._hear)
    return self._heard_at is not None

  def close(self):
    """Listens no more."""
    signal.signal(signal.SIGTERM, self._previous)
