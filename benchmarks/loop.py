"""What the training loop adds to its steps: a whole run beside the step alone.

  python -m benchmarks.loop --text='corpus/*.txt.gz' --workdir=runs/loop

The run is `bert_jax.main` from its start to its end: compilation (unless it is kept from an earlier
run), rows, logging, a checkpoint after each quarter, an evaluation; the text is tokenised before.
The step alone is measured before and after, on the same rows, with nothing around it. Prints their
ratio, of the whole run and without what comes before the line of its first quarter.
"""

import json
import subprocess
import sys
import time

from absl import app
from absl import flags
from etils import epath

from benchmarks import turns
from bert_jax.planning import report

_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_SIZE = flags.DEFINE_string('size', 'small', 'Name of a config of a published size.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Of the run; a checkpoint after each quarter.')
_ALONE = flags.DEFINE_integer('alone', 10, 'Steps alone, before the run and after it.')


def _run(workdir: epath.Path, records: epath.Path, steps: int) -> tuple[float, float]:
  """Seconds that a run takes, and of them those before the line of its first quarter."""
  began, before = time.perf_counter(), 0.0
  running = subprocess.Popen(
      [sys.executable, '-u', '-m', 'bert_jax.main', f'--config=configs/{_SIZE.value}.py',
       f'--workdir={workdir}', '--config.phases=()', '--config.max_len=128',
       '--config.batch_size=32', f'--config.train_steps={steps}',
       f'--config.checkpoint_every={steps // 4}', f'--config.eval_every={steps}',
       f'--config.data.source={records}', '--config.optimizer.warmup_steps=10'],
      stdout=subprocess.PIPE, text=True)
  for line in running.stdout:
    print(line, end='', flush=True)
    if line.startswith(f'step {steps // 4}/'):
      before = time.perf_counter() - began
  if running.wait():
    sys.exit('the run failed')
  return time.perf_counter() - began, before


def main(_):
  """Measures; prints a table."""
  workdir = epath.Path(_WORKDIR.value)
  records = workdir / 'records'
  if not (records / 'manifest.json').exists():
    subprocess.run([sys.executable, '-m', 'bert_jax.prepare', f'--input={_TEXT.value}',
                    f'--output={records}', '--vocab_size=30522'], check=True)
  (workdir / 'run.json').write_text(json.dumps({
      'size': _SIZE.value, 'workdir': str(workdir / 'alone'), 'config': {
          'phases': (), 'max_len': 128, 'batch_size': 32, 'train_steps': 100_000,
          'data.source': str(records)}}))
  alone = turns.Side([sys.executable, '-m', 'benchmarks.train_steps',
                      f'--run={workdir / "run.json"}'], 1)
  alone.run(_ALONE.value)
  run = workdir / 'run'
  if run.exists():
    run.rmtree()
  seconds, before = _run(run, records, _STEPS.value)
  alone.run(_ALONE.value)
  alone.close()
  print('\n' + report.table([
      ['run', 'seconds', 'a step alone', 'run / its steps alone', 'after the first quarter'],
      [f'`configs/{_SIZE.value}.py`, {_STEPS.value} steps of 32 rows of 128', f'{seconds:.0f}',
       f'{1e3 * alone.median:.0f} ms', f'{seconds / (_STEPS.value * alone.median):.3f}',
       f'{(seconds - before) / ((_STEPS.value - _STEPS.value // 4) * alone.median):.3f}']]))


if __name__ == '__main__':
  app.run(main)
