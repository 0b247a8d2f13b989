"""The GPU benchmarks, run on a CPU."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import turns
from bert_jax.data import preparation
from tests import test_commands


@pytest.mark.slow
def test_a_benchmark_alternates_its_sides_and_lists_their_modules(corpus_file, tmp_path):
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200), str(tmp_path / 'records'))
  command = [sys.executable, '-m', 'benchmarks.train', f'--text={tmp_path / "records"}',
             f'--workdir={tmp_path}', '--sizes=tiny', '--lengths=128', '--batch=2', '--rounds=2',
             '--steps=3', '--sides=deterministic', '--modules']
  env = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}  # one device
  run = subprocess.run(command, cwd=test_commands.ROOT, env=env, capture_output=True, text=True,
                       check=False)
  assert not run.returncode, run.stderr
  lines = [json.loads(x) for x in (tmp_path / 'train.jsonl').read_text().splitlines()]
  assert [x['side'] for x in lines] == ['bert_jax', 'deterministic']
  for line in lines:
    assert len(line['seconds']) == 6  # two rounds of three
    # Two packed rows of 128, at least half of them text.
    step = sorted(line['seconds'])[2:4]
    assert 128 < line['tokens_per_second'] * sum(step) / 2 <= 256
  one_step, *modules = (tmp_path / 'tiny-128/bert_jax.txt').read_text().splitlines()
  shares = [float(line.split('%')[0]) for line in modules]
  assert one_step == 'One step'
  assert shares == sorted(shares, reverse=True) and 60 < sum(shares) <= 100.5
  assert any('feed_forward' in line for line in modules)


def test_a_benchmark_waits_until_the_others_have_compiled(tmp_path, monkeypatch):
  monkeypatch.setenv('BERT_JAX_BENCHMARKS_LOCK', str(tmp_path / 'lock'))
  turns._lock_file.cache_clear()
  other = subprocess.Popen(
      [sys.executable, '-c', 'import time; from benchmarks import turns; turns.busy(); '
       'print(flush=True); time.sleep(1); print(time.time())'],
      cwd=test_commands.ROOT, stdout=subprocess.PIPE, text=True)
  assert other.stdout.readline() == '\n'
  turns.busy()
  with turns.alone():
    began = time.time()
  assert began >= float(other.communicate()[0])
  # Two that compile at the same time take turns, and are busy again after their turn.
  both = [subprocess.Popen(
      [sys.executable, '-c', 'import time; from benchmarks import turns; turns.busy()\n'
       'with turns.alone(): a = time.time(); time.sleep(0.5); b = time.time()\nprint(a, b)'],
      cwd=test_commands.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
  turns._lock_file().close()
  turns._lock_file.cache_clear()
  (start, end), (start2, end2) = (map(float, x.communicate()[0].split()) for x in both)
  assert end <= start2 or end2 <= start


def test_a_side_warms_up_before_its_first_turn(tmp_path):
  steps = tmp_path / 'steps'
  side = turns.Side(
      [sys.executable, '-c', 'from benchmarks import turns\n'
       f'file = open({str(steps)!r}, "a", buffering=1)\n'
       'turns.serve(lambda i: file.write(f"{i}\\n") / 2, "1.0", warm=2)'], 10,
      PYTHONPATH=str(test_commands.ROOT)).ready()
  try:
    assert side.versions == '1.0' and steps.read_text().split() == ['0', '1', '2']
    side.run(2)
    side.run(1, cold=0)
  finally:
    side.close()
  assert steps.read_text().split() == ['0', '1', '2', '3', '4', '5', '6']
  assert len(side.seconds) == 3  # step 3 was cold


def test_a_side_that_runs_ahead_reads_one_loss_for_each_turn(tmp_path):
  """A turn's time is the mean of its steps: a step takes 0 s here, and reading a loss 0.2 s."""
  (tmp_path / 'side.py').write_text('''
import time
from benchmarks import turns

class Loss:
  def __float__(self):
    time.sleep(0.2)
    return 1.0

turns.serve(lambda i: Loss(), '1.0', runs_ahead=True)
''')
  side = turns.Side([sys.executable, str(tmp_path / 'side.py')], 10,
                    PYTHONPATH=str(test_commands.ROOT)).ready()
  try:
    side.run(10)
    side.run(4)
  finally:
    side.close()
  assert 0.02 <= side.seconds[0] < 0.05 <= side.seconds[1] < 0.1
