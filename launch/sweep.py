"""Runs a config with every combination of some fields' values, and compares the results.

  python launch/sweep.py --config=configs/sequence_classification.py --workdir=runs/sweep \
      --sweep='optimizer.learning_rate=5e-5,3e-5' --sweep='seed=0,1,2' [--parallel=2] \
      [--config.FIELD=VALUE ...]

Each run has a folder in the workdir, made once the config of every run is checked and no run comes
twice. The same command again goes on where it was; a run that fails is named and does not stop the
others. At the end sweep.md, sweep.csv and sweep.png in the workdir have every run, the best first,
and mean and deviation over the seeds. Scores are those of a run's last evaluation: the best of
several on the file that is scored would be chosen by its noise.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import contextlib
import csv
import hashlib
import itertools
import json
import operator
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from bert_jax import errors  # noqa: E402
from bert_jax.commands import command, config_flag, named_configs  # noqa: E402
from bert_jax.reporting import metrics_log  # noqa: E402
from bert_jax.runs import resolve  # noqa: E402
from bert_jax.runtime import ending  # noqa: E402
from bert_jax.training import integrity  # noqa: E402

flags.adopt_module_key_flags(config_flag)  # listed by --help
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the runs and of their tables.')
_SWEEP = flags.DEFINE_multi_string('sweep', [], 'FIELD=VALUE,VALUE,...')
_PARALLEL = flags.DEFINE_integer('parallel', 1, 'Runs at a time, each in a process of its own.',
                                 lower_bound=1)
_LONGEST_NAME = 255  # bytes, of a file


class Result(NamedTuple):
  """The result of one run."""

  values: dict[str, str]  # of the swept fields
  metric: str  # the score that runs are compared by
  score: float | None  # None = failed
  scores: dict[str, Any]  # of the last evaluation
  status: str  # 'done', or the error
  lower_is_better: bool = False  # of the score


def split(values: str) -> list[str]:
  """The values between commas, but for commas in brackets."""
  found, depth = [''], 0
  for character in values:
    depth += (character in '([') - (character in ')]')
    if character == ',' and not depth:
      found.append('')
    else:
      found[-1] += character
  return [value.strip() for value in found]


def parse(sweeps: list[str]) -> dict[str, list[str]]:
  """The values of each field."""
  found = {}
  for sweep in sweeps:
    field, separator, values = sweep.partition('=')
    if not separator or not values:
      raise errors.UserError(f'--sweep={sweep!r} is not FIELD=VALUE,VALUE,...')
    if field in found:
      raise errors.UserError(f'--sweep={sweep!r}: {field} is swept twice')
    found[field] = split(values)
  if not found:
    raise errors.UserError("give at least one --sweep='FIELD=VALUE,VALUE,...'")
  return found


def folder_name(values: dict[str, str]) -> str:
  """The name of a run's folder."""
  name = ','.join(f'{field.rpartition(".")[2]}={value}' for field, value in values.items())
  name = re.sub(r'[^\w.=,+-]', '_', name)
  if len(name.encode()) <= _LONGEST_NAME:
    return name
  return name[:40] + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _arguments(values: Mapping[str, Any]) -> list[str]:
  return [f'--config.{field}={value}' for field, value in values.items()]


def check(config: str, given: Mapping[str, Any], combinations: Sequence[dict[str, str]]):
  """Raises UserError for a field or value that no run can have, and for a run that comes twice.

  The values are checked as a run checks them before it opens its data.

  Args:
    config: a config file.
    given: the fields that are the same in all runs, and their values.
    combinations: the swept fields and their values, of each run.
  """
  both = given.keys() & combinations[0].keys()
  errors.require(not both, f'--config.{min(both, default="")} is given and swept: give it once')
  runs, folders = {}, {}
  for values in combinations:
    argv = ['main', f'--config={config}', *_arguments(given), *_arguments(values)]
    parsed = flags.FlagValues()
    flag = config_flags.DEFINE_config_file('config', flag_values=parsed, sys_argv=argv)
    try:
      parsed(argv)
    except Exception as e:  # a config file is code, and fails as it likes
      config_flag.explain(argv)
      raise errors.UserError(f'--sweep: {e}') from e
    shown = ', '.join(f'{field}={value}' for field, value in values.items())
    try:
      resolve.checked(flag.value, {field: parsed[f'config.{field}'].default
                                   for field in (*given, *values)})
    except errors.UserError as e:
      raise errors.UserError(f'--sweep: {shown}: {e}') from e
    other = runs.setdefault(flag.value.to_json(), shown)
    errors.require(other is shown, f'--sweep: {other} and {shown} are the same run: give it once')
    other = folders.setdefault(folder_name(values), shown)
    errors.require(other is shown, f'--sweep: {other} and {shown} would share the folder '
                   f'{folder_name(values)}: rename what one of them names')


def read_result(workdir: pathlib.Path, values: dict[str, str], status: str) -> Result:
  """The last evaluation in a run's metrics.jsonl."""
  try:
    metric = json.loads((workdir / 'run.json').read_text())['config'].get('keep_best') or 'loss'
  except FileNotFoundError:
    return Result(values, 'loss', None, {}, status)
  lines = metrics_log.read_metrics(workdir / 'metrics.jsonl')
  name = f'eval_{metric}'
  lines = [line for line in lines if line.get(name) is not None]
  if status != 'done' or not lines:
    return Result(values, metric, None, {}, status if status != 'done' else 'no evaluation')
  last = lines[-1]
  return Result(values, metric, last[name], {
      'step': last['step'], **{key.removeprefix('eval_'): value for key, value in last.items()
                               if key.startswith('eval_')}}, 'done',
                _lower_is_better(workdir, metric))


def _lower_is_better(workdir: pathlib.Path, metric: str) -> bool:
  """True if the best score of a run is the lowest, as the kept checkpoint says."""
  for path in workdir.glob(f'best/*/{integrity.ITEM}/metadata'):
    description = json.loads(path.read_text())
    if 'best_is_lowest' in description:
      return description['best_is_lowest']
  # Without keep_best runs are compared by their loss. Older runs had losses and errors by name.
  return metric.endswith(('loss', 'error'))


class Processes:
  """The runs in progress."""

  def __init__(self):
    # SIGTERM may come while the main thread closes: it closes again.
    self._lock, self._running, self._is_closed = threading.RLock(), [], False

  def run(self, command: list[str], log: pathlib.Path, env: dict[str, str]) -> int:
    """Returns the exit status of a command that writes to `log`.

    Raises CancelledError after `close`: the command does not start, its folder is not made.
    """
    with self._lock:
      if self._is_closed:
        raise futures.CancelledError
      log.parent.mkdir(parents=True, exist_ok=True)
      with log.open('a') as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
      self._running.append(process)
    return process.wait()

  def close(self):
    """Ends all, and starts no more: each run saves what it has."""
    with self._lock:
      self._is_closed = True
    for process in self._running:
      process.terminate()
    for process in self._running:
      process.wait()


def run_one(processes: Processes, config: str, workdir: pathlib.Path, values: dict[str, str],
            overrides: list[str]) -> Result:
  """Runs one combination, or goes on with it; its output is in log.txt."""
  command = [sys.executable, '-m', 'bert_jax.main', f'--config={config}', f'--workdir={workdir}',
             *overrides, *(f'--config.{field}={value}' for field, value in values.items())]
  # Files that the fields name are found from here, the code from anywhere.
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
  status = processes.run(command, workdir / 'log.txt', {**os.environ, 'PYTHONPATH': path})
  if status == 0:
    return read_result(workdir, values, 'done')
  last = (workdir / 'log.txt').read_text().strip().rpartition('\n')[2]
  return read_result(workdir, values, f'exit status {status}: {last}')


def _badness(results: list[Result]) -> Callable[[float], float]:
  """A key that sorts scores, the best first."""
  lower_is_better = any(r.lower_is_better for r in results)
  return (lambda score: score) if lower_is_better else operator.neg


def ranked(results: list[Result]) -> list[Result]:
  """The best first, those that failed last."""
  badness = _badness(results)
  return sorted(results, key=lambda r: (r.score is None, badness(r.score or 0)))


def over_seeds(results: list[Result]) -> list[tuple[dict[str, str], list[float]]]:
  """The scores of the runs that differ in the seed only, the best mean first."""
  groups = {}
  for result in ranked(results):
    if result.score is not None:
      rest = tuple((f, v) for f, v in result.values.items() if f != 'seed')
      groups.setdefault(rest, []).append(result.score)
  badness = _badness(results)
  return sorted(((dict(rest), scores) for rest, scores in groups.items()),
                key=lambda group: badness(statistics.mean(group[1])))


def _cells(result: Result, columns: list[str]) -> list[str]:
  shown = {**result.values, **{name: f'{value:.4f}' if isinstance(value, float) else str(value)
                               for name, value in result.scores.items()}}
  return [shown.get(name, '') for name in columns] + [result.status]


def write_tables(workdir: pathlib.Path, results: list[Result]) -> str:
  """Writes sweep.csv and sweep.md, whose text is returned."""
  results = ranked(results)
  fields, metric = list(results[0].values), results[0].metric
  scores = dict.fromkeys(name for r in results for name in r.scores)
  columns = [*fields, *sorted(scores, key=lambda name: name != metric)]
  rows = [_cells(result, columns) for result in results]
  with (workdir / 'sweep.csv').open('w', newline='') as file:
    csv.writer(file).writerows([[*columns, 'status'], *rows])
  lines = [f'| {" | ".join([*columns, "status"])} |', '| --- ' * (len(columns) + 1) + '|']
  lines += [f'| {" | ".join(cell.replace("|", "/") for cell in row)} |' for row in rows]
  if 'seed' in fields:
    others = [field for field in fields if field != 'seed']
    lines += ['', f'| {" | ".join([*others, metric, "deviation", "seeds"])} |',
              '| --- ' * (len(others) + 3) + '|']
    for values, found in over_seeds(results):
      deviation = statistics.stdev(found) if len(found) > 1 else float('nan')
      cells = [*values.values(), f'{statistics.mean(found):.4f}', f'{deviation:.4f}', len(found)]
      lines.append(f'| {" | ".join(map(str, cells))} |')
  text = '\n'.join(lines) + '\n'
  (workdir / 'sweep.md').write_text(text)
  return text


def draw(workdir: pathlib.Path, results: list[Result]):
  """Draws sweep.png: the score of every run, and the mean over the seeds."""
  groups = over_seeds(results)
  if not groups:
    return
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot as plt
  figure, axis = plt.subplots(figsize=(7, 1.2 + 0.4 * len(groups)), layout='constrained')
  for place, (_, scores) in enumerate(groups):
    axis.plot(scores, [place] * len(scores), 'o', color='tab:blue', alpha=0.5, ms=6)
    if len(scores) > 1:
      axis.plot([statistics.mean(scores)], [place], '|', color='black', ms=16, mew=2)
  names = [', '.join(f'{f.rpartition(".")[2]} {v}' for f, v in values.items()) or 'all seeds'
           for values, _ in groups]
  axis.set_yticks(range(len(groups)), names)
  axis.invert_yaxis()
  axis.set(xlabel=next(r.metric for r in results if r.score is not None).replace('_', ' '),
           title='each run, and the mean over seeds' if any(len(s) > 1 for _, s in groups) else '')
  axis.grid(axis='x', alpha=0.3)
  axis.spines[['top', 'right']].set_visible(False)
  figure.savefig(workdir / 'sweep.png', dpi=120)
  plt.close(figure)


def main(argv: list[str]):
  """Flags in, runs, tables."""
  errors.require(len(argv) == 1, f'unexpected argument {argv[-1]!r}: fields of the config are '
                 'given as --config.FIELD=VALUE')
  if not config_flag.is_given() or not _WORKDIR.value:
    raise errors.UserError('give --config=FILE and --workdir=DIR')
  if '://' in _WORKDIR.value:
    raise errors.UserError(f'--workdir={_WORKDIR.value}: a sweep compares what is on this machine, '
                           'give a folder here')
  sweep, workdir = parse(_SWEEP.value), pathlib.Path(_WORKDIR.value).resolve()
  config_flag.get()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = str(pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config'])).resolve())
  combinations = [dict(zip(sweep, values)) for values in itertools.product(*sweep.values())]
  check(config, given, combinations)
  results, processes = [], Processes()
  ending.before_end.append(processes.close)  # at SIGTERM
  with futures.ThreadPoolExecutor(_PARALLEL.value) as pool, contextlib.closing(processes):
    waiting = [pool.submit(run_one, processes, config, workdir / folder_name(values), values,
                           _arguments(given)) for values in combinations]
    for done in futures.as_completed(waiting):
      results.append(done.result())
      shown = ', '.join(f'{field}={value}' for field, value in results[-1].values.items())
      score = results[-1].score
      print(f'{len(results)}/{len(waiting)}  {shown}: '
            + (f'{results[-1].metric} {score:.4f}' if score is not None else results[-1].status),
            flush=True)
  print('\n' + write_tables(workdir, results))
  draw(workdir, results)
  failed = sum(result.score is None for result in results)
  if failed:
    raise errors.Failed(f'{failed} of {len(results)} runs failed: {workdir}/sweep.md says why, the '
                        'same command tries them again')


if __name__ == '__main__':
  command.run_command(main, config_flag.explain, named_configs.with_paths, known_only=True)
