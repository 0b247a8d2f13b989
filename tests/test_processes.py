"""Several real processes train together: the same rows, whoever feeds them."""

import json
import os
import socket
import subprocess

import pytest

from bert_jax.data import prepare
from tests import made_tasks
from tests import test_commands
from tests.test_commands import ROOT


@pytest.fixture(scope='module')
def records(tmp_path_factory, corpus_file) -> str:
  folder = str(tmp_path_factory.mktemp('prepared') / 'records')
  prepare.prepare(prepare.Settings(corpus_file, vocab_size=200, heldout=0.1), folder, 1)
  return folder


def together(processes: int, workdir, *arguments: str) -> list[dict]:
  """Runs main on four devices in all; returns metrics.jsonl."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  running = []
  for i in range(processes):
    command = test_commands.command(*arguments, f'--workdir={os.path.relpath(workdir, ROOT)}',
                                    '--config.log_batch_digest=True', devices=4 // processes)
    command['env'].update(JAX_COORDINATOR_ADDRESS=f'localhost:{port}', JAX_PROCESS_ID=str(i),
                          JAX_NUM_PROCESSES=str(processes), JAX_PLATFORMS='cpu')
    running.append(subprocess.Popen(**command))
  ended = [process.communicate(timeout=300) for process in running]
  assert [process.returncode for process in running] == [0] * processes, ended
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def run_together(processes: int, records: str, workdir, *more: str) -> list[dict]:
  """Pretrains."""
  return together(processes, workdir, *test_commands.train(
      records, workdir, '--config.train_steps=4', '--config.optimizer.warmup_steps=1',
      '--config.log_every=4', '--config.eval_every=4', '--config.eval_batches=1', *more))


def test_fine_tuning(tmp_path):
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


def test_row_digests_are_those_of_one_process(records, tmp_path):
  found = {n: run_together(n, records, tmp_path / f'run{n}') for n in (1, 2, 4)}
  digests = {n: [d for line in lines for d in line.get('batch_digests', ())]
             for n, lines in found.items()}
  assert len(digests[1]) == len(set(digests[1])) == 4  # of every step, and no two alike
  assert digests[1] == digests[2] == digests[4]
  losses = {n: [line['loss'] for line in lines if 'loss' in line] for n, lines in found.items()}
  for n in (2, 4):  # and so are the masks
    assert losses[n] == pytest.approx(losses[1], rel=1e-5)
  evaluations = {n: [line['eval_loss'] for line in lines if 'eval_loss' in line]
                 for n, lines in found.items()}
  assert evaluations[2] == pytest.approx(evaluations[1], rel=1e-5)


def test_all_start_from_another_model(records, tmp_path):
  run_together(1, records, tmp_path / 'first')
  start = f'--config.init_from={tmp_path / "first"}'
  one, two = (run_together(n, records, tmp_path / f'run{n}', start, '--config.log_every=1')
              for n in (1, 2))
  fresh = [line['loss'] for line in run_together(1, records, tmp_path / 'fresh',
                                                 '--config.log_every=1') if 'loss' in line]
  losses = [[line['loss'] for line in lines if 'loss' in line] for lines in (one, two)]
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)
  assert abs(losses[0][0] - fresh[0]) > 1e-4
