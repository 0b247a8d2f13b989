"""The benchmark of a GPU, tried on a CPU with small models."""

import json
import os
import subprocess
import sys

import pytest

from bert_jax.data import preparation
from tests import test_commands


@pytest.mark.slow
def test_models_are_timed_and_their_modules_listed(corpus_file, tmp_path):
  preparation.prepare(preparation.Settings(corpus_file, vocab_size=200), str(tmp_path / 'records'))
  command = [sys.executable, '-m', 'benchmarks.gpu_steps', f'--records={tmp_path / "records"}',
             f'--out={tmp_path / "out"}', '--names=base_128', '--layers=1', '--rows=2', '--steps=1']
  env = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}  # one device
  run = subprocess.run(command, cwd=test_commands.ROOT, env=env, capture_output=True, text=True,
                       check=False)
  assert not run.returncode, run.stderr
  figures = json.loads((tmp_path / 'out/base_128.json').read_text())
  assert figures['device'] == 'cpu' and figures['ms'] > 0 and figures['seconds_to_compile'] > 0
  # Two packed rows of 128, at least half of them text.
  assert 128 < figures['real_tokens_per_second'] * figures['ms'] / 1e3 <= 256
  lines = (tmp_path / 'out/base_128.txt').read_text().splitlines()
  shares = [float(line.split('%')[0]) for line in lines]
  assert shares == sorted(shares, reverse=True) and 60 < sum(shares) <= 100.5
  assert any('feed_forward' in line for line in lines)
  # What is there is not measured again.
  again = subprocess.run(command, cwd=test_commands.ROOT, env=env, capture_output=True, text=True,
                         check=True)
  assert 'base_128' not in again.stdout
