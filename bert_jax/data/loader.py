"""Batches ahead of time: steps to rows in the background, through Grain."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import grain


def batches(rows: Callable[[int], Any], first_step: int, last_step: int,
            ahead: int = 4) -> Iterator[Any]:
  """The batches of steps `first_step` .. `last_step - 1`, a few made ahead in a thread.

  Args:
    rows: step -> batch, pure: seeking is a start at another step.
    first_step, last_step: the steps, the last one excluded.
    ahead: batches made before they are asked for.
  """
  steps = grain.MapDataset.range(first_step, last_step).map(rows)
  return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)))
