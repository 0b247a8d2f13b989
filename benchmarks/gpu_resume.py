"""Checks that a killed and resumed run ends with the same bits and can predict.

  python -m benchmarks.gpu_resume --records=RECORDS --workdir=DIR --output=resume.json

Trains configs/tiny.py for 50 steps, and again with a SIGKILL in the middle. It does both
with the default operations and with XLA's deterministic ones, because some sums on a GPU
change their order from run to run.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from absl import app, flags
from etils import epath

from benchmarks import turns
from bert_jax.training import integrity

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file.', required=True)

_STEPS = 50
_MODES = {'default': '', 'deterministic': ' --xla_gpu_deterministic_ops=true'}


def _start(workdir: pathlib.Path, flags_of_xla: str) -> subprocess.Popen:
  fields = {'data.source': _RECORDS.value, 'train_steps': _STEPS, 'checkpoint_every': 10,
            'log_every': 5, 'eval_every': _STEPS, 'optimizer.warmup_steps': 10,
            'model.dropout': 0.1}
  return subprocess.Popen(
      [sys.executable, '-m', 'bert_jax.main', '--config=configs/tiny.py', f'--workdir={workdir}',
       *(f'--config.{name}={value}' for name, value in fields.items())],
      env=os.environ | {'XLA_FLAGS': os.environ.get('XLA_FLAGS', '') + flags_of_xla})


def _finish(process: subprocess.Popen):
  if process.wait():
    raise SystemExit(f'the run ended with {process.returncode}')


def _kill(workdir: pathlib.Path, process: subprocess.Popen):
  """Kills a run after it has saved step 20."""
  while not (workdir / 'checkpoints/20').exists():
    if process.poll() is not None:
      raise SystemExit(f'the run ended with {process.returncode} before it was killed')
    time.sleep(0.05)
  process.kill()
  process.wait()


def _arrays(workdir: pathlib.Path) -> dict:
  return integrity.description(epath.Path(workdir / f'checkpoints/{_STEPS}'))['arrays']


def main(_):
  """Runs both modes, predicts, and writes the results."""
  turns.busy()
  results = {}
  for mode, flags_of_xla in _MODES.items():
    home = pathlib.Path(_WORKDIR.value) / mode
    shutil.rmtree(home, ignore_errors=True)
    began = time.monotonic()
    _finish(_start(home / 'whole', flags_of_xla))
    seconds = time.monotonic() - began
    _kill(home / 'killed', _start(home / 'killed', flags_of_xla))
    _finish(_start(home / 'killed', flags_of_xla))
    results[mode] = {'same_bits': _arrays(home / 'whole') == _arrays(home / 'killed'),
                     'seconds': seconds}
  answer = subprocess.run(
      [sys.executable, '-m', 'bert_jax.predict', '--task=fill_mask', f'--model={home}/whole'],
      input='{"text": "The [MASK] is here."}\n', text=True, check=True, capture_output=True).stdout
  results['prediction'] = json.loads(answer)
  epath.Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))
  print(json.dumps({mode: results[mode] for mode in _MODES}), flush=True)


if __name__ == '__main__':
  app.run(main)
