"""A ladder of runs that changes one choice of the speedrun at a time.

  python -m benchmarks.grammar --output=grammar.jsonl
  python -m benchmarks.ablation --records=runs/race/records --judge='judge/*.txt' \\
      --pairs=grammar.jsonl --workdir=runs/ablation --tokens=1e6

Every variant trains on the same tokens and is judged on text and minimal pairs that no
score uses: by its loss in nat per byte and by the share of the pairs of
`benchmarks.grammar` that it orders correctly. One million tokens and one seed screen the
variants. The best of them get three seeds at four million (--tokens=4e6 --seeds=3
--variants=...), and those that win there three at sixteen.

The rule: a change is kept if its difference from the recipe in nat per byte, seed by
seed, has one sign in all three seeds at four million, and if the mean keeps the sign at
sixteen.

Two runs at a time, one on each core. The results are lines of WORKDIR/runs.jsonl; the
same command resumes. Prints the table of all results and writes it to WORKDIR/ablation.md.
"""

import collections
from concurrent import futures
import dataclasses
import json
import os
import pathlib
import queue
import re
import statistics
import subprocess
import sys
from typing import Any

from absl import app, flags

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_JUDGE = flags.DEFINE_string('judge', None, 'Glob of text that no score uses.', required=True)
_PAIRS = flags.DEFINE_string('pairs', None, 'File of benchmarks.grammar.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_TOKENS = flags.DEFINE_float('tokens', 1e6, 'Of each run.')
_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs of each variant.')
_VARIANTS = flags.DEFINE_list('variants', None, 'Some of the variants; by default all.')
_JOBS = flags.DEFINE_integer('jobs', 2, 'Runs at a time, one on each core.')

_ROWS = 16  # of 128 tokens in a step of the recipe, or twice as many of 64
RECIPE = 'recipe'
# Phases are shares of the tokens: (share, row length, rows).
VARIANTS: dict[str, dict[str, Any]] = {
    RECIPE: {},
    # Masking
    '30% masked': {'masking.rate': 0.3},
    '50% masked': {'masking.rate': 0.5},
    '50% to 30% masked': {'masking.rate': 0.5, 'masking.final_rate': 0.3},
    '40% to 20% masked': {'masking.final_rate': 0.2},
    'whole words': {'masking.unit': 'whole_word'},
    # Optimizer
    'AdamW': {'optimizer.name': 'adamw', 'optimizer.learning_rate': 2e-3},
    'rate 3e-3': {'optimizer.learning_rate': 3e-3},
    'rate 6e-3': {'optimizer.learning_rate': 6e-3},
    '1-sqrt decay of the last half': {'optimizer.decay': '1-sqrt', 'optimizer.decay_ratio': 0.5},
    'weight decay 0.1': {'optimizer.weight_decay': 0.1},
    'no weight decay': {'optimizer.weight_decay': 0.0},
    'b2 0.98': {'optimizer.b2': 0.98},
    'warmup 10%': {'optimizer.warmup_ratio': 0.1},
    'no clipping': {'optimizer.clip_norm': 0.0},
    # Rows and batches
    'rows of 128 only': {'phases': ((1, 128, _ROWS),)},
    'rows of 64 only': {'phases': ((1, 64, 2 * _ROWS),)},
    'rows of 32, 64 and 128': {'phases': ((4, 32, 4 * _ROWS), (4, 64, 2 * _ROWS),
                                          (2, 128, _ROWS))},
    'half the rows': {'phases': ((8, 64, _ROWS), (2, 128, _ROWS // 2))},
    'batches that grow': {'phases': ((3, 64, _ROWS), (5, 64, 2 * _ROWS), (2, 128, _ROWS))},
    # Block
    'no convolutions': {'model.conv_reach': 0},
    'convolutions over two neighbors': {'model.conv_reach': 2},
    '8 heads': {'model.num_heads': 8},
    '2 heads': {'model.num_heads': 2},
    'wider feed-forward': {'model.intermediate_size': 768},
    'local windows of 32': {'model.local_window': 32},
    'initializer 0.04': {'model.initializer_range': 0.04},
    'dropout 0.1': {'model.dropout': 0.1}}


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of the ladder; its fields identify it in runs.jsonl."""

  variant: str
  tokens: int
  seed: int

  def overrides(self) -> dict[str, Any]:
    """The fields that differ from configs/speedrun.py."""
    fields = {'train_minutes': 0, 'seed': self.seed, 'data.source': _RECORDS.value,
              'log_every': 20, **VARIANTS[self.variant]}
    shares = fields.pop('phases', ((8, 64, 2 * _ROWS), (2, 128, _ROWS)))
    whole = sum(share for share, *_ in shares)
    fields['phases'] = tuple(
        (round(self.tokens * share / whole / (length * rows)), length, rows)
        for share, length, rows in shares)
    fields['train_steps'] = sum(steps for steps, *_ in fields['phases'])
    return fields | {'eval_every': fields['train_steps'],
                     'checkpoint_every': fields['train_steps']}

  def make(self, home: pathlib.Path) -> dict[str, Any]:
    """Trains and judges; returns the line of runs.jsonl."""
    name = re.sub('[^a-z0-9]+', '_', self.variant.lower())
    folder = home / f'{name}-{self.tokens}-{self.seed}'
    _call('main', '--config=configs/speedrun.py', f'--workdir={folder}',
          *(f'--config.{field}={value}' for field, value in self.overrides().items()))
    judged = {}
    for suite, data in (('masked_lm', _JUDGE.value), ('minimal_pairs', _PAIRS.value)):
      judged[suite] = pathlib.Path(f'{folder}.{suite}.json')
      _call('evaluate', f'--model={folder}', f'--suite={suite}', f'--data={data}',
            f'--output={judged[suite]}')
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    speeds = [line['tokens_per_second'] for line in lines if line.get('tokens_per_second')]
    return dataclasses.asdict(self) | {
        'speed': statistics.median(speeds),
        **{suite: json.loads(path.read_text()) for suite, path in judged.items()}}


def _call(module: str, *arguments: str):
  command = [sys.executable, '-m', f'bert_jax.{module}', *arguments]
  print('$', *command[1:], flush=True)
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f'{" ".join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}')


def _judged(line: dict[str, Any]) -> tuple[float, float]:
  """(nat per byte of the judging text, share of the judging pairs)."""
  nat = {row['unit']: row['nat'] for row in line['masked_lm']['rows']}
  return nat['byte'], line['minimal_pairs']['accuracy']


def _run_all(runs: list[Run], home: pathlib.Path):
  """Makes the runs, each on one core, and appends their lines."""
  cores: queue.SimpleQueue[int] = queue.SimpleQueue()
  for core in sorted(os.sched_getaffinity(0))[:_JOBS.value]:
    cores.put(core)

  def make(run):
    core = cores.get()
    os.sched_setaffinity(0, {core})  # of this thread and of the processes that it starts
    try:
      return run.make(home)
    finally:
      cores.put(core)

  with futures.ThreadPoolExecutor(_JOBS.value) as pool:
    for done in futures.as_completed([pool.submit(make, run) for run in runs]):
      with (home / 'runs.jsonl').open('a') as file:
        file.write(json.dumps(done.result()) + '\n')


def _verdict(differences: list[float]) -> str:
  if len(differences) < 3:
    return ''
  if all(x < 0 for x in differences):
    return 'better'
  return 'worse' if all(x > 0 for x in differences) else 'unclear'


def table(lines: list[dict[str, Any]]) -> str:
  """The table of all results: for each number of tokens, the best variant first."""
  judged = {Run(line['variant'], line['tokens'], line['seed']): _judged(line) for line in lines}
  speeds = collections.defaultdict(list)
  for line in lines:
    speeds[line['variant'], line['tokens']].append(line['speed'])
  text = ('| tokens | variant | seeds | nat per byte | against the recipe | in all seeds | '
          'pairs, % | tokens per second |\n' + '| --- ' * 8 + '|\n')
  rows = []
  for (variant, tokens), speed in speeds.items():
    runs = sorted((run for run in judged if (run.variant, run.tokens) == (variant, tokens)),
                  key=lambda run: run.seed)
    losses, pairs = zip(*(judged[run] for run in runs))
    # Seed by seed: both runs read the same documents in the same order.
    differences = [judged[run][0] - judged[base][0] for run in runs
                   if (base := Run(RECIPE, tokens, run.seed)) in judged and variant != RECIPE]
    deviation = f' ± {statistics.stdev(losses):.4f}' if len(losses) > 1 else ''
    change = f'{statistics.mean(differences):+.4f}' if differences else ''
    rows.append((tokens, statistics.mean(losses),
                 f'| {tokens / 1e6:g}M | {variant} | {len(runs)} | '
                 f'{statistics.mean(losses):.4f}{deviation} | {change} | '
                 f'{_verdict(differences)} | {100 * statistics.mean(pairs):.1f} | '
                 f'{statistics.median(speed):,.0f} |\n'))
  return text + ''.join(row for *_, row in sorted(rows))


def main(_):
  """Makes the runs that are missing, and prints the table."""
  home = pathlib.Path(_WORKDIR.value)
  home.mkdir(parents=True, exist_ok=True)
  results = home / 'runs.jsonl'
  results.touch()
  names = list(dict.fromkeys([RECIPE, *(_VARIANTS.value or VARIANTS)]))
  lines = [json.loads(line) for line in results.read_text().splitlines()]
  made = {(line['variant'], line['tokens'], line['seed']) for line in lines}
  _run_all([run for name in names for seed in range(_SEEDS.value)
            if dataclasses.astuple(run := Run(name, round(_TOKENS.value), seed)) not in made],
           home)
  text = table([json.loads(line) for line in results.read_text().splitlines()])
  (home / 'ablation.md').write_text(text)
  print(text)


if __name__ == '__main__':
  app.run(main)
