"""The overhead of the training loop: a whole run compared with its steps alone.

  python -m benchmarks.loop --text='corpus/*.txt.gz' --workdir=runs/loop

The run is `bert_jax.main` from its start to its end: compilation (unless it is cached
from an earlier run), rows, logging, a checkpoint after each quarter, and an evaluation.
The text is tokenized beforehand. At each log line, the run is paused, and a process that
makes only steps takes a turn on rows of the same records. So both sides see the same
machine load. Prints their ratio.
"""

import json
import pathlib
import signal
import subprocess
import sys
import time

from absl import app, flags
from etils import epath

from benchmarks import calls, turns
from bert_jax.runtime import console

_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_SIZE = flags.DEFINE_string('size', 'small', 'Name of a config of a published size.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Of the run; a checkpoint after each quarter.')
_LINES, _ALONE = 20, 2  # log lines of the run, and timed steps alone at each line


def _run(workdir: epath.Path, records: epath.Path, alone: turns.Side) -> float:
  """Returns the seconds of a run, without the pauses."""
  steps, stopped, began = _STEPS.value, 0.0, time.perf_counter()
  running = subprocess.Popen(
      [sys.executable, '-u', '-m', 'bert_jax.main', f'--config=configs/{_SIZE.value}.py',
       f'--workdir={workdir}', '--config.phases=()', '--config.max_len=128',
       '--config.batch_size=32', f'--config.train_steps={steps}',
       f'--config.log_every={steps // _LINES}', f'--config.checkpoint_every={steps // 4}',
       f'--config.eval_every={steps}', f'--config.data.source={records}',
       '--config.optimizer.warmup_steps=10'], stdout=subprocess.PIPE, text=True)
  for line in running.stdout:
    print(line, end='', flush=True)
    if line.startswith('step ') and running.poll() is None:
      running.send_signal(signal.SIGSTOP)
      paused = time.perf_counter()
      alone.run(_ALONE)
      stopped += time.perf_counter() - paused
      running.send_signal(signal.SIGCONT)
  if running.wait():
    sys.exit('the run failed')
  return time.perf_counter() - began - stopped


def main(_):
  """Measures and prints a table."""
  workdir = epath.Path(_WORKDIR.value)
  calls.keep_flags(pathlib.Path(workdir), 'text')
  records = workdir / 'records'
  if not (records / 'manifest.json').exists():
    calls.call('bert_jax.prepare', f'--input={_TEXT.value}', f'--output={records}',
               '--vocab_size=30522')
  (workdir / 'run.json').write_text(json.dumps({
      'size': _SIZE.value, 'workdir': str(workdir / 'alone'), 'config': {
          'phases': (), 'max_len': 128, 'batch_size': 32, 'train_steps': 100_000,
          'data.source': str(records)}}))
  alone = turns.Side([sys.executable, '-m', 'benchmarks.train_steps',
                      f'--run={workdir / "run.json"}'], 1).ready()
  run = workdir / 'run'
  if run.exists():
    run.rmtree()
  seconds = _run(run, records, alone)
  alone.close()
  print('\n' + console.markdown_table([
      ['run', 'seconds', 'a step alone', 'run / its steps alone'],
      [f'`configs/{_SIZE.value}.py`, {_STEPS.value} steps of 32 rows of 128', f'{seconds:.0f}',
       f'{1e3 * alone.median:.0f} ms', f'{seconds / (_STEPS.value * alone.median):.3f}']]))


if __name__ == '__main__':
  app.run(main)
