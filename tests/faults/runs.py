"""Small runs to break on purpose, and the unbroken runs to compare with them."""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from etils import epath
import filelock

from bert_jax.training import integrity
from tests import conftest, test_commands
from tests.runtime import test_processes

STEPS, EVERY = 60, 4  # of a run, and from one checkpoint to the next
GONE_SECONDS = 8  # until the others notice a dead process
LAYOUTS = {'1 device': (1, 1), '8 devices': (1, 8), '2 processes': (2, 4)}  # processes, devices
_FLAGS = (f'--config.train_steps={STEPS}', f'--config.checkpoint_every={EVERY}',
          '--config.log_every=2', '--config.eval_every=20', '--config.log_batch_digest=True',
          '--config.model.num_heads=4')


class Trial(NamedTuple):
  """The result of one fault."""

  outcome: str  # one of the kind's outcomes; the table counts them
  sound: bool  # whether the promise held
  detail: str = ''


class Bench:
  """A folder with the data and the unbroken runs."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    self.env = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
                'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
                'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
                'JAX_DISABLE_MOST_OPTIMIZATIONS': '1', 'JAX_PLATFORMS': 'cpu',
                'BERT_JAX_GONE_SECONDS': str(GONE_SECONDS), 'BERT_JAX_START_SECONDS': '30'}
    self.records = folder / 'records'
    if not self.records.exists():
      corpus = conftest.write_corpus(folder / 'corpus.txt', conftest.make_documents(120))
      subprocess.run([sys.executable, '-m', 'bert_jax.prepare', f'--input={corpus}',
                      f'--output={self.records}', '--vocab_size=200', '--heldout=0.1'],
                     check=True, capture_output=True, cwd=test_commands.ROOT)
    self._known = {}
    # Changed code may give other bits: it needs its own unbroken runs.
    sources = sorted((test_commands.ROOT / 'bert_jax').rglob('*.py'))
    self._code = hashlib.sha256(b''.join(x.read_bytes() for x in sources)).hexdigest()[:8]

  def start(self, layout: str, workdir: pathlib.Path, *more: str,
            env: Mapping[str, str] | None = None) -> list[subprocess.Popen]:
    """Starts or resumes a run in a workdir; `env` is for a run of one process."""
    processes, devices = LAYOUTS[layout]
    _, *arguments = test_commands.train(self.records, workdir, *_FLAGS, *more)
    os.environ.update(self.env)
    if processes > 1:
      return test_processes.start(processes, workdir, 'main', *arguments)
    command = test_commands.command('main', *arguments, devices=devices)
    command['env'].update(env or {})
    return [subprocess.Popen(**command)]

  def finish(self, layout: str, workdir: pathlib.Path, *more: str) -> str:
    """Runs to the end; returns the error, '' without one."""
    statuses, errors = self.ended(self.start(layout, workdir, *more))
    return '' if set(statuses) == {0} else f'{statuses}: {errors[0][-300:]}'

  def ended(self, running: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Waits for the end of a run's processes: exit statuses and standard errors."""
    errors = []
    for process in running:
      try:
        errors.append(process.communicate(timeout=300)[1])
      except subprocess.TimeoutExpired:
        process.kill()
        errors.append('hung: ' + process.communicate()[1])
    return [process.returncode for process in running], errors

  def reference(self, layout: str) -> tuple[dict, list[str], float]:
    """The unbroken run's fingerprints, digests of every step's rows, and seconds."""
    if layout not in self._known:
      workdir = self.folder / f'unbroken {layout} {self._code}'
      path = workdir / 'seconds'
      with filelock.FileLock(self.folder / 'unbroken.lock'):  # several kinds may run side by side
        if not path.exists():
          for _ in range(2):  # the second run compiles nothing
            shutil.rmtree(workdir, ignore_errors=True)
            began = time.monotonic()
            wrong = self.finish(layout, workdir)
            assert not wrong, wrong
          path.write_text(str(time.monotonic() - began))
      self._known[layout] = (*outcome_of(workdir), float(path.read_text()))
    return self._known[layout]

  def compare(self, layout: str, workdir: pathlib.Path) -> str:
    """The difference between a run and the unbroken one, '' without one."""
    fingerprints, digests, _ = self.reference(layout)
    own_fingerprints, rows = outcome_of(workdir)
    if own_fingerprints != fingerprints:
      return 'other parameters or moments'
    if rows != digests:
      return f'other rows: {len(rows)} digests of {len(digests)}'
    integrity.check(epath.Path(workdir / f'checkpoints/{STEPS}'))
    return ''


def outcome_of(workdir: pathlib.Path) -> tuple[dict, list[str]]:
  """The fingerprints of the last checkpoint, and the digests of every step's rows."""
  description = integrity.description(epath.Path(workdir / f'checkpoints/{STEPS}'))
  lines = [json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return description['arrays'], [d for line in lines for d in line.get('batch_digests', ())]


def send(running: list[subprocess.Popen], number: signal.Signals):
  """Sends a signal to all live processes of a run."""
  for process in running:
    if process.poll() is None:
      process.send_signal(number)
