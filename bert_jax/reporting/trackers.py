"""Where a run's metrics go in addition to its workdir: TensorBoard, Weights & Biases.

A resumed run continues its record. It repeats the steps after its checkpoint and gets the
same numbers: TensorBoard hides the earlier rows of these steps, and Weights & Biases gets
each step only once. Rows that were in a buffer at a kill are sent again.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any, ClassVar, NamedTuple
import uuid

from etils import epath

from bert_jax.errors import Failed, UserError, require, require_choice
from bert_jax.runtime import console, network, storage


class Row(NamedTuple):
  """The numbers of one line of metrics.jsonl."""

  step: int
  scalars: Mapping[str, float]  # all under train/ or all under eval/

  @property
  def kind(self) -> str:
    return next(iter(self.scalars)).partition('/')[0]


class Tracker:
  """A service that keeps the record of a run."""

  package: ClassVar[str]  # to import and to install

  def start(self, config: Mapping[str, Any], name: str, workdir: epath.Path, commit: str,
            first_step: int, rows: Sequence[Row]):
    """Begins the record of the run `name`, or continues it after `first_step`.

    `workdir` is local; `commit` may be ''. `rows` are all rows up to `first_step`: the
    tracker may lack some that were in its buffer at a kill.
    """

  def log(self, row: Row):
    """Logs the numbers after some steps."""

  def finish(self, workdir: epath.Path, evaluations: Sequence[Mapping[str, Any]]):
    """Ends the record; `evaluations`: the lines of the whole run that have scores."""

  @staticmethod
  def is_complete(workdir: epath.Path, rows: Sequence[Row]) -> bool:
    """True if the record has these rows, and was ended after the last of them.

    By default each row is on disk before the run continues.
    """
    return True


class TensorBoard(Tracker):
  """The folder tensorboard/ of the workdir."""

  package = 'tensorboardX'

  def start(self, config, name, workdir, commit, first_step, rows):
    # It has all rows: each is on disk before the run continues.
    self._folder, self._first_step = workdir / 'tensorboard', first_step
    self._config = json.dumps({'commit': commit, **config}, indent=2, default=str)

  @functools.cached_property
  def _file(self) -> Any:
    """The event file; opened for the first row, because the import is slow."""
    with _hidden('torch'):  # imported for a type annotation: it takes seconds
      import tensorboardX
    self._folder.mkdir(parents=True, exist_ok=True)
    # SummaryWriter has a queue before the file, and its `flush` does not wait for it. The
    # name of the file has only the second: the suffix distinguishes two processes.
    file = tensorboardX.event_file_writer.EventsWriter(
        str(self._folder / 'events'), f'.{self._first_step:012}')
    proto = tensorboardX.proto.event_pb2
    # This event hides earlier rows of the steps that are repeated.
    _write_event(file, self._first_step + 1,
                 session_log=proto.SessionLog(status=proto.SessionLog.START))
    _write_event(file, self._first_step, summary=tensorboardX.summary.text(
        'config', f'```\n{self._config}\n```'))
    return file

  def log(self, row):
    file = self._file  # imports the package with torch hidden
    from tensorboardX import summary
    for name, value in row.scalars.items():
      _write_event(file, row.step, summary=summary.scalar(name, value))
    file.flush()

  def finish(self, workdir, evaluations):
    self._file.close()


def _write_event(file: Any, step: int, **content: Any):
  from tensorboardX.proto import event_pb2
  file.write_event(event_pb2.Event(step=step, wall_time=time.time(), **content))


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
  """Within the block a package cannot be imported, unless it is imported already."""
  if package in sys.modules:
    yield
    return
  sys.modules[package] = None
  try:
    yield
  finally:
    del sys.modules[package]


class WeightsAndBiases(Tracker):
  """A run of W&B; WORKDIR/wandb.json has its id and the last steps that W&B surely has.

  The environment variables of W&B (WANDB_PROJECT, WANDB_MODE, ...) apply. W&B numbers its
  calls itself, so the step of the run is a metric, 'step', and the x-axis of every chart.

  W&B keeps rows in a buffer of another process, which dies with this one. After a kill,
  its server or its files show which rows it has, and the other rows are sent again.
  """

  package = 'wandb'

  def start(self, config, name, workdir, commit, first_step, rows):
    import wandb
    self._wandb, self._path = wandb, workdir / 'wandb.json'
    self._id, self._safe = _wandb_record(workdir)
    self._save()
    self._run = self._begin({**config, 'commit': commit}, name, workdir)
    self._run.define_metric('step')
    self._run.define_metric('*', step_metric='step')
    self._has = set(_rows_in_files(workdir))
    if not self._run.offline and not self._run.disabled:
      # The server knows its last step. It gets the training row of a step first, so it may
      # lack the evaluation row of the last step.
      step = self._run.summary.get('step') or 0
      for kind, arrived in (('train', step), ('eval', step - 1)):
        self._safe[kind] = max(arrived, self._safe[kind])
    for row in rows:
      self.log(row)

  def _begin(self, config: dict[str, Any], name: str, workdir: epath.Path) -> Any:
    wandb = self._wandb
    try:
      # W&B's own lines would mix with ours. Its warnings stay.
      settings = wandb.setup(wandb.Settings(quiet=True, show_info=False)).settings
      is_offline = settings.mode in ('offline', 'dryrun')
      if not is_offline and settings.mode != 'disabled':
        _check_server(settings.base_url)
      # If nobody has logged in, W&B would ask on the keyboard and wait.
      with _no_keyboard():
        run = wandb.init(
            project=os.environ.get('WANDB_PROJECT', 'bert_jax'), name=name, id=self._id,
            resume=None if is_offline else 'allow', dir=str(workdir), config=config,
            allow_val_change=True, settings=wandb.Settings(console='off'))
    except (wandb.Error, ValueError) as e:  # ValueError: one of its variables is wrong
      raise UserError(f'trackers: wandb does not start: {_reason(e)}') from e
    if is_offline:  # W&B warns of a missing URL
      address = f'offline: `wandb sync --append {workdir}/wandb/offline-run-*` uploads it'
    else:
      address = 'disabled' if run.disabled else run.url
    console.print_lines([('wandb', address)])
    return run

  def _save(self):
    storage.write_whole(self._path, json.dumps({'id': self._id, 'safe': self._safe}))

  def log(self, row):
    if row.step <= self._safe[row.kind] or (row.kind, row.step) in self._has:
      return
    self._run.log({'step': row.step, **row.scalars})
    self._has.add((row.kind, row.step))

  def finish(self, workdir, evaluations):
    if evaluations:
      columns = list(dict.fromkeys(name for line in evaluations for name in line))
      rows = [[line.get(name) for name in columns] for line in evaluations]
      self._run.log({'evaluations': self._wandb.Table(columns=columns, data=rows)})
    if (workdir / 'curves.png').exists():
      self._run.log({'curves': self._wandb.Image(str(workdir / 'curves.png'))})
    self._run.finish()
    for kind, step in self._has:
      self._safe[kind] = max(step, self._safe[kind])
    self._save()

  @staticmethod
  def is_complete(workdir, rows):
    _, safe = _wandb_record(workdir)
    return all(row.step <= safe[row.kind] for row in rows)


def _wandb_record(workdir: epath.Path) -> tuple[str, dict[str, int]]:
  """The id of the run at W&B, and the last train and eval steps that W&B surely has."""
  record = storage.read_json_if_any(workdir / 'wandb.json')
  return (record.get('id') or uuid.uuid4().hex,
          {'train': 0, 'eval': 0, **record.get('safe', {})})


def _rows_in_files(workdir: epath.Path) -> Iterator[tuple[str, int]]:
  """(kind, step) of each row in the files of processes that were offline."""
  try:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal import datastore
  except ImportError:  # in another version: some rows arrive twice, and none is lost
    return
  for path in sorted(workdir.glob('wandb/offline-run-*/run-*.wandb')):
    store = datastore.DataStore()
    with contextlib.suppress(AssertionError):  # a kill cuts the last record short
      store.open_for_scan(str(path))
      while (data := store.scan_data()) is not None:
        items = wandb_internal_pb2.Record.FromString(data).history.item
        values = {'/'.join(item.nested_key) or item.key: item.value_json for item in items}
        kinds = {name.partition('/')[0] for name in values} & {'train', 'eval'}
        yield from ((kind, int(values['step'])) for kind in kinds)


@contextlib.contextmanager
def _no_keyboard() -> Iterator[None]:
  keyboard = sys.stdin
  with open(os.devnull) as sys.stdin:
    try:
      yield
    finally:
      sys.stdin = keyboard


def _check_server(url: str):
  """Raises Failed if the server cannot be reached: W&B would retry for half an hour."""
  try:
    network.check(url)
  except OSError as e:
    raise Failed(f'trackers: wandb cannot reach {url}: {e}; WANDB_MODE=offline keeps a '
                 'record in the workdir') from e


def _reason(error: Exception) -> str:
  """The message of W&B without links, and what to do."""
  lines = [line.strip() for line in str(error).splitlines() if 'https://' not in line]
  message = ' '.join(lines).rstrip('.')
  if 'API key' in message and 'WANDB_API_KEY' not in os.environ:
    return f'{message}; `wandb login`, or WANDB_MODE=offline for a record in the workdir'
  # W&B sets WANDB_SERVICE itself.
  names = ', '.join(sorted(name for name in os.environ
                           if name.startswith('WANDB_') and name != 'WANDB_SERVICE'))
  return f'{message}; correct or unset its variables (set are: {names or "none"})'


ALL: dict[str, type[Tracker]] = {'tensorboard': TensorBoard, 'wandb': WeightsAndBiases}


def check(names: Sequence[str], given: bool):
  """Raises UserError for an unknown tracker, or one that is not installed.

  `given` says that `trackers` is on the command line. Otherwise TensorBoard may be
  missing, because a machine without a network may lack it.
  """
  for name in names:
    require_choice('trackers', name, ALL)
    package = ALL[name].package
    may_lack = name == 'tensorboard' and not given
    require(may_lack or importlib.util.find_spec(package),
            f'trackers={name!r} is not installed: pip install {package}')


def _commit() -> str:
  """The git revision of this code, with '-dirty' if files differ; '' without git."""
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
  try:
    return subprocess.run(command, cwd=epath.Path(__file__).parent, capture_output=True,
                          text=True).stdout.strip()
  except OSError:
    return ''


def start(names: Sequence[str], config: Mapping[str, Any], run: str, workdir: epath.Path,
          first_step: int, rows: Sequence[Row]) -> list[Tracker]:
  """Starts the trackers `names` of the run with this name, see `Tracker.start`.

  Raises UserError if one cannot start.
  """
  trackers, commit = [], _commit()
  for name in names:
    tracker = ALL[name]()
    if not importlib.util.find_spec(tracker.package):
      console.print_lines([
          ('note', f'{tracker.package} is not installed: no record for {name}')])
      continue
    tracker.start(config, run, workdir, commit, first_step, rows)
    trackers.append(tracker)
  return trackers
