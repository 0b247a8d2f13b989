"""Where the record of a run goes beside its workdir: TensorBoard, Weights & Biases.

A run that goes on continues its record. It makes the steps after its checkpoint again, with the
same numbers: TensorBoard drops what it has of them, Weights & Biases takes each step once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, ClassVar, Protocol
import uuid

from etils import epath

from bert_jax.errors import UserError, require_choice
from bert_jax.runtime import console, storage

Start = Callable[[epath.Path, int], Sequence['Tracker']]  # from a local workdir and the first step


class Tracker(Protocol):
  """A service that keeps the record of a run."""

  package: ClassVar[str]  # to import and to install

  def start(self, config: Mapping[str, Any], name: str, workdir: epath.Path, commit: str,
            first_step: int):
    """Begins the record of the run `name`, or continues it after `first_step`.

    `workdir` is local; `commit` may be ''.
    """

  def log(self, step: int, scalars: Mapping[str, float]):
    """Logs numbers after `step` updates, all under train/ or all under eval/."""

  def finish(self, workdir: epath.Path, evaluations: Sequence[Mapping[str, Any]]):
    """Ends the record; `evaluations` are those of the whole run, with their 'step'."""


class TensorBoard:
  """The folder tensorboard/ of the workdir."""

  package = 'tensorboardX'

  def start(self, config, name, workdir, commit, first_step):
    del name
    self._folder, self._first_step = str(workdir / 'tensorboard'), first_step
    self._config = json.dumps({'commit': commit, **config}, indent=2, default=str)

  @functools.cached_property
  def _writer(self) -> Any:
    """Opened by the first line, which stands on the screen before the package is imported."""
    with _hidden('torch'):  # imported for a type annotation: it takes seconds
      import tensorboardX
    writer = tensorboardX.SummaryWriter(self._folder, purge_step=self._first_step + 1)
    writer.add_text('config', f'```\n{self._config}\n```', self._first_step)
    return writer

  def log(self, step, scalars):
    for name, value in scalars.items():
      self._writer.add_scalar(name, value, step)
    self._writer.flush()  # a kill loses little

  def finish(self, workdir, evaluations):
    del workdir, evaluations  # it has them
    self._writer.close()


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
  """A package that is not imported yet cannot be imported meanwhile."""
  if package in sys.modules:
    yield
    return
  sys.modules[package] = None
  try:
    yield
  finally:
    del sys.modules[package]


class WeightsAndBiases:
  """A run of W&B; its id and the last steps that it has are in WORKDIR/wandb.json.

  The environment variables of W&B (WANDB_PROJECT, WANDB_MODE, ...) apply. W&B numbers its calls
  itself, so the step of the run is a metric, 'step', and the x-axis of every chart.
  """

  package = 'wandb'

  def start(self, config, name, workdir, commit, first_step):
    del first_step
    import wandb
    self._wandb, self._path = wandb, workdir / 'wandb.json'
    self._record = (storage.read_json(self._path) if self._path.exists()
                    else {'id': uuid.uuid4().hex, 'train': 0, 'eval': 0})
    self._save()
    try:
      self._run = wandb.init(
          project=os.environ.get('WANDB_PROJECT', 'bert_jax'), name=name,
          id=self._record['id'], resume='allow', dir=str(workdir),
          config={**config, 'commit': commit}, allow_val_change=True,
          settings=wandb.Settings(console='off'))
    except wandb.Error as e:
      raise UserError(f'trackers: wandb does not start: {e}; `wandb login`, or WANDB_MODE=offline '
                      'for a record in the workdir') from e
    self._run.define_metric('step')
    self._run.define_metric('*', step_metric='step')

  def _save(self):
    storage.write_whole(self._path, json.dumps(self._record))

  def log(self, step, scalars):
    kind = next(iter(scalars)).partition('/')[0]
    if step <= self._record[kind]:
      return
    self._run.log({'step': step, **scalars})
    self._record[kind] = step
    self._save()

  def finish(self, workdir, evaluations):
    if evaluations:
      columns = list(dict.fromkeys(name for line in evaluations for name in line))
      rows = [[line.get(name) for name in columns] for line in evaluations]
      self._run.log({'evaluations': self._wandb.Table(columns=columns, data=rows)})
    if (workdir / 'curves.png').exists():
      self._run.log({'curves': self._wandb.Image(str(workdir / 'curves.png'))})
    self._run.finish()


ALL: dict[str, type[Tracker]] = {'tensorboard': TensorBoard, 'wandb': WeightsAndBiases}


def _is_installed(package: str) -> bool:
  try:
    return importlib.util.find_spec(package) is not None
  except ImportError:
    return False


def check(names: Sequence[str], given: bool):
  """Raises UserError for an unknown tracker, or one that is not installed.

  Unless `trackers` is `given` on the command line, TensorBoard may be absent: a machine without a
  network may lack it.
  """
  for name in names:
    require_choice('trackers', name, ALL)
    package = ALL[name].package
    if (given or name != 'tensorboard') and not _is_installed(package):
      raise UserError(f'trackers={name!r} is not installed: pip install {package}')


def _commit() -> str:
  """The git revision of this code, with '-dirty' if files differ from it; '' without git."""
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
  try:
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True,
                          text=True)
  except OSError:
    return ''
  return done.stdout.strip()


def start(names: Sequence[str], config: Mapping[str, Any], run: str, workdir: epath.Path,
          first_step: int) -> list[Tracker]:
  """Starts the trackers of the run of this name; raises UserError if one cannot start."""
  trackers, commit = [], _commit()
  for name in names:
    tracker = ALL[name]()
    if not _is_installed(tracker.package):
      console.print_lines([('note', f'{tracker.package} is not installed: no record for {name}')])
      continue
    tracker.start(config, run, workdir, commit, first_step)
    trackers.append(tracker)
  return trackers
