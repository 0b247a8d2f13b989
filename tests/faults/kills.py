"""Runs get SIGKILL or SIGTERM at a random moment, then resume."""

import json
import pathlib
import random
import shutil
import signal
import time

from etils import epath

from bert_jax.training import integrity
from tests.faults.runs import EVERY, LAYOUTS, STEPS, Bench, Trial, send

GRACE = 15  # seconds from SIGTERM to the end
# JAX looks for the signal of one of several processes once a second; then the run has to close.
NOTICED = 5  # seconds


def _wait(running, seconds: float) -> bool:
  """Waits; returns whether a process of the run is still alive."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if all(process.poll() is not None for process in running):
      return False
    time.sleep(0.005)
  return True


def _in_saving(workdir: pathlib.Path, seconds: float) -> bool:
  """Waits until the run writes a checkpoint; returns whether it does."""
  deadline, folder = time.monotonic() + seconds, workdir / 'checkpoints'
  while time.monotonic() < deadline:
    if folder.exists() and any('tmp' in path.name for path in folder.iterdir()):
      return True
    time.sleep(0.001)
  return False


def _begin(bench: Bench, kind: str, number: int):
  """Starts a trial: (random generator, layout, seconds when unbroken, workdir, processes)."""
  layout, workdir = list(LAYOUTS)[number % len(LAYOUTS)], bench.folder / f'{kind} {number}'
  _, _, seconds = bench.reference(layout)
  shutil.rmtree(workdir, ignore_errors=True)
  return (random.Random(f'{kind} {number}'), layout, seconds, workdir,
          bench.start(layout, workdir))


def _last_step(workdir: pathlib.Path) -> int:
  """The step of the last line in metrics.jsonl."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []
  return json.loads(lines[-1])['step'] if lines else 0


def kill(bench: Bench, number: int) -> Trial:
  """SIGKILL at a random moment of a run, every other time while it writes a checkpoint."""
  rng, layout, seconds, workdir, running = _begin(bench, 'kill', number)
  _wait(running, rng.uniform(0, 0.95 * seconds))
  saving = number % 2 and _in_saving(workdir, seconds)
  if saving:
    time.sleep(rng.uniform(0, 0.05))
  # Either all processes die, with their machine, or one dies and the others notice.
  send(running if rng.random() < 0.5 else running[rng.randrange(len(running)):][:1], signal.SIGKILL)
  bench.ended(running)
  steps = integrity.steps(epath.Path(workdir / 'checkpoints'))
  wrong = bench.finish(layout, workdir) or bench.compare(layout, workdir)
  shutil.rmtree(workdir)
  at = f'{layout}, {"while saving, " if saving else ""}after step {steps[-1] if steps else 0}'
  return Trial('the same bits' if not wrong else 'not the same', not wrong, f'{at} {wrong}'.strip())


def term(bench: Bench, number: int) -> Trial:
  """SIGTERM at a random moment of a run, to one of its processes."""
  rng, layout, seconds, workdir, running = _begin(bench, 'term', number)
  # Before main runs, Python has no handler yet.
  alive = _wait(running, rng.uniform(0.35 * seconds, 0.95 * seconds))
  was_at = _last_step(workdir)
  send([rng.choice(running)], signal.SIGTERM)
  began = time.monotonic()
  statuses, errors = bench.ended(running)
  took = time.monotonic() - began
  wrong, saved = '', integrity.steps(epath.Path(workdir / 'checkpoints'))
  # Processes agree on a step to stop at, which may come after the last step of so short a run. At
  # the end, Python restores its signal handlers before it exits.
  late = took < NOTICED if len(running) > 1 else was_at >= STEPS - 2 * EVERY
  if alive and late and set(statuses) <= {0, -signal.SIGTERM} and saved[-1:] == [STEPS]:
    alive = False
  elif alive and set(statuses) != {75}:
    wrong = f'exit {statuses}: {errors[0][-200:]}'
  elif alive and took > GRACE:
    wrong = f'took {took:.0f} s'
  elif alive and 'after step' in errors[0]:
    step = int(errors[0].split('after step ')[1].split()[0])
    wrong = '' if saved[-1:] == [step] else f'stopped after {step}, saved {saved}'
  wrong = wrong or bench.finish(layout, workdir) or bench.compare(layout, workdir)
  shutil.rmtree(workdir)
  outcome = 'not the same' if wrong else 'nothing lost' if alive else 'had ended'
  return Trial(outcome, not wrong, f'{layout}, {took:.1f} s {wrong}'.strip())
