"""launch/supervise.py: which runs it restarts or gives up, and with which exit status."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from bert_jax import errors
from tests import test_commands

ROOT = pathlib.Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location('supervise', ROOT / 'launch/supervise.py')
supervise = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(supervise)

# Each start appends to `log` and ends as its word says; 'saves' writes a checkpoint before.
SCRIPT = """
import pathlib, os, signal, sys
workdir = pathlib.Path({workdir!r})
log = workdir / 'log'
starts = len(log.read_text()) if log.exists() else 0
log.write_text('x' * (starts + 1))
word = {words!r}[min(starts, len({words!r}) - 1)]
if word == 'saves':
  (workdir / 'checkpoints' / str(starts + 1)).mkdir(parents=True)
  sys.exit(1)
if word == 'killed':
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit(word)
"""


@pytest.fixture(autouse=True)
def handler_of_sigterm():
  """`Supervisor.run` installs its own."""
  before = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize('words, status, starts', [
    ([0], 0, 1), ([2], 2, 1), ([1, 0], 0, 2), (['killed', 0], 0, 2), ([75, 75, 75, 75, 0], 0, 5),
    ([1], 1, 3), (['killed'], 1, 3), ([1, 1, 'saves', 1, 1], 1, 5),
    ([1, 1, 'saves', 1, 'saves', 1, 'saves', 0], 0, 8)])
def test_a_run_restarts_until_it_fails_without_progress(tmp_path, capsys, words, status, starts):
  command = [sys.executable, '-c', SCRIPT.format(workdir=str(tmp_path), words=words)]
  assert supervise.Supervisor(command, str(tmp_path)).run(3, 0) == status
  assert (tmp_path / 'log').read_text() == 'x' * starts
  assert capsys.readouterr().err.count('started again') == sum(w not in (0, 2, 75) for w in (
      words + words[-1:] * 9)[:starts]) - (status == 1)


def test_a_run_that_is_killed_after_sigterm_counts_as_failed(tmp_path):
  """A platform kills a run when its grace period is over."""
  script = ('import os, signal, time; '
            'signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL)); '
            'os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)')
  status = supervise.Supervisor([sys.executable, '-c', script], str(tmp_path)).run(3, 0)
  assert status == errors.EXIT_FAILED


def test_the_run_finds_the_code_from_any_folder(tmp_path):
  done = subprocess.run(
      [sys.executable, '-P', ROOT / 'launch/supervise.py', '--workdir=new', '--config=nowhere.py'],
      cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}, text=True,
      capture_output=True)
  assert (done.returncode, done.stderr) == (2, 'bert_jax: --config=nowhere.py is not a file\n')


def test_sigterm_ends_a_pause(tmp_path, capfd):
  supervisor = supervise.Supervisor([sys.executable, '-c', 'raise SystemExit(1)'], str(tmp_path))
  threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
  began = time.monotonic()
  assert supervisor.run(3, 60) == errors.EXIT_PREEMPTED
  assert time.monotonic() - began < 30
  captured = capfd.readouterr()
  assert 'in 60 s' in captured.out + captured.err


def test_a_negative_pause_is_refused():
  done = subprocess.run(
      [sys.executable, 'launch/supervise.py', '--workdir=new', '--pause=-1'], cwd=ROOT, text=True,
      capture_output=True)
  assert (done.returncode, done.stderr) == (
      2, 'bert_jax: flag --pause=-1: -1.0 is not a non-negative number\n')


@pytest.mark.medium
def test_the_supervisor_resumes_a_killed_run_and_stops_on_sigterm(tmp_path, corpus_file):
  """With a real run: the test kills its process, then sends SIGTERM to the supervisor."""
  _, config, workdir, source = test_commands.train(corpus_file, tmp_path / 'run')
  env = {**os.environ, 'PYTHONUNBUFFERED': '1'}
  process = subprocess.Popen(
      [sys.executable, 'launch/supervise.py', config, workdir, source, '--pause=0',
       '--config.train_steps=5000', '--config.checkpoint_every=10', '--config.log_every=5'],
      cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  test_commands.wait_for_step(tmp_path / 'run', 20)
  children = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True)
  os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
  reached = supervise.newest_step(str(tmp_path / 'run'))
  deadline = time.monotonic() + 100
  while supervise.newest_step(str(tmp_path / 'run')) < reached + 20:
    assert time.monotonic() < deadline
    time.sleep(0.1)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=100)
  assert process.returncode == 75, err
  first, last = (line for line in err.splitlines() if line.startswith(('supervise', 'bert_jax')))
  assert 'with status -9: started again in 0 s' in first
  assert 'stopped by SIGTERM after step' in last and out.count('resumed') == 1
