"""Checkpoints through orbax: sharded, asynchronous, atomic, the newest few kept, proven sound."""

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

from bert_jax.errors import Failed, UserError
from bert_jax.runtime import console, ending, lock, processes, sealed, storage
from bert_jax.training import integrity
from bert_jax.training.state import TrainState

FOLDERS = ('best', 'checkpoints')  # of a workdir; whoever loads a model looks in this order
BASE = 'base'  # the frozen model of a LoRA run, a folder of a workdir
APART = (*FOLDERS, BASE, 'damaged', lock.NAME)  # never copied between a bucket and this machine
_SPARE_BYTES = 100_000  # for the metadata of a checkpoint and the run's other files
# The replicas of an array share the work of saving it. Each share is a program to compile, so one
# replica saves an array alone if the shares would be smaller than this.
_SMALLEST_SHARE = 1 << 20  # bytes


def absolute(path: epath.Path) -> epath.Path:
  """The absolute path: orbax writes to no other, and says so only in its background thread."""
  return path if storage.is_remote(str(path)) else epath.Path(os.path.abspath(path))


class _Manager(ocp.CheckpointManager):
  """Orbax's manager of checkpoints with these items, which does not decide itself when to stop.

  It would ask JAX about the number of the step. `preemption.Notice` asks about other numbers, so
  JAX would agree on a place that no process reaches.
  """

  def __init__(self, folder: epath.Path, items: Sequence[str], **options: Any):
    arrays = ocp.type_handlers.create_type_handler_registry((
        jax.Array,
        ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SMALLEST_SHARE)))
    handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=arrays) for name in items}
    handlers[integrity.ITEM] = ocp.JsonCheckpointHandler()
    # A kill while a checkpoint is written leaves a folder that orbax would warn of.
    super().__init__(folder, item_handlers=handlers, options=ocp.CheckpointManagerOptions(
        create=True, cleanup_tmp_directories=True, **options))

  def reached_preemption(self, step: int) -> bool:
    del step
    return False


class Checkpoints:
  """The `checkpoints/` and `best/` folders of a workdir: one folder a step, `params` apart.

  Args of the constructor:
    keep: number of the newest checkpoints that stay.
    best: the score that decides which parameters stay in `best/`; '' = none.
    best_is_lowest: True if the best score is the lowest; the task says so.
    every: checkpoints of steps that it divides stay too; 0 = none.
  """

  def __init__(self, workdir: epath.Path, keep: int, best: str = '', *,
               best_is_lowest: bool = False, every: int = 0):
    self._workdir = absolute(workdir)
    self._score, self._best_is_lowest = best, best_is_lowest
    self._manager = _Manager(self._workdir / 'checkpoints', ('params', 'optimizer'),
                             max_to_keep=keep, keep_period=every or None)
    # Each of the best is better than the one before it: the newest is the best.
    self._best = best and _Manager(self._workdir / 'best', ('params',), max_to_keep=1)

  def latest(self) -> int | None:
    """The newest complete step, None if there is none."""
    return self._manager.latest_step()

  def save(self, state: TrainState, step: int):
    """Starts to save; returns once the state is copied to host memory.

    Raises:
      OSError: ENOSPC, before anything is written, if the local disk has no room for it.
      Failed: it cannot be written, or the one before could not.
    """
    if step == self.latest():
      return
    with _explained(self._workdir):
      self._check_folder(state)
      _save(self._manager, step, _items(state))

  def _check_folder(self, state: TrainState):
    """Makes the folder if it was deleted under the run; raises ENOSPC if it has no room."""
    directory = str(self._manager.directory)
    if storage.is_remote(directory):
      return
    if not os.path.exists(directory):
      os.makedirs(directory, exist_ok=True)
      self._manager.reload()
      console.print_summary([
          ('deleted', f'{directory} was deleted under the run: it begins again')])
    # A writer that runs out of space would leave pages of tracebacks from threads.
    needed = sum(shard.data.nbytes for x in jax.tree.leaves(_items(state))
                 for shard in x.addressable_shards if shard.replica_id == 0)
    free = shutil.disk_usage(directory).free
    if free < 1.2 * needed + _SPARE_BYTES:
      raise OSError(errno.ENOSPC, f'a checkpoint takes {needed / 1e6:,.1f} MB, '
                    f'{free / 1e6:,.1f} MB are free', directory)

  def restore(self, abstract: TrainState) -> tuple[TrainState, int]:
    """The state of the newest sound checkpoint, with the shardings of `abstract`, and its step.

    Damaged ones, the best one too, are named and moved into `damaged/` of the workdir. Raises
    UserError if the checkpoint is of another model, or none is sound.
    """
    for step in reversed(integrity.steps(self._manager.directory)):
      items = self._read(self._manager, step, integrity.read, _items(abstract))
      if items is None:
        continue
      if self._best and (best_step := self._best.latest_step()) is not None:
        self._read(self._best, best_step, integrity.read, {'params': abstract.params})
      optimizer = items['optimizer']
      return TrainState(optimizer['step'], items['params'], optimizer['moments'], {}), step
    raise UserError(f'no checkpoint of {self._workdir} is sound, all are in '
                    f'{self._workdir}/damaged: start over with another --workdir')

  def _read(self, manager: _Manager, step: int, read: Callable[..., dict], *args) -> dict | None:
    """The result of `read(folder, *args)`; None if the checkpoint is damaged, and set aside now."""
    folder = manager.directory / str(step)
    try:
      return read(folder, *args)
    except integrity.Damaged as e:
      damage = e
    target = self._workdir / 'damaged' / f'{folder.parent.name}-{step}'
    for number in itertools.count(2):  # nothing is written over
      if not target.exists():
        break
      target = target.parent / f'{folder.parent.name}-{step}-{number}'
    if not jax.process_index():
      target.parent.mkdir(parents=True, exist_ok=True)
      folder.rename(target)
    processes.anywhere(False)  # the other processes wait here until it is moved
    manager.reload()
    console.print_summary([('damaged', f'{folder}: {damage}; it is in {target} now')])
    return None

  def check(self):
    """Raises the error of a save in the background, if it failed: see `save`."""
    with _explained(self._workdir):
      self._manager.check_for_errors()

  def wait(self):
    """Waits until the last save is complete; raises its error: see `save`."""
    with _explained(self._workdir):
      self._manager.wait_until_finished()

  def offer(self, params: Any, step: int, scores: Mapping[str, float], judged_on: str = ''):
    """Keeps the parameters of `step` in `best/` if they score better than those in it.

    `judged_on` names the evaluated data: scores on other data are not compared, and the newer ones
    win, with a line. Returns once the parameters are on disk: a run that resumes from the next
    checkpoint does not evaluate this step again. Raises Failed if they cannot be written.
    """
    if not self._best or not math.isfinite(scores[self._score]):
      return
    judge = {'metric': self._score, 'judged_on': judged_on}
    with _explained(self._workdir):
      best_step = self._best.latest_step()
      best = (self._read(self._best, best_step, integrity.description)
              if best_step is not None else None)
      if best:
        sign = -1 if self._best_is_lowest else 1
        is_comparable = all(best.get(name, value) == value for name, value in judge.items())
        if is_comparable and sign * scores[self._score] <= sign * best['score']:
          return
        if not is_comparable:
          console.print_summary([('best', f'step {step} ({_judged(judge)}) replaces step '
                                  f'{best_step} ({_judged(best)}): these are not compared')])
        if best_step >= step:  # the run was set back, and now scores otherwise
          processes.meet(f'better than the best/{best_step}, at {step}')  # all have read it
          self._best.delete(best_step)
      _save(self._best, step, {'params': params}, score=scores[self._score],
            best_is_lowest=self._best_is_lowest, **judge)
      self._best.wait_until_finished()

  def settle(self, error: type[BaseException] | None, *_: Any):
    """Waits for a save that an error has left under way; several processes die at once instead.

    The next run of this process, in a notebook say, would take it for one that a kill cut short.
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
  """Turns the errors of orbax and tensorstore, if they cannot write, into one line."""
  try:
    yield
  except Exception as e:  # orbax and tensorstore have many kinds of errors
    # `processes` explains errors of an exchange with other processes.
    if isinstance(e, (UserError, Failed, jax.errors.JaxRuntimeError)) or ending.storage_trouble(e):
      raise
    raise Failed(f'a checkpoint cannot be written to {workdir}: {" ".join(str(e).split())[:300]}; '
                 'what was complete is sound: run the same command again') from e


def _items(state: TrainState) -> dict[str, Any]:
  """The saved parts of a state: `params` apart, because who loads a model reads no more."""
  return {'params': state.params, 'optimizer': {'step': state.step, 'moments': state.opt_state}}


def _save(manager: _Manager, step: int, items: Mapping[str, Any], **more: Any):
  saved = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
  description = sealed.seal({'step': step, 'arrays': integrity.arrays(items), **more})
  saved[integrity.ITEM] = ocp.args.JsonSave(description)
  manager.save(step, args=ocp.args.Composite(**saved), force=True)


def on_one_device(abstract: Any) -> Any:
  """ShapeDtypeStructs on this process's first device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)


def _complete(workdir: epath.Path) -> list[epath.Path]:
  """The checkpoints of a workdir, sound or not, in the order in which they are used."""
  return [absolute(workdir) / name / str(step) for name in FOLDERS
          for step in reversed(integrity.steps(absolute(workdir) / name))]


def restore_params(workdir: epath.Path, abstract: Any, step: int | None = None,
                   allow_older: bool = False) -> tuple[Any, int]:
  """The parameters of a workdir's best or else newest checkpoint on one device, and its step.

  Args:
    workdir: folder of a run.
    abstract: ShapeDtypeStructs of the parameters.
    step: reads the checkpoint of this step instead.
    allow_older: if the checkpoint is damaged, reads the next sound one, and says so.

  Raises:
    UserError: there is none, it is damaged, or it is of another model.
  """
  if not any((workdir / name).exists() for name in FOLDERS):
    raise UserError(f'{workdir} holds no checkpoints: train with --workdir={workdir} first')
  complete = _complete(workdir)
  candidates = [folder for folder in complete if step is None or folder.name == str(step)]
  if not candidates:
    names = ', '.join(f'{folder.parent.name}/{folder.name}' for folder in complete)
    raise UserError(f'{workdir} has no checkpoint of step {step}, but {names}' if names else
                    f'{workdir} holds no complete checkpoint yet')

  damage = []
  set_aside = absolute(workdir) / 'damaged'
  if set_aside.exists() and not integrity.steps(workdir / 'best'):
    damage += [f'{workdir}/damaged/{x.name} is damaged' for x in set_aside.glob('best-*')][:1]
  for folder in candidates:
    name = f'{workdir}/{folder.parent.name}/{folder.name}'
    try:
      params = integrity.read(folder, {'params': on_one_device(abstract)})['params']
    except integrity.Damaged as e:
      if _complete(workdir) != complete:  # the run continues, and has deleted this one
        return restore_params(workdir, abstract, step, allow_older)
      damage.append(f'{name} is damaged: {e}')
      continue
    if damage and step is None and not allow_older:
      raise UserError(f'{damage[0]}; the next sound one is {name}: run main again, which makes '
                      f'lost steps anew, or take this one with --step={folder.name} or '
                      '--allow_older of convert and predict')
    for line in damage if step is None else ():
      print(f'bert_jax: {line}; {name} is used', file=sys.stderr, flush=True)
    return params, int(folder.name)
  raise UserError(f'{workdir} holds no sound checkpoint{"" if step is None else f" of step {step}"}'
                  f': all {len(candidates)} are damaged')
