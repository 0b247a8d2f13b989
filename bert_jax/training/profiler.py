"""Traces of a few steps, for TensorBoard's profile page and xprof."""

from collections.abc import Sequence
from typing import Any

from etils import epath
import jax

from bert_jax.errors import UserError
from bert_jax.runtime.console import print_summary


def check(steps: Sequence[int]):
  """Raises UserError if these are not the first and the last step of a trace."""
  if steps and (len(steps) != 2 or not all(isinstance(step, int) for step in steps)
                or not 0 < steps[0] <= steps[1]):
    raise UserError(f'profile_steps={tuple(steps)}: give the first and the last step to trace, '
                    '10,15 say')


class Profiler:
  """Traces from one step to another, once.

  Args of the constructor:
    steps: the first and the last, counted from 1; () = none.
    folder: where TensorBoard looks.
  """

  def __init__(self, steps: Sequence[int], folder: epath.Path):
    self._steps, self._folder, self._runs = tuple(steps), folder, False

  def before(self, step: int):
    """To be called before step number `step`."""
    if self._steps and step == self._steps[0]:
      jax.profiler.start_trace(str(self._folder))
      self._runs = True

  def after(self, step: int, result: Any):
    """To be called after it, with what it gives."""
    if self._runs and step == self._steps[1]:
      jax.block_until_ready(result)
      self.close()

  def close(self):
    """Ends a trace that still runs."""
    if self._runs:
      jax.profiler.stop_trace()
      self._runs = False
      print_summary([('profile', f'steps {self._steps[0]} to {self._steps[1]}: '
                                 f'tensorboard --logdir={self._folder}')])
