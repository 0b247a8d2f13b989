"""Several real processes train together, on the same rows as one process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from etils import epath
import pytest

from bert_jax.data import preparation
from bert_jax.runtime import lock
from bert_jax.runtime import processes as processes_lib
from tests import made_tasks, test_commands
from tests.test_commands import ROOT


@pytest.fixture(scope='module')
def records(tmp_path_factory, corpus_file) -> str:
  folder = str(tmp_path_factory.mktemp('prepared') / 'records')
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200, heldout=0.1), folder, 1)
  return folder


def start(processes: int, workdir, *arguments: str, each=lambda i: (), env=None,
          script='') -> list:
  """Starts main, or a script, on four devices in all; `each` gives a process more flags."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  running = []
  for i in range(processes):
    command = test_commands.command(*arguments, f'--workdir={os.path.relpath(workdir, ROOT)}',
                                    '--config.log_batch_digest=True', *each(i),
                                    devices=4 // processes)
    if script:
      command['args'] = [sys.executable, '-c', script, *arguments]
    command['env'].update(JAX_COORDINATOR_ADDRESS=f'localhost:{port}', JAX_PROCESS_ID=str(i),
                          JAX_NUM_PROCESSES=str(processes), JAX_PLATFORMS='cpu', **(env or {}))
    running.append(subprocess.Popen(**command))
  return running


def read_metrics(workdir) -> list[dict]:
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def together(processes: int, workdir, *arguments: str) -> list[dict]:
  """Runs main; returns metrics.jsonl."""
  running = start(processes, workdir, *arguments)
  ended = [process.communicate(timeout=300) for process in running]
  assert [process.returncode for process in running] == [0] * processes, ended
  return read_metrics(workdir)


def run_together(processes: int, records: str, workdir, *more: str) -> list[dict]:
  """Pretrains."""
  return together(processes, workdir, *test_commands.train(
      records, workdir, '--config.train_steps=4', '--config.optimizer.warmup_steps=1',
      '--config.log_every=4', '--config.eval_every=4', '--config.eval_batches=1', *more))


@pytest.mark.slow
def test_fine_tuning_gives_the_same_losses_on_two_processes(tmp_path):
  fields = {'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 8, 'max_len': 32,
            'train_epochs': 0, 'train_steps': 4, 'log_every': 1, 'model.dropout': 0,
            'model.attention_dropout': 0, 'model.scan_unroll': 1,
            **made_tasks.files('multiple_choice', tmp_path, 40, 10)}
  one, two = (together(n, tmp_path / f'run{n}', 'main',
                       '--config=configs/multiple_choice.py',
                       *(f'--config.{name}={value}' for name, value in fields.items()))
              for n in (1, 2))
  digests = [[d for line in lines for d in line.get('batch_digests', ())] for lines in (one, two)]
  assert digests[0] == digests[1] and len(set(digests[0])) == 4
  for name in ('loss', 'eval_loss', 'eval_accuracy'):
    values = [[line[name] for line in lines if name in line] for lines in (one, two)]
    assert values[0] and values[1] == pytest.approx(values[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('several', [2, 4])
def test_several_processes_read_the_rows_of_one_process(records, tmp_path, several):
  runs = {n: run_together(n, records, tmp_path / f'run{n}') for n in (1, several)}
  digests = {n: [d for line in lines for d in line.get('batch_digests', ())]
             for n, lines in runs.items()}
  assert len(digests[1]) == len(set(digests[1])) == 4  # one for each step, all different
  assert digests[1] == digests[several]
  losses = {n: [line['loss'] for line in lines if 'loss' in line] for n, lines in runs.items()}
  assert losses[several] == pytest.approx(losses[1], rel=1e-5)  # the masks are the same too
  evaluations = {n: [line['eval_loss'] for line in lines if 'eval_loss' in line]
                 for n, lines in runs.items()}
  assert evaluations[several] == pytest.approx(evaluations[1], rel=1e-5)


@pytest.mark.slow
def test_all_processes_start_from_init_from(records, tmp_path):
  run_together(1, records, tmp_path / 'first')
  start = f'--config.init_from={tmp_path / "first"}'
  one, two = (run_together(n, records, tmp_path / f'run{n}', start, '--config.log_every=1')
              for n in (1, 2))
  fresh = [line['loss'] for line in run_together(1, records, tmp_path / 'fresh',
                                                 '--config.log_every=1') if 'loss' in line]
  losses = [[line['loss'] for line in lines if 'loss' in line] for lines in (one, two)]
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)
  assert abs(losses[0][0] - fresh[0]) > 1e-4


# ---- presets and checkpoints --------------------------------------------------------------------

STEPS = ('--config.train_steps=20', '--config.optimizer.warmup_steps=2', '--config.log_every=1',
         '--config.eval_every=20', '--config.eval_batches=1', '--config.checkpoint_every=10',
         '--config.keep_checkpoints=9', '--config.model.num_heads=4')


@pytest.mark.slow
def test_a_run_resumes_with_another_preset_and_number_of_processes(records, tmp_path):
  """Each run is cut in half; another preset and number of processes runs the second half."""
  forms = [(1, 'dp', 1), (2, 'fsdp', 1), (4, 'tp', 4), (2, 'fsdp_tp', 2)]

  def half(form, workdir):
    processes, preset, model = form
    return [line['loss'] for line in together(processes, workdir, *test_commands.train(
        records, workdir, *STEPS, f'--config.sharding={preset}',
        f'--config.mesh.model={model}')) if 'loss' in line]

  whole = half(forms[0], tmp_path / 'whole')
  assert len(whole) == 20 and whole[-1] != whole[0]
  for first, second in zip(forms, forms[1:] + forms[:1]):
    workdir = tmp_path / f'{first[1]}-{second[1]}'
    half(first, workdir)
    shutil.rmtree(workdir / 'checkpoints/20')
    losses = half(second, workdir)
    assert losses == pytest.approx(whole, rel=2e-4), (first, second)


# ---- deaths and disagreements -------------------------------------------------------------------


KILLED = ('--config.train_steps=24', '--config.log_every=1', '--config.checkpoint_every=8')


@pytest.fixture(scope='module')
def alone(records, tmp_path_factory) -> list:
  """(step, loss) of an undisturbed run of four processes."""
  folder = tmp_path_factory.mktemp('alone')
  lines = together(4, folder / 'run', *test_commands.train(records, folder / 'run', *KILLED))
  return [(line['step'], line['loss']) for line in lines if 'loss' in line]


def kill_one(processes: int, victim: int, workdir, arguments):
  """Kills one of a run's processes; the others end and name it."""
  running = start(processes, workdir, *arguments, env={'BERT_JAX_GONE_SECONDS': '8'})
  metrics, deadline = workdir / 'metrics.jsonl', time.monotonic() + 200
  while not metrics.exists() or len(metrics.read_text().splitlines()) < 12:
    assert time.monotonic() < deadline
    assert not [p.communicate() for p in running if p.poll() is not None]
    time.sleep(0.1)
  running[victim].kill()
  killed = time.monotonic()
  ended = [process.communicate(timeout=100) for process in running]
  assert time.monotonic() - killed < 30
  for i, (process, (_, err)) in enumerate(zip(running, ended)):
    if i != victim:
      assert process.returncode == 1, err
      last = err.strip().splitlines()[-1]
      assert last.startswith(f'bert_jax: process {victim}') and 'is gone' in last, err


@pytest.mark.slow
def test_a_killed_process_is_named(records, tmp_path):
  kill_one(2, 1, tmp_path / 'run', test_commands.train(records, tmp_path / 'run', *KILLED))


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 2])
def test_after_a_killed_process_the_run_resumes_exactly(records, tmp_path, alone, victim):
  arguments = test_commands.train(records, tmp_path / 'run', *KILLED)
  kill_one(4, victim, tmp_path / 'run', arguments)
  lines = together(4, tmp_path / 'run', *arguments)
  assert [(line['step'], line['loss']) for line in lines if 'loss' in line] == alone
  assert len(alone) == 24


# Each process has its own folder `run`.
OWN_DISK = """
import os, runpy, sys
os.chdir(sys.argv[1] + os.environ['JAX_PROCESS_ID'])
sys.argv[:] = ['main', *sys.argv[2:]]
runpy.run_module('bert_jax.main', run_name='__main__', alter_sys=True)
"""


@pytest.mark.medium
def test_a_workdir_that_the_hosts_do_not_share_is_refused(records, tmp_path):
  for i in range(2):
    (tmp_path / f'disk{i}').mkdir()
  running = start(2, 'run', str(tmp_path / 'disk'), '--config=tiny', '--workdir=run',
                  f'--config.data.source={records}', script=OWN_DISK)
  errors = [process.communicate(timeout=100)[1] for process in running]
  assert [process.returncode for process in running] == [2, 2], errors
  assert all('--workdir=run is another folder on the host of process 1 than on the first host: '
             'give a folder on a shared disk' in error for error in errors), errors
  assert not list(tmp_path.rglob('.shared'))


# The second process gets the signal of argv after its last step, while the first waits for it.
PARTING = """
import os, signal, sys, time
from bert_jax.runtime import preemption, processes
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))  # as commands do before and after a run
with processes.together('cpu'):
  preemption.Notice().close()
  if os.environ['JAX_PROCESS_ID'] == '1':
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(1)
"""


@pytest.mark.parametrize('number, statuses', [(signal.SIGTERM, [0, 0]), (signal.SIGKILL, [1, -9])])
def test_after_the_last_step_sigterm_is_ignored_and_sigkill_is_an_error(number, statuses):
  running = start(2, ROOT, str(int(number)), script=PARTING, env={'BERT_JAX_GONE_SECONDS': '3'})
  ended = [process.communicate(timeout=60) for process in running]
  assert [process.returncode for process in running] == statuses, ended
  lines = ended[0][1].splitlines()
  assert [('process 1 of 2 is gone' in line) for line in lines] == [True] * (statuses[0] == 1)


@pytest.mark.slow
def test_processes_with_different_configs_are_refused(records, tmp_path):
  running = start(2, tmp_path / 'run', *test_commands.train(records, tmp_path / 'run'),
                  each=lambda i: (f'--config.seed={i}',))
  ended = [process.communicate(timeout=100) for process in running]
  assert [process.returncode for process in running] == [2, 2], ended
  for _, err in ended:
    assert 'process 1 has another config than process 0' in err and '"seed": 1' in err


def test_a_process_without_a_new_heartbeat_is_gone(monkeypatch):
  monkeypatch.setattr(processes_lib, 'GONE_SECONDS', 8)
  last_beats = {}

  def silent(now, **beats):
    return processes_lib._silent(range(2), {x[1:]: beat for x, beat in beats.items()}, last_beats,
                                 now)

  assert silent(100, p0='1') is None  # process 1 has sent nothing yet
  assert silent(107, p0='1') is None
  assert silent(108, p0='2', p1='1') is None  # new heartbeats of both
  assert silent(115, p0='2', p1='2') is None
  assert silent(116, p0='2', p1='3') is None  # 8 s after the heartbeat of process 0: not above 8
  assert silent(116.5, p0='2', p1='3') == 0
  last_beats.clear()
  assert silent(10, p0='1') is None
  assert silent(18.5, p0='2') == 1  # it never sent a heartbeat


@pytest.mark.slow
def test_a_workdir_in_use_is_refused_by_all_processes(records, tmp_path):
  with lock.held(epath.Path(tmp_path / 'run')):
    running = start(2, tmp_path / 'run', *test_commands.train(records, tmp_path / 'run'),
                    env={'BERT_JAX_GONE_SECONDS': '8'})
    ended = [process.communicate(timeout=100) for process in running]
  assert [process.returncode for process in running] == [2, 2], ended
  for _, err in ended:
    assert f'run is in use by process {os.getpid()} on ' in err
  assert [path.name for path in (tmp_path / 'run').iterdir()] == ['.lock']


def test_a_missing_coordinator_is_an_error(records, tmp_path):
  command = test_commands.command(*test_commands.train(records, tmp_path / 'run'))
  command['env'].update(JAX_COORDINATOR_ADDRESS='localhost:1', JAX_NUM_PROCESSES='2',
                        JAX_PROCESS_ID='1', BERT_JAX_START_SECONDS='2')
  done = subprocess.run(**command, timeout=100)
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
  assert 'the coordinator at localhost:1 is not reachable after 2 s' in done.stderr


@pytest.mark.slow
def test_a_process_that_never_joins_is_an_error(records, tmp_path):
  running = start(2, tmp_path / 'run', *test_commands.train(records, tmp_path / 'run'),
                  env={'BERT_JAX_START_SECONDS': '5'})
  running[1].kill()
  _, err = running[0].communicate(timeout=100)
  assert running[0].returncode == 1, err
  assert 'not all processes of this run joined within 5 s' in err.splitlines()[-1], err
