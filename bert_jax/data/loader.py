"""Batches ahead of time: steps to rows in the background, through Grain."""

from collections.abc import Callable
from typing import Any

from absl import flags
import grain

from bert_jax.runtime import pool


def batches(rows: Callable[[int], Any], first_step: int, last_step: int, workers: int = 0,
            ahead: int = 4) -> grain.DatasetIterator:
  """Makes the batches of steps `first_step` to `last_step` - 1 ahead; the caller closes it.

  Args:
    rows: step -> batch, a pure function; picklable if there are workers.
    workers: processes that make batches in turn; 0 = a thread of this process.
    ahead: batches that each worker makes before they are requested.
  """
  dataset = grain.MapDataset.range(first_step, last_step).map(rows).to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead))
  if workers:
    if not flags.FLAGS.is_parsed():  # in a notebook: Grain reads its own flags
      flags.FLAGS.mark_as_parsed()
    dataset = dataset.mp_prefetch(
        grain.MultiprocessingOptions(workers, per_worker_buffer_size=ahead),
        worker_init_fn=pool.begin_worker)
  return iter(dataset)
