"""Traces of a few steps, for TensorBoard's profile page and xprof."""

from collections.abc import Sequence
import contextlib
from typing import Any

from etils import epath
import jax

from bert_jax.errors import require
from bert_jax.runtime.console import print_summary


def check(steps: Sequence[int]):
  """Raises UserError if these are not the first and the last step of a trace."""
  if steps:
    shown = ','.join(map(str, steps))
    are_steps = all(isinstance(step, int) and step > 0 for step in steps)
    require(len(steps) == 2 and are_steps,
            f'profile_steps={shown}: give the first and the last step to trace, 10,15 say')
    first, last = steps
    require(first <= last,
            f'profile_steps={shown}: the last step to trace, {last}, is before the first, '
            f'{first}: give {last},{first}')


class Profiler:
  """Traces the steps from `steps[0]` to `steps[1]`, counted from 1; () = no trace.

  A run that resumes after the first of these steps traces nothing, and says so.
  """

  def __init__(self, steps: Sequence[int], folder: epath.Path, done: int = 0):
    """`done` is the number of steps that the run has already made."""
    self._first, self._last = steps or (None, None)
    if steps and steps[0] <= done:
      print_summary([('note', f'profile_steps={tuple(steps)}: nothing is traced, {done} '
                      'steps are done')])
    self._folder = folder
    self._trace = contextlib.ExitStack()
    self.close = self._trace.close  # ends a trace that still runs

  def before(self, step: int):
    """Call this before each step."""
    if step == self._first:
      self._trace.callback(print_summary, [(
          'profile', f'steps {step} to {self._last}: tensorboard --logdir={self._folder}')])
      self._trace.enter_context(jax.profiler.trace(str(self._folder)))

  def after(self, step: int, metrics: Any):
    """Call this after each step, with its metrics."""
    if step == self._last:
      # Otherwise the trace would end before the device does.
      jax.block_until_ready(metrics)
      self.close()
