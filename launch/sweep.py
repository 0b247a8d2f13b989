"""Runs a config with every combination of the given field values, and compares scores.

  python launch/sweep.py --config=configs/sequence_classification.py --workdir=runs/sweep \
      --sweep='optimizer.learning_rate=5e-5,3e-5' --sweep='seed=0,1,2' [--parallel=2] \
      [--config.FIELD=VALUE ...]

Each run has a folder in the workdir. The sweep creates folders only after it has checked
the config of every run and found no duplicate. The same command again resumes the sweep.
A run that fails is named and does not stop the others. At the end sweep.md, sweep.csv and
sweep.png in the workdir show every run, the best first, with mean and standard deviation
over the seeds. The score of a run is the score of its last evaluation: choosing the best
evaluation on the scored file would select for noise.
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
from ml_collections import ConfigDict, config_flags  # noqa: E402

from bert_jax import errors  # noqa: E402
from bert_jax.commands import command, config_flag  # noqa: E402
from bert_jax.reporting import metrics_log  # noqa: E402
from bert_jax.runs import resolve  # noqa: E402
from bert_jax.runtime import console, ending, storage  # noqa: E402
from bert_jax.training import integrity  # noqa: E402

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the runs and of their tables.')
_SWEEP = flags.DEFINE_multi_string('sweep', [], 'FIELD=VALUE,VALUE,...')
_PARALLEL = flags.DEFINE_integer(
    'parallel', 1, 'Runs at a time, each in its own process.', lower_bound=1)
_LONGEST_NAME = 255  # bytes in a file name


class Result(NamedTuple):
  """The result of one run."""

  values: dict[str, str]  # the swept fields
  metric: str  # the name of the score that ranks the runs
  score: float | None  # None = failed
  scores: dict[str, Any]  # all scores of the last evaluation
  status: str  # 'done', or the error
  lower_is_better: bool = False  # whether the lowest score is the best


def split(values: str) -> list[str]:
  """Splits values at commas outside brackets."""
  parts, depth = [''], 0
  for character in values:
    depth += (character in '([') - (character in ')]')
    if character == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += character
  return [value.strip() for value in parts]


def parse(sweeps: list[str]) -> dict[str, list[str]]:
  """The values of each field."""
  fields = {}
  for sweep in sweeps:
    field, separator, values = sweep.partition('=')
    if not separator or not values:
      raise errors.UserError(f'--sweep={sweep!r} is not FIELD=VALUE,VALUE,...')
    if field in fields:
      raise errors.UserError(f'--sweep={sweep!r}: {field} is swept twice')
    fields[field] = split(values)
  if not fields:
    raise errors.UserError("give at least one --sweep='FIELD=VALUE,VALUE,...'")
  return fields


def folder_name(values: dict[str, str]) -> str:
  """The name of a run's folder."""
  name = ','.join(
      f'{field.rpartition(".")[2]}={value}' for field, value in values.items())
  name = re.sub(r'[^\w.=,+-]', '_', name)
  if len(name.encode()) <= _LONGEST_NAME:
    return name
  return name[:40] + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _arguments(values: Mapping[str, Any]) -> list[str]:
  return [f'--config.{field}={value}' for field, value in values.items()]


def check(config: str, given: Mapping[str, Any],
          combinations: Sequence[dict[str, str]]) -> list[ConfigDict]:
  """Returns the config of each run.

  A run does the same checks before it opens its data.

  Args:
    config: a config file.
    given: values of the fields that all runs share.
    combinations: values of the swept fields, for each run.

  Raises:
    UserError: an invalid field or value, or a duplicate run.
  """
  both = given.keys() & combinations[0].keys()
  errors.require(not both,
                 f'--config.{min(both, default="")} is given and swept: give it once')
  runs, folders, configs = {}, {}, []
  for values in combinations:
    argv = ['main', f'--config={config}', *_arguments(given), *_arguments(values)]
    parsed = flags.FlagValues()
    flag = config_flags.DEFINE_config_file('config', flag_values=parsed, sys_argv=argv)
    try:
      parsed(argv)
    except Exception as e:  # a config file is code and can raise anything
      config_flag.explain(argv)
      raise errors.UserError(f'--sweep: {e}') from e
    shown = ', '.join(f'{field}={value}' for field, value in values.items())
    try:
      resolve.checked(flag.value, {field: parsed[f'config.{field}'].default
                                   for field in (*given, *values)})
    except errors.UserError as e:
      raise errors.UserError(f'--sweep: {shown}: {e}') from e
    other = runs.setdefault(flag.value.to_json(), shown)
    errors.require(other is shown,
                   f'--sweep: {other} and {shown} are the same run: give it once')
    other = folders.setdefault(folder_name(values), shown)
    errors.require(other is shown, f'--sweep: {other} and {shown} would share the folder '
                   f'{folder_name(values)}: rename the file that one of them names')
    configs.append(flag.value)
  return configs


def check_earlier(folder: pathlib.Path, config: ConfigDict):
  """Raises UserError if the run in a folder began with another model or other files.

  A resumed run may change these fields, but one table compares runs with the same ones.
  """
  path = folder / 'run.json'
  before = ConfigDict(json.loads(path.read_text())['config'] if path.exists() else {})
  for old, asked, field in ((before.get('init_from'), config.init_from, 'init_from'),
                            (before.get('data', {}).get('eval'), config.data.get('eval'),
                             'data.eval')):
    errors.require(old is None or os.path.realpath(old) == os.path.realpath(asked),
                   f'--config.{field}={asked}: {folder} has a run with {field}={old}. Give '
                   'another --workdir')


def read_result(workdir: pathlib.Path, values: dict[str, str], status: str) -> Result:
  """Reads the last evaluation in a run's metrics.jsonl."""
  try:
    metric = json.loads(
        (workdir / 'run.json').read_text())['config'].get('keep_best') or 'loss'
  except FileNotFoundError:
    return Result(values, 'loss', None, {}, status)
  lines = metrics_log.read_metrics(workdir / 'metrics.jsonl')
  name = f'eval_{metric}'
  lines = [line for line in lines if line.get(name) is not None]
  if status != 'done' or not lines:
    return Result(values, metric, None, {},
                  status if status != 'done' else 'no evaluation')
  last = lines[-1]
  scores = {key.removeprefix('eval_'): value for key, value in last.items()
            if key.startswith('eval_')}
  return Result(values, metric, last[name], {'step': last['step'], **scores}, 'done',
                _lower_is_better(workdir, metric))


def _lower_is_better(workdir: pathlib.Path, metric: str) -> bool:
  """True if the lowest score is the best, according to the kept checkpoint."""
  for path in workdir.glob(f'best/*/{integrity.FINGERPRINTS}/metadata'):
    description = json.loads(path.read_text())
    if 'best_is_lowest' in description:
      return description['best_is_lowest']
  # Without keep_best there is no kept checkpoint, and the loss ranks the runs. Checkpoints
  # of older versions do not record the direction. The name of the score decides for both.
  return metric.endswith(('loss', 'error'))


class Processes:
  """The runs in progress."""

  def __init__(self):
    # Reentrant, because a SIGTERM during `close` calls `close` again in the same thread.
    self._lock, self._running, self._is_closed = threading.RLock(), [], False

  def run(self, command: list[str], log: pathlib.Path, env: dict[str, str]) -> int:
    """Runs a command that writes to `log`, and returns its exit status.

    After `close` it raises CancelledError, and neither starts the command nor creates its
    folder.
    """
    with self._lock:
      if self._is_closed:
        raise futures.CancelledError
      log.parent.mkdir(parents=True, exist_ok=True)
      with log.open('a') as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env)
      self._running.append(process)
    return process.wait()

  def close(self):
    """Ends all runs, each of which saves first, and prevents new ones."""
    with self._lock:
      self._is_closed = True
    for process in self._running:
      process.terminate()
    for process in self._running:
      process.wait()


def run_one(processes: Processes, config: str, workdir: pathlib.Path,
            values: dict[str, str], overrides: list[str]) -> Result:
  """Runs or resumes one combination, with its output in log.txt."""
  command = [
      sys.executable, '-m', 'bert_jax.main', f'--config={config}', f'--workdir={workdir}',
      *overrides, *(f'--config.{field}={value}' for field, value in values.items())
  ]
  # The run keeps the current folder, so that relative paths in fields work. PYTHONPATH
  # finds the code from there.
  path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
  status = processes.run(command, workdir / 'log.txt', {**os.environ, 'PYTHONPATH': path})
  if status == 0:
    return read_result(workdir, values, 'done')
  last = (workdir / 'log.txt').read_text().strip().rpartition('\n')[2]
  return read_result(workdir, values, f'exit status {status}: {last}')


def _badness(results: list[Result]) -> Callable[[float], float]:
  """Returns a sort key that puts the best score first."""
  lower_is_better = any(r.lower_is_better for r in results)
  return (lambda score: score) if lower_is_better else operator.neg


def ranked(results: list[Result]) -> list[Result]:
  """Sorts results: the best first, failed runs last."""
  badness = _badness(results)
  return sorted(results, key=lambda r: (r.score is None, badness(r.score or 0)))


def over_seeds(results: list[Result]) -> list[tuple[dict[str, str], list[float]]]:
  """Groups the scores of runs that differ only in the seed, the best mean first."""
  groups = {}
  for result in ranked(results):
    if result.score is not None:
      rest = tuple((f, v) for f, v in result.values.items() if f != 'seed')
      groups.setdefault(rest, []).append(result.score)
  badness = _badness(results)
  return sorted(((dict(rest), scores) for rest, scores in groups.items()),
                key=lambda group: badness(statistics.mean(group[1])))


def _cells(result: Result, columns: list[str]) -> list[str]:
  scores = {name: f'{value:.4f}' if isinstance(value, float) else str(value)
            for name, value in result.scores.items()}
  shown = {**result.values, **scores}
  return [shown.get(name, '') for name in columns] + [result.status]


def write_tables(workdir: pathlib.Path, results: list[Result]) -> str:
  """Writes sweep.csv and sweep.md, and returns the text of sweep.md."""
  results = ranked(results)
  fields, metric = list(results[0].values), results[0].metric
  scores = dict.fromkeys(name for r in results for name in r.scores)
  columns = [*fields, *sorted(scores, key=lambda name: name != metric)]
  rows = [_cells(result, columns) for result in results]
  with (workdir / 'sweep.csv').open('w', newline='') as file:
    csv.writer(file).writerows([[*columns, 'status'], *rows])
  tables = [console.markdown_table([[*columns, 'status'], *rows])]
  if 'seed' in fields:
    others = [field for field in fields if field != 'seed']
    means = [[*others, metric, 'deviation', 'seeds']]
    for values, of_seeds in over_seeds(results):
      deviation = statistics.stdev(of_seeds) if len(of_seeds) > 1 else float('nan')
      means.append([*values.values(), f'{statistics.mean(of_seeds):.4f}', f'{deviation:.4f}',
                    len(of_seeds)])
    tables.append(console.markdown_table(means))
  text = '\n\n'.join(tables) + '\n'
  (workdir / 'sweep.md').write_text(text)
  return text


def draw(workdir: pathlib.Path, results: list[Result]):
  """Draws sweep.png: the score of every run and the mean over seeds."""
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
  names = [
      ', '.join(f'{f.rpartition(".")[2]} {v}' for f, v in values.items()) or 'all seeds'
      for values, _ in groups]
  axis.set_yticks(range(len(groups)), names)
  axis.invert_yaxis()
  metric = next(r.metric for r in results if r.score is not None)
  has_seeds = any(len(scores) > 1 for _, scores in groups)
  axis.set(xlabel=metric.replace('_', ' '),
           title='each run, and the mean over seeds' if has_seeds else '')
  axis.grid(axis='x', alpha=0.3)
  axis.spines[['top', 'right']].set_visible(False)
  figure.savefig(workdir / 'sweep.png', dpi=120)
  plt.close(figure)


def main(argv: list[str]):
  """Starts the runs that the flags give, and writes the tables."""
  errors.require(
      len(argv) == 1, f'unexpected argument {argv[-1]!r}: fields of the config are '
      'given as --config.FIELD=VALUE')
  if not config_flag.is_given() or not _WORKDIR.value:
    raise errors.UserError('give --config=FILE and --workdir=DIR')
  if '://' in _WORKDIR.value:
    raise errors.UserError(
        f'--workdir={_WORKDIR.value}: a sweep compares runs on this machine, '
        'give a local folder')
  sweep, workdir = parse(_SWEEP.value), pathlib.Path(_WORKDIR.value).resolve()
  config_flag.get()
  given = config_flags.get_override_values(flags.FLAGS['config'])
  config = str(
      pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config'])).resolve())
  combinations = [
      dict(zip(sweep, values)) for values in itertools.product(*sweep.values())
  ]
  for values, run in zip(combinations, check(config, given, combinations)):
    check_earlier(workdir / folder_name(values), run)
  storage.make_writable(workdir, f'--workdir={_WORKDIR.value}')
  results, processes = [], Processes()
  ending.before_end.append(processes.close)  # at SIGTERM
  with futures.ThreadPoolExecutor(_PARALLEL.value) as pool, contextlib.closing(processes):
    waiting = [
        pool.submit(run_one, processes, config, workdir / folder_name(values), values,
                    _arguments(given)) for values in combinations
    ]
    for done in futures.as_completed(waiting):
      results.append(done.result())
      shown = ', '.join(f'{field}={value}' for field, value in results[-1].values.items())
      score = results[-1].score
      print(f'{len(results)}/{len(waiting)}  {shown}: ' +
            (f'{results[-1].metric} {score:.4f}'
             if score is not None else results[-1].status),
            flush=True)
  print('\n' + write_tables(workdir, results))
  draw(workdir, results)
  failed = sum(result.score is None for result in results)
  if failed:
    raise errors.Failed(
        f'{failed} of {len(results)} runs failed: {workdir}/sweep.md says why; run '
        'the same command again to retry them')


if __name__ == '__main__':
  command.run_command(
      main, config_flag.explain, config_flag.with_paths, known_only=True)
