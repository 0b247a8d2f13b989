"""Seconds from the command to the line of the first step, without and with a cache.

  python -m benchmarks.start --records=records/mine --workdir=runs/start

The cache is empty at first. The first run compiles, and the others use its programs. On
an accelerator the line comes one step late. Prints a table.
"""

import os
import statistics
import subprocess
import sys
import time

from absl import app, flags
from etils import epath

from bert_jax.runtime import console

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_CONFIGS = flags.DEFINE_list('configs', ['configs/tiny.py', 'configs/base.py'], 'Configs to start.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Starts with a full cache.')


def _start(config: str, workdir: epath.Path, cache: epath.Path) -> float:
  """Returns the seconds to the first step of a new run."""
  if workdir.exists():
    workdir.rmtree()
  began = time.perf_counter()
  running = subprocess.Popen(
      [sys.executable, '-u', '-m', 'bert_jax.main', f'--config={config}', f'--workdir={workdir}',
       '--config.phases=()', '--config.max_len=128', '--config.batch_size=8',
       '--config.train_steps=100000', '--config.log_every=1',
       f'--config.data.source={_RECORDS.value}'],
      stdout=subprocess.PIPE, text=True,
      env=os.environ | {'XDG_CACHE_HOME': str(cache)})
  for line in running.stdout:
    if line.startswith('step 1/'):
      break
  else:
    sys.exit(f'{config}: the run ended before its first step')
  seconds = time.perf_counter() - began
  running.kill()
  running.communicate()
  return seconds


def main(_):
  """Prints a table."""
  folder, rows = epath.Path(_WORKDIR.value), [['first step of', 'first', 'again']]
  for config in _CONFIGS.value:
    cache = folder / 'cache'
    if cache.exists():
      cache.rmtree()
    first, *others = [_start(config, folder / 'run', cache) for _ in range(_ROUNDS.value + 1)]
    rows.append([f'`{config}`', f'{first:.1f} s', f'{statistics.median(others):.1f} s'])
  print(console.markdown_table(rows))


if __name__ == '__main__':
  app.run(main)
