"""Trains configs/speedrun.py for a record, scores it, and keeps its figures and parameters.

On two CPU cores, for 120 minutes:

  python -m benchmarks.record --records=runs/speedrun/records --held_out='held_out/*.txt' \\
      --pairs='blimp/*.jsonl' --minutes=120 --seed=0 --output=runs/record

On a GPU, with four times the rows in a step and ten passes over the words (`passes` in
record.json has the number of passes):

  python -m benchmarks.record --records=runs/speedrun/records --held_out='held_out/*.txt' \\
      --pairs='blimp/*.jsonl' --steps=1135 --seed=0 --output=runs/record \\
      --fields='phases=((8,64,2048),(2,128,1024))'

OUTPUT/record.json identifies the run: command, commit, machine, versions, steps, tokens,
minutes, scores, and the SHA-256 of parameters and log.
docs/checkpoints.json lists the published records in this form, with their dates.
OUTPUT/run is the workdir, with the curve of the loss in metrics.jsonl; OUTPUT/parts has the
parameters in bfloat16 (`benchmarks.parts`). The same command resumes.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import platform
import statistics
import subprocess
from typing import Any

from absl import app, flags

from benchmarks.calls import call, evaluate

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_HELD_OUT = flags.DEFINE_string('held_out', None, 'Glob of other text files.', required=True)
_PAIRS = flags.DEFINE_string('pairs', None, 'Glob of minimal pairs.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder of the record.', required=True)
_MINUTES = flags.DEFINE_float('minutes', 0, 'Of training.')
_STEPS = flags.DEFINE_integer('steps', 0, 'Training steps, instead of --minutes.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the run.')
_FIELDS = flags.DEFINE_multi_string('fields', [], 'FIELD=VALUE of the config; may be repeated.')


def _machine() -> str:
  # Start JAX only here, after the training: the process that trains needs the device.
  import jax

  from bert_jax.runtime import host

  device = jax.devices()[0]
  if device.platform != 'cpu':
    return f'{len(jax.devices())} {device.device_kind}'
  lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  names = [line.partition(': ')[2] for line in lines if line.startswith('model name')]
  return f'{host.cores()} cores, {names[0] if names else platform.machine()}'


def _training(run: pathlib.Path) -> dict[str, Any]:
  """Facts about the run, from its files."""
  from bert_jax.data import phases

  log = (run / 'metrics.jsonl').read_bytes()
  speeds = [line['tokens_per_second'] for line in map(json.loads, log.splitlines())
            if line.get('tokens_per_second')]
  written = json.loads((run / 'run.json').read_text())
  config = written['config']
  steps = phases.scaled(config['phases'], config['train_steps'])
  tokens = sum(count * length * rows for count, length, rows in steps)
  manifest = json.loads((pathlib.Path(_RECORDS.value) / 'manifest.json').read_text())
  train = sum(shard['tokens'] for shard in manifest['splits']['train'])
  speed = statistics.median(speeds)
  return {'command': written['command'], 'steps': config['train_steps'], 'tokens': tokens,
          'passes': round(tokens / train, 2), 'tokens_per_second': round(speed),
          'minutes': round(tokens / speed / 60, 1), 'records': manifest['digest'],
          'log_sha256': hashlib.sha256(log).hexdigest()}


def main(_):
  """Trains, scores, and writes the record."""
  home = pathlib.Path(_OUTPUT.value)
  run = home / 'run'
  if bool(_MINUTES.value) == bool(_STEPS.value):
    raise app.UsageError('give --minutes or --steps')
  call('bert_jax.main', '--config=configs/speedrun.py', f'--workdir={run}',
        f'--config.data.source={_RECORDS.value}', f'--config.seed={_SEED.value}',
        f'--config.train_steps={_STEPS.value}', f'--config.train_minutes={_MINUTES.value}',
        *(f'--config.{field}' for field in _FIELDS.value))
  scores = {suite: evaluate(home / f'{suite}.json', suite, data, f'--model={run}')
            for suite, data in (('masked_lm', _HELD_OUT.value),
                                ('minimal_pairs', _PAIRS.value))}
  from benchmarks import parts
  from bert_jax.interop import load

  model = load.load(str(run))
  parts.write(model, home / 'parts')
  git = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
  commit = subprocess.run(git, capture_output=True, text=True,
                          cwd=pathlib.Path(__file__).parent).stdout.strip()
  nats = {row['unit']: row['nat'] for row in scores['masked_lm']['rows']}
  pairs = scores['minimal_pairs']
  record = _training(run) | {
      'commit': commit, 'machine': _machine(),
      'versions': {name: importlib.metadata.version(name) for name in ('jax', 'flax')},
      'parameters_sha256': parts.digest(model),
      'nat_per_byte': nats['byte'], 'nat_per_token': nats['token'],
      'minimal_pairs': pairs['accuracy'], 'pairs': pairs['rows'][-1]['pairs']}
  (home / 'record.json').write_text(json.dumps(record, indent=2) + '\n')
  print(json.dumps(record, indent=2))


if __name__ == '__main__':
  app.run(main)
