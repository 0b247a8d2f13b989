"""Batches that worker processes make ahead."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from bert_jax.data import loader
from bert_jax.errors import Failed, UserError


def step_and_process(step: int) -> tuple[int, int]:
  return step, os.getpid()


def has_ended(worker: int) -> bool:
  for _ in range(200):
    if worker not in [x.pid for x in multiprocessing.active_children()]:
      return True
    time.sleep(0.05)
  return False


def test_batches_start_at_any_step():
  assert [*loader.batches(lambda step: 10 * step, 5, 9)] == [50, 60, 70, 80]


def test_workers_leave_signals_to_their_parent_and_end_when_closed():
  batches = loader.batches(step_and_process, 3, 40, workers=1)
  step, worker = next(batches)
  assert step == 3 and worker != os.getpid()
  os.kill(worker, signal.SIGTERM)
  assert [step for step, _ in batches] == list(range(4, 40))
  batches.close()
  assert has_ended(worker)


def test_no_more_workers_than_cores(monkeypatch):
  monkeypatch.setattr(loader.host, 'cores', lambda: 2)
  assert all(map(has_ended, [x.pid for x in multiprocessing.active_children()]))
  with contextlib.closing(loader.batches(step_and_process, 0, 40, workers=100)) as batches:
    assert next(batches)[0] == 0 and len(multiprocessing.active_children()) <= 2
  assert loader.notes(2) == loader.notes(0) == []
  assert loader.notes(100) == [
      'data.loader_workers=100: this machine has 2 cores, so 2 processes make rows']


def die(step: int):
  os.kill(os.getpid(), signal.SIGKILL)


def broken(step: int):
  raise UserError(f'step {step}: the file is gone')


@pytest.mark.parametrize('rows, error, told', [
    (die, Failed, 'a worker process died.* with fewer data.loader_workers'),
    (broken, UserError, 'step 5: the file is gone')])
def test_a_dead_or_failed_worker_is_an_error(rows, error, told):
  batches = loader.batches(rows, 5, 40, workers=1)
  with pytest.raises(error, match=told):
    next(batches)
  batches.close()


# Arrays of a size that Grain would send through shared memory.
SCRIPT = """
import os, signal, sys
import numpy as np
from bert_jax.data import loader
from bert_jax.runtime import pool

def rows(step):
  return {'ids': np.full((64, 512), step), 'labels': np.full(1000, step)}

if __name__ == '__main__':
  if sys.argv[1] == 'close':
    pool._NO_WARNING = 'default'  # Python names what is left
  batches = loader.batches(rows, 0, 30, workers=2 if sys.argv[1] == 'close' else 1)
  for step in range(3):
    assert (next(batches)['ids'] == step).all()
  if sys.argv[1] == 'close':
    batches.close()
  elif sys.argv[1] == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
  else:
    os._exit(75)
"""


@pytest.mark.medium
@pytest.mark.parametrize('end, status', [('close', 0), ('kill', -signal.SIGKILL), ('exit', 75)])
def test_a_process_that_ends_prints_nothing(tmp_path, end, status):
  """Neither Python nor a library prints: no shared memory is left."""
  (tmp_path / 'script.py').write_text(SCRIPT)
  process = subprocess.Popen([sys.executable, str(tmp_path / 'script.py'), end], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=os.environ | {'PYTHONPATH': os.getcwd()})
  output, _ = process.communicate(timeout=60)  # until the last process that could write has ended
  assert (process.returncode, output) == (status, '')


def test_steps_in_order_without_workers():
  batches = loader.batches(step_and_process, 5, 9)
  assert list(batches) == [(step, os.getpid()) for step in range(5, 9)]
  batches.close()
