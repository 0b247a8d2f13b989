"""Runs whose disk is full, read-only, slow or cleared under them, or whose clock jumps."""

import pathlib
import random
import re
import shutil
import subprocess
import time

from etils import epath

from bert_jax.training import integrity
from tests.faults.runs import Bench, Trial

_SOURCE = pathlib.Path(__file__).with_name('storage.c')
# The exit statuses that a run may have: 0 if it continues, else one with a message. orbax gives up
# a save that takes longer than its limit by the system clock, which may jump.
WAYS = {'full': (1,), 'read-only': (1, 2), 'slow': (0,), 'clock': (0, 1), 'cleared': (0, 1)}
_LASTS = 3  # seconds for which the clock jumps or storage is slow


def _library(folder: pathlib.Path) -> pathlib.Path | None:
  """Compiles storage.c; None without a compiler."""
  path = folder / 'storage.so'
  compiler = shutil.which('cc') or shutil.which('gcc')
  if compiler and not path.exists():
    subprocess.run([compiler, '-O1', '-shared', '-fPIC', '-o', path, _SOURCE, '-ldl'], check=True)
  return path if compiler else None


def _clear(rng: random.Random, workdir: pathlib.Path) -> str:
  """Deletes all checkpoints of a run or one; returns the name of what it deleted."""
  folders = [workdir / 'checkpoints', *(workdir / 'checkpoints').glob('*')]
  folder = rng.choice(folders)
  shutil.rmtree(folder, ignore_errors=True)
  return folder.name


def _fault(way: str, status: int, error: str) -> str:
  """What is wrong with the end of a run, '' if nothing is."""
  # Warnings of orbax may come first.
  lines = [line for line in error.strip().splitlines() if not re.match(r'W\d{4} ', line)]
  if status not in WAYS[way]:
    return f'exit {status}: {error[-300:]}'
  if status and (len(lines) != 1 or not lines[0].startswith('bert_jax: ')):
    return f'{len(lines)} lines: {lines[0][:100]} ... {lines[-1][:200]}'
  return ''


def surroundings(bench: Bench, number: int) -> Trial:
  """One run: a fault begins at a random moment and ends; then the run starts again."""
  way, rng = list(WAYS)[number % len(WAYS)], random.Random(f'surroundings {number}')
  workdir, on = bench.folder / f'surroundings {number}', bench.folder / f'on {number}'
  _, _, seconds = bench.reference('1 device')
  shutil.rmtree(workdir, ignore_errors=True)
  on.unlink(missing_ok=True)
  if not _library(bench.folder):
    return Trial('not tried: no C compiler', True)
  faults = {'LD_PRELOAD': str(_library(bench.folder)), 'FAULT': way, 'FAULT_ON': str(on),
            'FAULT_UNDER': str(workdir)}
  (running,) = bench.start('1 device', workdir, env=faults)
  time.sleep(rng.uniform(0.2, 0.8) * seconds)
  had_ended = running.poll() is not None  # the unbroken run was measured on a busier machine
  at = _clear(rng, workdir) if way == 'cleared' else ''
  on.touch()
  if 0 in WAYS[way]:
    time.sleep(_LASTS)
    on.unlink()
  (status,), (error,) = bench.ended([running])
  on.unlink(missing_ok=True)
  wrong = '' if had_ended and not status else _fault(way, status, error)
  try:
    folder = epath.Path(workdir / 'checkpoints')
    for step in integrity.steps(folder):
      integrity.check(folder / str(step))
  except integrity.Damaged as e:
    wrong = wrong or f'step {step}: {e}'
  wrong = wrong or bench.finish('1 device', workdir) or bench.compare('1 device', workdir)
  shutil.rmtree(workdir)
  outcome = 'wrong' if wrong else 'told' if status else 'had ended' if had_ended else 'unnoticed'
  return Trial(f'{way}: {outcome}', not wrong, f'{at} {error.strip()[:200]} {wrong}'.strip())
