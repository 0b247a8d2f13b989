"""SIGTERM and Ctrl-C: all processes save the same step; a second SIGTERM ends them at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from etils import epath
import pytest

from bert_jax.errors import Preempted
from bert_jax.reporting import metrics_log
from bert_jax.runs import run
from bert_jax.runtime import preemption
from bert_jax.tasks.pretraining_data import PretrainingData
from bert_jax.training import integrity
from tests import conftest, test_commands
from tests.runtime import test_processes
from tests.runtime.test_processes import records  # noqa: F401

LONG = ('--config.train_steps=2000', '--config.checkpoint_every=1000', '--config.log_every=5',
        '--config.eval_every=2000')


def saved(workdir, folder='checkpoints') -> list[int]:
  return integrity.steps(epath.Path(workdir / folder))


def test_sigterm_before_the_first_step_exits_with_75(tmp_path, corpus_file):
  process = subprocess.Popen(**test_commands.command(*test_commands.train(
      corpus_file, tmp_path / 'run', '--config.train_steps=2000')))
  while not (tmp_path / 'run').exists():
    assert process.poll() is None
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=100)
  assert process.returncode == 75 and len(err.splitlines()) == 1, err
  assert 'stopped by SIGTERM' in err


# Sends itself SIGTERM at once, a second later and ONE_SIGNAL later; prints whether it noticed.
SIGNALS = """
import os, signal, time
from bert_jax.runtime import preemption
notice = preemption.Notice()
print(notice.reached())
for pause in (0, 1, preemption.ONE_SIGNAL):
  time.sleep(pause)
  os.kill(os.getpid(), signal.SIGTERM)
  print(notice.reached(), flush=True)
"""


def test_a_second_signal_ends_a_run_at_once():
  done = subprocess.run([sys.executable, '-c', SIGNALS], cwd=test_commands.ROOT, text=True,
                        capture_output=True)
  assert done.stdout.split() == ['False', 'True', 'True'] and done.returncode == 1
  assert len(done.stderr.splitlines()) == 1 and 'a second SIGTERM' in done.stderr


def test_the_first_signal_of_a_process_after_the_agreement_does_not_end_it(monkeypatch):
  """GKE signals each host on its own: one may save already when its own signal comes."""
  monkeypatch.setattr(preemption.multihost_utils, 'reached_preemption_sync_point',
                      lambda call: call == 2)
  monkeypatch.setattr(preemption.jax, 'process_count', lambda: 2)
  clock, ended = [0.0], []
  monkeypatch.setattr(preemption.time, 'monotonic', lambda: clock[0])
  monkeypatch.setattr(preemption.os, '_exit', ended.append)
  before = signal.getsignal(signal.SIGTERM)
  try:
    notice = preemption.Notice()
    assert [notice.reached() for _ in range(3)] == [False, True, True]
    clock[0] = 1000.0
    os.kill(os.getpid(), signal.SIGTERM)
    assert not ended and notice.reached()
    clock[0] += preemption.ONE_SIGNAL + 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [preemption.EXIT_FAILED]
    notice.close()
  finally:
    signal.signal(signal.SIGTERM, before)


class InterruptedWhenDeleted:
  def __del__(self):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python handles the signal here


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_ctrl_c_in_a_callback_is_not_lost():
  with contextlib.closing(preemption.Notice()) as notice:
    assert not notice.reached()
    InterruptedWhenDeleted()  # Python drops the exception
    with pytest.raises(KeyboardInterrupt):
      notice.reached()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_end_of_an_uninterrupted_block():
  ended = False
  with pytest.raises(KeyboardInterrupt), preemption.uninterrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python handles the signal here
    ended = True
  assert ended and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored():
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with preemption.uninterrupted():
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.01)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated_after_resuming(tmp_path, corpus_file, monkeypatch):
  config = conftest.tiny_config(corpus_file, keep_best='mlm_loss', checkpoint_every=100,
                                log_every=3, **{'data.heldout': 0.1})
  run.run(config, str(tmp_path / 'unbroken'))
  evaluate, measured = PretrainingData.evaluate, []
  stops = iter([True, True, False, True, False])  # also in the evaluation of the resumed run

  def evaluate_or_stop(self, evaluate_batch, step):
    if next(stops):
      os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(self, lambda batch: measured.append(step) or evaluate_batch(batch), step)

  monkeypatch.setattr(PretrainingData, 'evaluate', evaluate_or_stop)
  for step in (6, 6, 12):
    with pytest.raises(Preempted, match=f'after step {step} of 12'):
      run.run(config, str(tmp_path / 'run'))
    assert saved(tmp_path / 'run')[-1] == step
  run.run(config, str(tmp_path / 'run'))
  whole = measured.count(12) - 1  # the interrupted run drops one batch
  assert whole > 1 and measured.count(6) == whole + 2
  assert list(stops) == []

  def read(name):
    return [{k: v for k, v in line.items() if k not in ('tokens_per_second', 'data_wait')}
            for line in metrics_log.read_metrics(epath.Path(tmp_path / name / 'metrics.jsonl'))]

  assert read('run') == read('unbroken')
  assert saved(tmp_path / 'run', 'best') == saved(tmp_path / 'unbroken', 'best') != []


@pytest.mark.slow
@pytest.mark.parametrize('told', [1, 0])
def test_all_processes_stop_at_the_same_step(records, tmp_path, told):  # noqa: F811
  arguments = test_commands.train(records, tmp_path / 'run', *LONG)
  running = test_processes.start(2, tmp_path / 'run', *arguments)
  test_commands.wait_for_step(tmp_path / 'run', 20)
  running[told].send_signal(signal.SIGTERM)  # the other process notices too
  ended = [process.communicate(timeout=100) for process in running]
  assert [process.returncode for process in running] == [75, 75], ended
  steps = {err.split('after step ')[1].split()[0] for _, err in ended}
  assert len(steps) == 1 and saved(tmp_path / 'run') == [int(steps.pop())]
