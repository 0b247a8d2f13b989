"""A long run of tiny steps: memory, threads, open files and step time do not grow."""

import json
import pathlib
import shutil
import statistics
import time

from tests.faults.runs import Bench, Trial

STEPS, EVERY = 20_000, 50
# The most growth from the second quarter to the last.
_MOST = {'memory': 1.05, 'threads': 1.05, 'files': 1.05, 'seconds': 1.3}


def _sample(pid: int) -> dict[str, float]:
  process = pathlib.Path(f'/proc/{pid}')
  status = dict(line.split(':', 1) for line in (process / 'status').read_text().splitlines())
  return {'memory': int(status['VmRSS'].split()[0]) / 1024, 'threads': int(status['Threads']),
          'files': len(list((process / 'fd').iterdir()))}


def soak(bench: Bench, number: int) -> Trial:
  """One run: compares its second quarter with its last."""
  workdir = bench.folder / f'soak {number}'
  shutil.rmtree(workdir, ignore_errors=True)
  (running,) = bench.start(
      '1 device', workdir, f'--config.train_steps={STEPS}', f'--config.checkpoint_every={EVERY}',
      '--config.log_every=100', '--config.eval_every=5000')
  samples, metrics = [], workdir / 'metrics.jsonl'
  while running.poll() is None:
    time.sleep(2)
    try:
      lines = metrics.read_text().splitlines()
      step = json.loads(lines[-1])['step']
      samples.append((step, time.monotonic(), _sample(running.pid)))
    except (OSError, IndexError, KeyError, ValueError):
      continue  # not begun, or at its end
  _, error = running.communicate()
  if running.returncode:
    return Trial('ended early', False, error[-300:])
  quarters = [[s for s in samples if a * STEPS < 4 * s[0] <= (a + 1) * STEPS] for a in (1, 3)]
  medians = {}
  for name in ('memory', 'threads', 'files'):
    medians[name] = [statistics.median(s[2][name] for s in quarter) for quarter in quarters]
  medians['seconds'] = [(q[-1][1] - q[0][1]) / (q[-1][0] - q[0][0]) for q in quarters]
  grown = [name for name, (before, after) in medians.items() if after > _MOST[name] * before]
  shutil.rmtree(workdir)
  shown = ', '.join(f'{name} {a:.4g} then {b:.4g}' for name, (a, b) in medians.items())
  return Trial('grew: ' + ', '.join(grown) if grown else 'nothing grew', not grown, shown)
