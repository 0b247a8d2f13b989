"""Changes one choice of the speedrun at a time: held-out loss after the same steps.

  python -m benchmarks.ablation --records=runs/race/records --held_out='held_out/*.txt' \\
      --workdir=runs/ablation

Every variant trains for the same steps on the same records, with several seeds, and is
scored by `bert_jax.evaluate --suite=masked_lm`. The table is printed and written to
WORKDIR/ablation.md. The last column shows a variant whose steps cost more. The same
command resumes.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys

from absl import app, flags

from bert_jax.data import phases

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_HELD_OUT = flags.DEFINE_string('held_out', None, 'Glob of other text files.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_STEPS = flags.DEFINE_integer('steps', 1000, 'Of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each variant.')
_VARIANTS = flags.DEFINE_list('variants', None, 'Some of the variants; by default all.')

VARIANTS = {
    'recipe': {},
    'AdamW': {'optimizer.name': 'adamw', 'optimizer.learning_rate': 2e-3},
    'half the rate': {'optimizer.learning_rate': 2e-3},
    'rate 6e-3': {'optimizer.learning_rate': 6e-3},
    '80% [MASK] and 10% random': {'masking.replace_mask': 0.8, 'masking.replace_random': 0.1},
    '15% masked': {'masking.rate': 0.15},
    '30% masked': {'masking.rate': 0.3},
    '40% to 15% masked': {'masking.final_rate': 0.15},
    'whole words': {'masking.unit': 'whole_word'},
    'pairs and NSP': {'data.sequences': 'next_sentence'},
    'dropout 0.1': {'model.dropout': 0.1},
    '1-sqrt decay of the last fifth': {'optimizer.decay': '1-sqrt', 'optimizer.decay_ratio': 0.2},
    'weight decay 0.1': {'optimizer.weight_decay': 0.1},
    'no convolutions': {'model.conv_reach': 0},
    'convolutions over two neighbours': {'model.conv_reach': 2},
    # Phases are shares of the steps. train_steps multiplies the steps of the recipe.
    'rows of 128 only': {'phases': ((1, 128, 16),)},
    'rows of 64 only': {'phases': ((1, 64, 32),)},
    'twice the rows, half the steps': {'phases': ((8, 64, 64), (2, 128, 32)), 'train_steps': 0.5},
    'half the rows, twice the steps': {'phases': ((8, 64, 16), (2, 128, 8)), 'train_steps': 2},
}


def _run(name: str, seed: int, home: pathlib.Path) -> dict[str, float]:
  """Returns the held-out loss of a run and its median seconds per step."""
  folder = home / f'{re.sub("[^a-z0-9]+", "_", name.lower())}-{seed}'
  overrides = {'train_minutes': 0, **VARIANTS[name], 'seed': seed,
               'data.source': _RECORDS.value, 'log_every': 20,
               'train_steps': int(_STEPS.value * VARIANTS[name].get('train_steps', 1))}
  if 'phases' in overrides:
    overrides['phases'] = phases.scaled(overrides['phases'], overrides['train_steps'])
  overrides |= {'eval_every': overrides['train_steps'],
                'checkpoint_every': overrides['train_steps']}
  scores = pathlib.Path(f'{folder}.json')
  if not scores.exists():
    for command in (
        ['bert_jax.main', '--config=configs/speedrun.py', f'--workdir={folder}',
         *(f'--config.{field}={value}' for field, value in overrides.items())],
        ['bert_jax.evaluate', f'--model={folder}', '--suite=masked_lm',
         f'--data={_HELD_OUT.value}', f'--output={scores}']):
      print('$ python -m', *command, flush=True)
      subprocess.run([sys.executable, '-m', *command], check=True)
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  speeds = [line['tokens_per_second'] for line in lines if line.get('tokens_per_second')]
  return {'loss': json.loads(scores.read_text())['loss'], 'speed': statistics.median(speeds)}


def main(_):
  """Runs the variants and prints the table."""
  home, rows = pathlib.Path(_WORKDIR.value), []
  for name in _VARIANTS.value or VARIANTS:
    results = [_run(name, seed, home) for seed in range(_SEEDS.value)]
    losses = [result['loss'] for result in results]
    deviation = statistics.stdev(losses) if len(losses) > 1 else float('nan')
    speed = statistics.median(result['speed'] for result in results)
    rows.append((name, statistics.mean(losses), deviation, speed))
  text = ('| variant | held-out loss | against the first | real tokens a second |\n'
          '| --- | --- | --- | --- |\n')
  for name, loss, deviation, speed in rows:
    text += f'| {name} | {loss:.3f} ± {deviation:.3f} | {loss - rows[0][1]:+.3f} | {speed:,.0f} |\n'
  (home / 'ablation.md').write_text(text)
  print(text)


if __name__ == '__main__':
  app.run(main)
