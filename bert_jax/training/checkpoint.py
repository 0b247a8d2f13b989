"""Checkpoints through orbax: sharded, asynchronous, atomic, the newest few kept, proven sound."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import errno
import math
import os
import shutil
import sys
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from bert_jax.errors import Failed
from bert_jax.errors import UserError
from bert_jax.errors import storage_trouble
from bert_jax.runtime import console
from bert_jax.runtime import lock
from bert_jax.runtime import processes
from bert_jax.runtime import storage
from bert_jax.training import integrity
from bert_jax.training.state import TrainState

FOLDERS = ('best', 'checkpoints')  # of a workdir; whoever loads a model looks in this order
APART = (*FOLDERS, 'damaged', lock.NAME)  # never copied between a bucket and this machine
_SPARE_BYTES = 100_000  # for the metadata of a checkpoint and the run's other files


def absolute(path: epath.Path) -> epath.Path:
  """The absolute path: orbax writes to no other, and says so only in its background thread."""
  return path if storage.is_remote(str(path)) else epath.Path(os.path.abspath(path))


class _Manager(ocp.CheckpointManager):
  """Orbax's, which does not ask on its own whether to stop.

  It would ask with the number of the step, `preemption.Notice` with its own: JAX would agree on a
  place to stop at that nobody reaches.
  """

  def reached_preemption(self, step: int) -> bool:
    del step
    return False


class Checkpoints:
  """The `checkpoints/` folder of a workdir: one folder a step, `params` apart from the rest.

  Args of the constructor:
    workdir: of the run.
    keep: so many of the newest.
    best: the score of an evaluation whose best parameters are kept in `best/`; '' = none.
    every: checkpoints of steps that it divides stay too; 0 = none.
    judged_on: names what is evaluated; scores of something else are not compared with.
  """

  def __init__(self, workdir: epath.Path, keep: int, best: str = '', every: int = 0,
               judged_on: str = ''):
    self._workdir = absolute(workdir)
    self._best = _Best(self._workdir, best, judged_on) if best else None
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=every or None, create=True)
    self._manager = _Manager(self._workdir / 'checkpoints', options=options,
                             item_names=('params', 'optimizer', integrity.ITEM))

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
    with _told(self._workdir):
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
    # Asked first, because a writer that runs out of space leaves pages of tracebacks from threads.
    needed = sum(shard.data.nbytes for x in jax.tree.leaves(_items(state))
                 for shard in x.addressable_shards if shard.replica_id == 0)
    free = shutil.disk_usage(directory).free
    if free < 1.2 * needed + _SPARE_BYTES:
      raise OSError(errno.ENOSPC, f'a checkpoint takes {needed / 1e6:,.1f} MB, '
                    f'{free / 1e6:,.1f} MB are free', directory)

  def restore(self, abstract: TrainState) -> tuple[TrainState, int]:
    """The state of the newest sound checkpoint, and its step.

    Damaged ones, the best one too, are named and moved into `damaged/` of the workdir.

    Args:
      abstract: ShapeDtypeStructs with shardings.

    Raises:
      UserError: the checkpoint is of another model, or none is sound.
    """
    directory, wanted = self._manager.directory, _items(abstract)
    for step in reversed(integrity.steps(directory)):
      try:
        found = integrity.read(directory / str(step), wanted)
      except integrity.Damaged as e:
        self._set_aside(self._manager, step, e)
        continue
      if self._best:
        try:
          self._best.check(abstract.params)
        except integrity.Damaged as e:
          self._set_aside(self._best.manager, self._best.manager.latest_step(), e)
      optimizer = found['optimizer']
      return TrainState(optimizer['step'], found['params'], optimizer['moments'], {}), step
    raise UserError(f'no checkpoint of {self._workdir} is sound, all are in '
                    f'{self._workdir}/damaged: start over with another --workdir')

  def _set_aside(self, manager: ocp.CheckpointManager, step: int, damage: integrity.Damaged):
    folder = manager.directory / str(step)
    target = integrity.set_aside(self._workdir, folder)
    manager.reload()
    console.print_summary([('damaged', f'{folder}: {damage}; it is in {target} now')])

  def check(self):
    """Raises what went wrong with a save in the background, if anything has: see `save`."""
    with _told(self._workdir):
      self._manager.check_for_errors()

  def wait(self):
    """Waits until the last save is complete; raises what went wrong with it: see `save`."""
    with _told(self._workdir):
      self._manager.wait_until_finished()

  def offer(self, params: Any, step: int, scores: Mapping[str, float]):
    """Keeps the parameters of `step` in `best/` if they score better than those kept there.

    Returns when they are there: a checkpoint of the run that comes after may count on it, because
    nobody evaluates this step again.

    Raises:
      Failed: they cannot be written.
    """
    if self._best:
      with _told(self._workdir):
        try:
          self._best.offer(params, step, scores)
        except integrity.Damaged as e:
          self._set_aside(self._best.manager, self._best.manager.latest_step(), e)
          self._best.offer(params, step, scores)

  def close(self):
    """Waits, then lets go of the folders."""
    self.wait()
    self._manager.close()
    if self._best:
      self._best.close()


@contextlib.contextmanager
def _told(workdir: epath.Path) -> Iterator[None]:
  """Makes one line of what orbax and tensorstore say when they cannot write."""
  try:
    yield
  except Exception as e:  # each part of orbax and tensorstore has errors of its own
    # What fails in an exchange with other processes is theirs to explain.
    if isinstance(e, (UserError, jax.errors.JaxRuntimeError)) or storage_trouble(e):
      raise
    raise Failed(f'a checkpoint cannot be written to {workdir}: {" ".join(str(e).split())[:300]}; '
                 'what was complete is sound: run the same command again') from e


def _items(state: TrainState) -> dict[str, Any]:
  """What is saved of a state: `params` apart, because who loads a model reads no more."""
  return {'params': state.params, 'optimizer': {'step': state.step, 'moments': state.opt_state}}


def _save(manager: ocp.CheckpointManager, step: int, items: Mapping[str, Any], **facts):
  saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
  described = ocp.args.JsonSave(integrity.describe(step, items, **facts))
  manager.save(step, args=ocp.args.Composite(**saved, **{integrity.ITEM: described}), force=True)


class _Best:
  """The `best/` folder of a workdir: the parameters whose evaluation had the best score so far."""

  def __init__(self, workdir: epath.Path, metric: str, judged_on: str):
    """`metric` is the score that decides: the lowest of a loss or error, else the highest."""
    self.metric = metric
    self._judge = {'metric': metric, 'judged_on': judged_on}
    self._sign = -1 if metric.endswith(('loss', 'error')) else 1
    # Each is better than the one before, so that the newest is the best.
    options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
    self.manager = _Manager(workdir / 'best', options=options,
                            item_names=('params', integrity.ITEM))

  def offer(self, params: Any, step: int, scores: Mapping[str, float]):
    """See Checkpoints."""
    score, kept = scores[self.metric], self.manager.latest_step()
    if not math.isfinite(score):
      return
    if kept is not None:
      known = integrity.description(self.manager.directory / str(kept))
      if (all(known.get(name, value) == value for name, value in self._judge.items())
          and self._sign * score <= self._sign * known['score']):
        return
      if kept >= step:  # by the run before, which went on from there; here it came out otherwise
        processes.meet(f'better than the best/{kept}, at {step}')  # all have read it
        self.manager.delete(kept)
    _save(self.manager, step, {'params': params}, score=score, **self._judge)
    self.manager.wait_until_finished()

  def check(self, abstract: Any):
    """Raises integrity.Damaged if what is kept is not what was saved."""
    kept = self.manager.latest_step()
    if kept is not None:
      integrity.read(self.manager.directory / str(kept), {'params': abstract})

  def close(self):
    """See Checkpoints."""
    self.manager.close()


def has_checkpoint(workdir: epath.Path) -> bool:
  """Whether a workdir has a complete checkpoint; asks the folder alone, no other process."""
  return bool(integrity.steps(workdir / 'checkpoints'))


def newest(workdir: epath.Path) -> str:
  """The end of a message about a run that was broken off: the checkpoint from which it goes on."""
  steps = integrity.steps(workdir / 'checkpoints')
  if not steps:
    return f': {workdir} holds no checkpoint yet, the same command starts again'
  return f': the newest checkpoint is that of step {max(steps)}, run the same command to go on'


def on_one_device(abstract: Any) -> Any:
  """ShapeDtypeStructs, to be restored to this process's first device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)


def _complete(workdir: epath.Path) -> list[epath.Path]:
  """The checkpoints of a workdir, sound or not, in the order in which they are used."""
  return [absolute(workdir) / name / str(step) for name in FOLDERS
          for step in reversed(integrity.steps(absolute(workdir) / name))]


def _name(workdir: epath.Path, folder: epath.Path) -> str:
  """A checkpoint as the user knows it."""
  return f'{workdir}/{folder.parent.name}/{folder.name}'


def _lost_best(workdir: epath.Path) -> list[epath.Path]:
  """The best checkpoint that a run set aside as damaged, where no other took its place."""
  folder = absolute(workdir) / 'damaged'
  return list(folder.glob('best-*'))[:1] if not integrity.steps(workdir / 'best') and (
      folder.exists()) else []


def restore_params(workdir: epath.Path, abstract: Any, step: int | None = None,
                   allow_older: bool = False) -> tuple[Any, int]:
  """The parameters of a workdir's best or else newest checkpoint on one device, and its step.

  Args:
    workdir: of the run that made it.
    abstract: ShapeDtypeStructs of the parameters.
    step: of the checkpoint that is wanted instead.
    allow_older: where it is damaged, take the next sound one, and say so.

  Raises:
    UserError: there is none, it is damaged, or it is of another model.
  """
  if not any((workdir / name).exists() for name in FOLDERS):
    raise UserError(f'{workdir} holds no checkpoints: train with --workdir={workdir} first')
  complete = _complete(workdir)
  wanted = [folder for folder in complete if step is None or folder.name == str(step)]
  if not wanted:
    names = ', '.join(f'{folder.parent.name}/{folder.name}' for folder in complete)
    raise UserError(f'{workdir} has no checkpoint of step {step}, but {names}' if names else
                    f'{workdir} holds no complete checkpoint yet')
  damage = [f'{_name(workdir, folder)} is damaged' for folder in _lost_best(workdir)]
  for folder in wanted:
    try:
      params = integrity.read(folder, {'params': on_one_device(abstract)})['params']
    except integrity.Damaged as e:
      if _complete(workdir) != complete:  # the run goes on, and has deleted this one
        return restore_params(workdir, abstract, step, allow_older)
      damage.append(f'{_name(workdir, folder)} is damaged: {e}')
      continue
    if damage and step is None and not allow_older:
      raise UserError(f'{damage[0]}; the next sound one is {_name(workdir, folder)}: '
                      'run main again, which makes lost steps anew, or take this one with '
                      f'--step={folder.name} or --allow_older of convert and predict')
    for line in damage if step is None else ():
      print(f'bert_jax: {line}; {_name(workdir, folder)} is used', file=sys.stderr, flush=True)
    return params, int(folder.name)
  raise UserError(f'{workdir} holds no sound checkpoint{"" if step is None else f" of step {step}"}'
                  f': all {len(wanted)} are damaged')
