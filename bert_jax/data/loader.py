"""Batches ahead of time: steps to rows in the background, through Grain."""

from collections.abc import Callable
from typing import Any

from absl import flags
import grain

from bert_jax.runtime import pool


def batches(rows: Callable[[int], Any], first_step: int, last_step: int, workers: int = 0,
            ahead: int = 4) -> grain.DatasetIterator:
  """The batches of steps `first_step` .. `last_step - 1`, a few made ahead; to be closed.

  Args:
    rows: step -> batch, pure: seeking is a start at another step. Picklable if there are workers.
    first_step, last_step: the steps, the last one excluded.
    workers: processes that make them, in turn; 0 = a thread of this one.
    ahead: batches made before they are asked for, by each worker.
  """
  steps = grain.MapDataset.range(first_step, last_step).map(rows)
  made = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead))
  if workers:
    if not flags.FLAGS.is_parsed():  # in a notebook: Grain looks at flags of its own
      flags.FLAGS.mark_as_parsed()
    made = made.mp_prefetch(grain.MultiprocessingOptions(workers, per_worker_buffer_size=ahead),
                            worker_init_fn=pool.begin_worker)
  return iter(made)
