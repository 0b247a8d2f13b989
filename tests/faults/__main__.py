"""Breaks runs and checkpoints on purpose: python -m tests.faults --out=runs/faults

Appends a line for each trial to OUT/trials.jsonl, skips the trials that have one, and prints a
table. All trials take hours; --minutes=10 runs as many of each short kind as fit, chosen by --seed.
"""

import collections
import itertools
import json
import os
import pathlib
import random
import sys
import time
import traceback

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

from absl import (
  app,  # noqa: E402
  flags,  # noqa: E402
  logging,  # noqa: E402
)

from bert_jax.runtime import quiet  # noqa: E402
from tests.faults import (
  configs,  # noqa: E402
  corruption,  # noqa: E402
  fuzz,  # noqa: E402
  kills,  # noqa: E402
  runs,  # noqa: E402
  soak,  # noqa: E402
  surroundings,  # noqa: E402
)

_OUT = flags.DEFINE_string('out', 'runs/faults', 'Folder for the trials and what they need.')
_KINDS = flags.DEFINE_list('kinds', None, 'Some of the kinds; by default all.')
_MINUTES = flags.DEFINE_float('minutes', 0, 'Stop after so many; 0 = when all is done.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the order in which trials are tried with --minutes.')

# name: (function that runs a trial by its number, count, description)
KINDS = {
    'kill': (kills.kill, 100, 'SIGKILL at a random moment, then resumed'),
    'term': (kills.term, 100, 'SIGTERM at a random moment, then resumed'),
    'surroundings': (surroundings.surroundings, 10 * len(surroundings.WAYS),
                     f'while it runs, a disk or clock: {", ".join(surroundings.WAYS)}'),
    'corrupt': (corruption.corrupt, 200, 'a damaged file of the newest checkpoint, then restored'),
    'fuzz': (fuzz.fuzz, 10 * len(fuzz.NAMES), f'{fuzz.BATCH} mutated files for a reader'),
    'config': (configs.fuzz, 80, f'{configs.BATCH} command lines of random overrides'),
    'soak': (soak.soak, 1, f'{soak.STEPS:,} steps with a checkpoint every {soak.EVERY}'),
}


def _table(lines):
  print('\n| what | trials | outcomes | promise held |\n| --- | --- | --- | --- |')
  for kind, (_, most, what) in KINDS.items():
    of_kind = [line for line in lines if line['kind'] == kind]
    outcomes = collections.Counter(line['outcome'] for line in of_kind)
    shown = ', '.join(f'{count} {name}' for name, count in outcomes.most_common())
    held = sum(line['sound'] for line in of_kind)
    print(f'| {what} | {len(of_kind)} of {most} | {shown} | {held} of {len(of_kind)} |')
  for line in lines:
    if not line['sound']:
      print('NOT HELD', json.dumps(line), flush=True)


def main(_):
  """Runs the trials that have no line yet."""
  logging.set_verbosity(logging.ERROR)
  quiet.quiet_libraries()
  bench = runs.Bench(pathlib.Path(_OUT.value).resolve())
  ledger, began = bench.folder / 'trials.jsonl', time.monotonic()
  lines = [json.loads(x) for x in ledger.read_text().splitlines()] if ledger.exists() else []
  tried = {(line['kind'], line['number']) for line in lines}
  todo = {kind: [(kind, number) for number in range(KINDS[kind][1]) if (kind, number) not in tried]
          for kind in _KINDS.value or KINDS}
  if _MINUTES.value:  # in turn
    for trials in todo.values():
      random.Random(_SEED.value).shuffle(trials)
    turns = itertools.zip_longest(*(todo[kind] for kind in todo if KINDS[kind][1] > 1))
    todo = {'all': [trial for turn in turns for trial in turn if trial]}
  for kind, number in itertools.chain(*todo.values()):
    if _MINUTES.value and time.monotonic() - began > 60 * _MINUTES.value:
      break
    started = time.monotonic()
    try:
      trial = KINDS[kind][0](bench, number)
    except Exception:  # a finding too
      trial = runs.Trial('the trial itself failed', False, traceback.format_exc()[-600:])
    lines.append({'kind': kind, 'number': number, **trial._asdict(),
                  'seconds': round(time.monotonic() - started, 1)})
    with ledger.open('a') as file:
      file.write(json.dumps(lines[-1]) + '\n')
  _table(lines)
  sys.exit(0 if all(line['sound'] for line in lines) else 1)


if __name__ == '__main__':
  app.run(main)
