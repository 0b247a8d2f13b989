"""Prefetches batches in the background, by a thread or by worker processes."""

from collections.abc import Callable, Iterator
from typing import Any

import grain

from bert_jax.runtime import host, pool


def notes(workers: int) -> list[str]:
  """Returns a note for the user if the machine has fewer cores than `workers`."""
  cores = host.cores()
  return [f'data.loader_workers={workers}: this machine has {cores} cores, so {cores} '
          'processes make rows'] if workers > cores else []


def batches(rows: Callable[[int], Any], first_step: int, end_step: int, workers: int = 0,
            ahead: int = 4) -> Iterator[Any]:
  """Makes the batches of some steps ahead of time; the caller closes the iterator.

  Args:
    rows: step -> batch, a pure function; picklable if there are workers.
    first_step: the step of the first batch.
    end_step: one more than the step of the last batch.
    workers: processes that make batches in turn, limited to the number of cores; 0 = a
      thread of this process.
    ahead: batches that each worker makes before they are requested.

  Raises:
    Failed: a worker died.
  """
  if workers:
    return _from_workers(rows, range(first_step, end_step), min(workers, host.cores()),
                         ahead)
  # One thread is enough to read ahead: it fills the buffer while a step runs.
  dataset = grain.MapDataset.range(first_step, end_step).map(rows).to_iter_dataset(
      grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead))
  return iter(dataset)


def _from_workers(rows: Callable[[int], Any], steps: range, workers: int,
                  ahead: int) -> Iterator[Any]:
  """Yields batches from workers; closing it ends each worker after its current batch.

  Grain's own workers are not used: they send batches through shared memory, which
  containers limit, and do not free all of it.
  """
  # `bool` is a warm-up that does nothing: `_begin_worker` does all that is needed.
  with pool.processes(workers, bool, initializer=_begin_worker,
                      initargs=(rows,)) as executor:
    yield from pool.ordered_map(executor, _rows, steps, at_once=workers * ahead,
                                field='data.loader_workers')


def _begin_worker(rows: Callable[[int], Any]):
  # A global: `rows` is pickled once for each worker, not for each step.
  global _rows_of
  pool.begin_worker()
  _rows_of = rows


def _rows(step: int) -> Any:
  return _rows_of(step)
