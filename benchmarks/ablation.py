"""A ladder of runs that changes one choice of the speedrun at a time.

  python -m benchmarks.grammar grammar.jsonl
  python -m benchmarks.ablation --records=runs/race/records --judge='judge/*.txt' \\
      --pairs=grammar.jsonl --workdir=runs/ablation --tokens=1e6

Every variant trains on the same tokens and is judged on text and minimal pairs that no
score uses: by its loss in nat per byte and by the share of the pairs of
`benchmarks.grammar` that it orders correctly. One million tokens and one seed screen the
variants. The best of them get three seeds at four million (--tokens=4e6 --seeds=3
--variants=...). The winners get three seeds at sixteen million.

The rule: a change is kept if it lowers the nat per byte of the recipe with each of the
three seeds at four million, and if its mean is still lower at sixteen million.

Two runs at a time share the cores. The results are lines of WORKDIR/runs.jsonl; the
same command resumes. Prints the table of all results and writes it to WORKDIR/ablation.md.
"""

from concurrent import futures
import dataclasses
import json
import os
import pathlib
import queue
import re
import statistics
from typing import Any

from absl import app, flags

from benchmarks import calls, variants
from benchmarks.variants import Run

_RECORDS = flags.DEFINE_string('records', None, 'A folder of bert_jax.prepare.', required=True)
_JUDGE = flags.DEFINE_string('judge', None, 'Glob of text that no score uses.', required=True)
_PAIRS = flags.DEFINE_string('pairs', None, 'File of benchmarks.grammar.', required=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_TOKENS = flags.DEFINE_float('tokens', 1e6, 'Tokens that each run reads.')
_SEEDS = flags.DEFINE_integer('seeds', 1, 'Runs of each variant.')
_VARIANTS = flags.DEFINE_list('variants', None, 'Some of the variants; by default all.')
_JOBS = flags.DEFINE_integer('jobs', 2, 'Runs at a time; each has its share of the cores.')
_FIELDS = flags.DEFINE_multi_string(
    'fields', [], 'FIELD=VALUE of the config of every run; may be repeated.')


def _make(run: Run, home: pathlib.Path) -> dict[str, Any]:
  """Trains and judges; returns the line of runs.jsonl."""
  name = re.sub('[^a-z0-9]+', '_', run.variant.lower())
  folder = home / f'{name}-{run.tokens}-{run.seed}'
  calls.call('bert_jax.main', '--config=configs/speedrun.py', f'--workdir={folder}',
             *(f'--config.{field}' for field in _FIELDS.value),
             *(f'--config.{field}={value}'
               for field, value in variants.overrides(run, _RECORDS.value).items()),
             quiet=True)
  judged = {suite: calls.evaluate(pathlib.Path(f'{folder}.{suite}.json'), suite, data,
                                  f'--model={folder}', quiet=True)
            for suite, data in (('masked_lm', _JUDGE.value), ('minimal_pairs', _PAIRS.value))}
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  speeds = [line['tokens_per_second'] for line in lines if line.get('tokens_per_second')]
  return dataclasses.asdict(run) | {
      'speed': statistics.median(speeds), 'fields': _FIELDS.value, **judged}


def _run_all(runs: list[Run], home: pathlib.Path):
  """Makes the runs, each on its share of the cores, and appends their lines."""
  shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
  cores = sorted(os.sched_getaffinity(0))
  for job in range(_JOBS.value):
    shares.put(cores[job::_JOBS.value] or cores)

  def make(run):
    share = shares.get()
    os.sched_setaffinity(0, share)  # of this thread and of the processes that it starts
    try:
      return _make(run, home)
    finally:
      shares.put(share)

  with futures.ThreadPoolExecutor(_JOBS.value) as pool:
    try:
      for done in futures.as_completed([pool.submit(make, run) for run in runs]):
        with (home / 'runs.jsonl').open('a') as file:
          file.write(json.dumps(done.result()) + '\n')
    finally:
      # After a failure, finish only the runs in progress: the others would take days.
      pool.shutdown(wait=False, cancel_futures=True)


def main(_):
  """Makes the runs that are missing, and prints the table."""
  unknown = set(_VARIANTS.value or ()) - variants.VARIANTS.keys()
  if unknown:
    raise app.UsageError(f'--variants names no variant: {", ".join(sorted(unknown))}')
  home = pathlib.Path(_WORKDIR.value)
  calls.keep_flags(home, 'records', 'judge', 'pairs', 'fields')
  results = home / 'runs.jsonl'
  results.touch()
  names = list(dict.fromkeys([variants.RECIPE, *(_VARIANTS.value or variants.VARIANTS)]))
  lines = [json.loads(line) for line in results.read_text().splitlines()]
  made = {(line['variant'], line['tokens'], line['seed']) for line in lines}
  _run_all([run for name in names for seed in range(_SEEDS.value)
            if dataclasses.astuple(run := Run(name, round(_TOKENS.value), seed)) not in made],
           home)
  text = variants.table([json.loads(line) for line in results.read_text().splitlines()])
  (home / 'ablation.md').write_text(text)
  print(text)


if __name__ == '__main__':
  app.run(main)
