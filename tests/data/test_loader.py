"""Batches that worker processes make ahead."""

import multiprocessing
import os
import signal

from bert_jax.data import loader


def step_and_process(step: int) -> tuple[int, int]:
  return step, os.getpid()


def test_workers_leave_signals_to_their_parent_and_end_when_closed():
  batches = loader.batches(step_and_process, 3, 40, workers=1)
  step, worker = next(batches)
  assert step == 3 and worker != os.getpid()
  os.kill(worker, signal.SIGTERM)
  assert [step for step, _ in batches] == list(range(4, 40))
  batches.close()
  assert worker not in [x.pid for x in multiprocessing.active_children()]


def test_steps_in_order_without_workers():
  batches = loader.batches(step_and_process, 5, 9)
  assert list(batches) == [(step, os.getpid()) for step in range(5, 9)]
  batches.close()
