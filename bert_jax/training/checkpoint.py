"""Saves and restores checkpoints with orbax: sharded, asynchronous, atomic, verified."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import errno
import itertools
import math
import os
import shutil
import sys
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from bert_jax.errors import Failed, UserError, require
from bert_jax.runtime import console, ending, lock, processes, sealed, storage
from bert_jax.training import integrity
from bert_jax.training.state import TrainState

FOLDERS = ('best', 'checkpoints')  # of a workdir, in the order in which models are loaded
BASE = 'base'  # the frozen model of a LoRA run, a folder of a workdir
# Never copied between a bucket and this machine.
APART = (*FOLDERS, BASE, 'damaged', lock.NAME)
_SPARE_BYTES = 100_000  # for the metadata of a checkpoint and the other files of the run
# The replicas of an array share the work of saving it. Each share needs its own compiled
# program, so one replica saves the whole array if the shares would be smaller than this.
_SMALLEST_SHARE = 1 << 20  # bytes


def absolute(path: epath.Path) -> epath.Path:
  """The absolute path. Orbax needs one, and complains only in its background thread."""
  return path if storage.is_remote(str(path)) else epath.Path(os.path.abspath(path))


class _Manager(ocp.CheckpointManager):
  """Orbax's manager of checkpoints with these items, without its own preemption check."""

  def __init__(self, folder: epath.Path, items: Sequence[str], **options: Any):
    arrays = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=_SMALLEST_SHARE)))
    handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=arrays)
                for name in items}
    handlers[integrity.FINGERPRINTS] = ocp.JsonCheckpointHandler()
    # A kill during a save leaves a temporary folder: without cleanup, orbax would warn.
    super().__init__(folder, item_handlers=handlers, options=ocp.CheckpointManagerOptions(
        create=True, cleanup_tmp_directories=True, **options))

  def reached_preemption(self, step: int) -> bool:
    # Orbax would ask JAX to agree on a step number. `preemption.Notice` asks with other
    # numbers, so the processes would agree on a step that none of them reaches.
    return False


class Checkpoints:
  """The `checkpoints/` and `best/` folders of a workdir, with a folder for each step.

  Args of the constructor:
    workdir: of the run, local or in a bucket.
    keep: how many of the newest checkpoints to keep.
    best: the score that decides which parameters stay in `best/`; '' = none.
    best_is_lowest: True if the best score is the lowest; the task says so.
    every: also keep the checkpoint of every N steps; 0 = none.
  """

  def __init__(self, workdir: epath.Path, keep: int, best: str = '', *,
               best_is_lowest: bool = False, every: int = 0):
    self._workdir = absolute(workdir)
    self._score, self._best_is_lowest = best, best_is_lowest
    self._manager = _Manager(self._workdir / 'checkpoints', ('params', 'optimizer'),
                             max_to_keep=keep, keep_period=every or None)
    # A new checkpoint in `best/` replaces the old checkpoint, so the newest is the best.
    self._best = best and _Manager(self._workdir / 'best', ('params',), max_to_keep=1)

  def latest(self) -> int | None:
    """The newest complete step, None if there is none."""
    return self._manager.latest_step()

  def save(self, state: TrainState, step: int):
    """Starts a save; returns once the state is copied to host memory.

    Raises:
      OSError: ENOSPC, before anything is written, if the local disk has no room for it.
      Failed: this checkpoint or the previous checkpoint cannot be written.
    """
    if step == self.latest():
      return
    with _explained(self._workdir):
      self._check_folder(state)
      _save(self._manager, step, _items(state))

  def _check_folder(self, state: TrainState):
    """Makes the folder if the user deleted it; raises ENOSPC if it has no room."""
    directory = str(self._manager.directory)
    if storage.is_remote(directory):
      return
    if not os.path.exists(directory):
      os.makedirs(directory, exist_ok=True)
      self._manager.reload()
      console.print_summary([
          ('deleted', f'{directory} was deleted during the run: it starts over')])
    # A writer that runs out of space would print pages of tracebacks from its threads.
    needed = sum(shard.data.nbytes for x in jax.tree.leaves(_items(state))
                 for shard in x.addressable_shards if shard.replica_id == 0)
    free = shutil.disk_usage(directory).free
    if free < 1.2 * needed + _SPARE_BYTES:
      raise OSError(errno.ENOSPC, f'a checkpoint takes {needed / 1e6:,.1f} MB, '
                    f'{free / 1e6:,.1f} MB are free', directory)

  def restore(self, abstract: TrainState) -> tuple[TrainState, int]:
    """The state of the newest sound checkpoint, sharded like `abstract`, and its step.

    Reports damaged checkpoints, also in `best/`, and moves them into `damaged/` of the
    workdir. Raises UserError if the checkpoint is of another model, or none is sound.
    """
    for step in reversed(integrity.steps(self._manager.directory)):
      items = self._read(self._manager, step, integrity.read, _items(abstract))
      if items is None:
        continue
      # Check the best now, because a later evaluation compares with it.
      if self._best and (best_step := self._best.latest_step()) is not None:
        self._read(self._best, best_step, integrity.read, {'params': abstract.params})
      optimizer = items['optimizer']
      return TrainState(optimizer['step'], items['params'], optimizer['moments'], {}), step
    raise UserError(f'no checkpoint of {self._workdir} is sound, all are in '
                    f'{self._workdir}/damaged: start over with another --workdir')

  def _read(self, manager: _Manager, step: int, read: Callable[..., dict],
            *args) -> dict | None:
    """Returns `read(folder, *args)`; moves a damaged checkpoint away and returns None."""
    folder = manager.directory / str(step)
    try:
      return read(folder, *args)
    except integrity.Damaged as e:
      damage = e
    target = self._workdir / 'damaged' / f'{folder.parent.name}-{step}'
    # `damaged/` may already have a checkpoint of this step: do not overwrite it.
    for number in itertools.count(2):
      if not target.exists():
        break
      target = target.parent / f'{folder.parent.name}-{step}-{number}'
    if not jax.process_index():
      target.parent.mkdir(parents=True, exist_ok=True)
      folder.rename(target)
    processes.barrier()  # no process reloads before the move
    manager.reload()
    console.print_summary([('damaged', f'{folder}: {damage}; it is in {target} now')])
    return None

  def check(self):
    """Raises the error of a background save that failed: see `save`."""
    with _explained(self._workdir):
      self._manager.check_for_errors()

  def wait(self):
    """Waits until the last save is complete; raises its error: see `save`."""
    with _explained(self._workdir):
      self._manager.wait_until_finished()

  def offer(self, params: Any, step: int, scores: Mapping[str, float],
            judged_on: str = ''):
    """Keeps the parameters of `step` in `best/` if their score beats the score there.

    `judged_on` names the evaluated data. Scores on different data are not compared: the
    newer parameters win, and a printed line says so. Returns once the parameters are on
    disk, because a run that resumes from the next checkpoint does not evaluate this step
    again. Raises Failed if the parameters cannot be written.
    """
    if not self._best or not math.isfinite(scores[self._score]):
      return
    judge = {'metric': self._score, 'judged_on': judged_on}
    with _explained(self._workdir):
      best_step = self._best.latest_step()
      # A damaged best is moved away here, and any score is better.
      best = (self._read(self._best, best_step, integrity.description)
              if best_step is not None else None)
      if best:
        sign = -1 if self._best_is_lowest else 1
        is_comparable = all(best.get(name, value) == value for name, value in judge.items())
        if is_comparable and sign * scores[self._score] <= sign * best['score']:
          return
        if not is_comparable:
          console.print_summary([
              ('best', f'step {step} ({_judged(judge)}) replaces step {best_step} '
               f'({_judged(best)}): these are not compared')])
        # The manager takes the highest step as the best. If the run went back to the step
        # in `best/` or before it, that checkpoint must go.
        if best_step >= step:
          # A barrier: each process must have read the old checkpoint before its deletion.
          processes.meet(f'better than the best/{best_step}, at {step}')
          self._best.delete(best_step)
      _save(self._best, step, {'params': params}, score=scores[self._score],
            best_is_lowest=self._best_is_lowest, **judge)
      self._best.wait_until_finished()

  def settle(self, error: type[BaseException] | None, *_: Any):
    """Waits for a save in progress when an error ends the run of a single process.

    Otherwise the next run in this process, for example in a notebook, would treat this
    save as cut short by a kill. In a run of several processes, this process ends at once.
    """
    if error and jax.process_count() == 1:
      with contextlib.suppress(Exception):
        self._manager.wait_until_finished()

  def close(self):
    """Waits for the last save, then closes the managers."""
    self.wait()
    self._manager.close()
    if self._best:
      self._best.close()


def _judged(judge: Mapping[str, Any]) -> str:
  return ' on '.join(filter(None, (judge.get('metric'), judge.get('judged_on'))))


@contextlib.contextmanager
def _explained(workdir: epath.Path) -> Iterator[None]:
  """Turns write errors of orbax and tensorstore into a `Failed` with one line."""
  try:
    yield
  except Exception as e:  # orbax and tensorstore have many kinds of errors
    # `processes` explains errors of an exchange with other processes.
    is_explained = isinstance(e, (UserError, Failed, jax.errors.JaxRuntimeError))
    if is_explained or ending.storage_trouble(e):
      raise
    reason = ' '.join(str(e).split())[:300]
    raise Failed(f'a checkpoint cannot be written to {workdir}: {reason}; the complete '
                 'checkpoints are sound: run the same command again') from e


def _items(state: TrainState) -> dict[str, Any]:
  """The saved items of a state; `params` are separate, as models load nothing else."""
  return {'params': state.params,
          'optimizer': {'step': state.step, 'moments': state.opt_state}}


def fits(workdir: epath.Path, abstract: TrainState) -> bool:
  """False if the newest checkpoint of a workdir is of another model or optimizer."""
  directory = absolute(workdir) / 'checkpoints'
  for step in reversed(integrity.steps(directory)):
    folder = directory / str(step)
    try:
      integrity.check_fit(folder, integrity.description(folder), _items(abstract))
      return True
    except integrity.Damaged:  # `restore` moves it away and takes an older one
      continue
    except UserError:
      return False
  return True


def _save(manager: _Manager, step: int, items: Mapping[str, Any], **more: Any):
  saved = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
  saved[integrity.FINGERPRINTS] = ocp.args.JsonSave(
      sealed.seal({'step': step, 'arrays': integrity.arrays(items), **more}))
  manager.save(step, args=ocp.args.Composite(**saved), force=True)


def on_one_device(abstract: Any) -> Any:
  """ShapeDtypeStructs on this process's first device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)


def complete(workdir: epath.Path) -> list[epath.Path]:
  """The complete checkpoints of a workdir, sound or not, in the order of their use."""
  return [absolute(workdir) / name / str(step) for name in FOLDERS
          for step in reversed(integrity.steps(absolute(workdir) / name))]


def restore_params(workdir: epath.Path, abstract: Any, step: int | None = None,
                   allow_older: bool = False) -> tuple[Any, int]:
  """The parameters of a workdir's best or else newest checkpoint, and its step.

  Args:
    workdir: folder of a run.
    abstract: ShapeDtypeStructs of the parameters.
    step: reads the checkpoint of this step instead.
    allow_older: if the checkpoint is damaged, reads the next sound one, and says so.

  Returns:
    (the parameters on one device, the step).

  Raises:
    UserError: no checkpoint exists, it is damaged, or it belongs to another model.
  """
  require(any((workdir / name).exists() for name in FOLDERS),
          f'{workdir} holds no checkpoints: train with --workdir={workdir} first')
  kept = complete(workdir)
  names = ', '.join(f'{folder.parent.name}/{folder.name}' for folder in kept)
  require(bool(kept), f'{workdir} holds no complete checkpoint yet')
  candidates = [folder for folder in kept if step is None or folder.name == str(step)]
  require(bool(candidates), f'{workdir} has no checkpoint of step {step}, but {names}')

  damage = []
  set_aside = absolute(workdir) / 'damaged'
  # If training set damaged best parameters aside, the newest parameters are not the best.
  if not integrity.steps(workdir / 'best'):
    damage += [f'{workdir}/damaged/{x.name} is damaged'
               for x in storage.matching(set_aside, 'best-*')][:1]
  for folder in candidates:
    name = f'{workdir}/{folder.parent.name}/{folder.name}'
    try:
      params = integrity.read(folder, {'params': on_one_device(abstract)})['params']
    except integrity.Damaged as e:
      # A run that is still training may just have deleted this checkpoint.
      if complete(workdir) != kept:
        return restore_params(workdir, abstract, step, allow_older)
      damage.append(f'{name} is damaged: {e}')
      continue
    # Nobody gets an older model without asking for it.
    require(not damage or step is not None or allow_older,
            f'{"".join(damage[:1])}; the next sound one is {name}: run main again, which '
            f'repeats the lost steps, or take this one with --step={folder.name} or '
            '--allow_older of convert and predict')
    for line in damage if step is None else ():
      print(f'bert_jax: {line}; {name} is used', file=sys.stderr, flush=True)
    return params, int(folder.name)
  of_step = '' if step is None else f' of step {step}'
  raise UserError(f'{workdir} holds no sound checkpoint{of_step}: {"; ".join(damage)}')
