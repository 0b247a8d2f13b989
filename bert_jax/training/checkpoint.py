"""Checkpoints through orbax: sharded, asynchronous, atomic, the newest few kept."""

from collections.abc import Mapping
import errno
import math
import os
import shutil
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from bert_jax.data import storage
from bert_jax.errors import UserError
from bert_jax.training.state import TrainState

FOLDERS = ('best', 'checkpoints')  # of a workdir; whoever loads a model looks in this order
_SPARE_BYTES = 100_000  # for the metadata of a checkpoint and the run's other files


def absolute(path: epath.Path) -> epath.Path:
  """The absolute path: orbax writes to no other, and says so only in its background thread."""
  return path if storage.is_remote(str(path)) else epath.Path(os.path.abspath(path))


class Checkpoints:
  """The `checkpoints/` folder of a workdir: one folder a step, `params` apart from the rest.

  Args of the constructor:
    workdir: of the run.
    keep: so many of the newest.
    best: the score of an evaluation whose best parameters are kept in `best/`; '' = none.
  """

  def __init__(self, workdir: epath.Path, keep: int, best: str = ''):
    self._best = _Best(workdir, best) if best else None
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    self._manager = ocp.CheckpointManager(
        absolute(workdir) / 'checkpoints', options=options, item_names=('params', 'optimizer'))

  def latest(self) -> int | None:
    """The newest complete step, None if there is none."""
    return self._manager.latest_step()

  def save(self, state: TrainState, step: int):
    """Starts to save; returns once the state is copied to host memory.

    Raises:
      OSError: ENOSPC, before anything is written, if the local disk has no room for it.
    """
    if step == self.latest():
      return
    self._check_space(state)
    self._manager.save(step, args=ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        optimizer=ocp.args.StandardSave({'step': state.step, 'moments': state.opt_state})))

  def _check_space(self, state: TrainState):
    # Asked first, because a writer that runs out of space leaves pages of tracebacks from threads.
    directory = str(self._manager.directory)
    if storage.is_remote(directory):
      return
    needed = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards
                 if shard.replica_id == 0)
    free = shutil.disk_usage(directory).free
    if free < 1.2 * needed + _SPARE_BYTES:
      raise OSError(errno.ENOSPC, f'a checkpoint takes {needed / 1e6:,.1f} MB, '
                    f'{free / 1e6:,.1f} MB are free', directory)

  def restore(self, step: int, abstract: TrainState) -> TrainState:
    """The state of `step`, on the shardings of `abstract` (ShapeDtypeStructs).

    Raises:
      UserError: the checkpoint is of another model.
    """
    try:
      found = self._manager.restore(step, args=ocp.args.Composite(
          params=ocp.args.StandardRestore(abstract.params),
          optimizer=ocp.args.StandardRestore(
              {'step': abstract.step, 'moments': abstract.opt_state})))
    except (ValueError, KeyError) as e:
      raise UserError(f'{self._manager.directory}/{step} does not fit this config: {e}') from e
    return TrainState(found['optimizer']['step'], found['params'], found['optimizer']['moments'])

  def check(self):
    """Raises what went wrong with a save in the background, if anything has."""
    self._manager.check_for_errors()

  def wait(self):
    """Waits until the last save is complete; raises what went wrong with it."""
    self._manager.wait_until_finished()

  def offer(self, params: Any, step: int, scores: Mapping[str, float]):
    """Keeps the parameters of `step` in `best/` if they score better than those kept there.

    Returns when they are there: a checkpoint of the run that comes after may count on it, because
    nobody evaluates this step again.

    Raises:
      UserError: the evaluation has no such score.
    """
    if self._best:
      self._best.offer(params, step, scores)

  def close(self):
    """Waits, then lets go of the folders."""
    self.wait()
    self._manager.close()
    if self._best:
      self._best.close()


class _Best:
  """The `best/` folder of a workdir: the parameters whose evaluation had the best score so far."""

  def __init__(self, workdir: epath.Path, metric: str):
    """`metric` is the score that decides: the lowest of a loss or error, else the highest."""
    self.metric = metric
    self._sign = -1 if metric.endswith(('loss', 'error')) else 1
    # Each is better than the one before, so that the newest is the best; orbax keeps scores only
    # where it is told how to compare them.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, create=True, best_fn=lambda metrics: self._sign * metrics['score'])
    self._manager = ocp.CheckpointManager(absolute(workdir) / 'best', options=options,
                                          item_names=('params',))

  def offer(self, params: Any, step: int, scores: Mapping[str, float]):
    """See Checkpoints."""
    if self.metric not in scores:
      raise UserError(f'keep_best={self.metric!r} is no score of the evaluation: it has '
                      f'{", ".join(scores)}')
    score, kept = scores[self.metric], self._manager.latest_step()
    if not math.isfinite(score):
      return
    if kept is not None and self._sign * score <= self._sign * self._manager.metrics(kept)['score']:
      return
    self._manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params)),
                       metrics={'score': score}, force=True)
    self._manager.wait_until_finished()

  def close(self):
    """See Checkpoints."""
    self._manager.close()


def has_checkpoint(workdir: epath.Path) -> bool:
  """Whether a workdir has a complete checkpoint; asks the folder alone, no other process."""
  directory = workdir / 'checkpoints'
  # When all of it is written, orbax renames a folder to the bare number of its step; in a bucket,
  # where nothing can be renamed, it adds a file.
  return directory.exists() and any(
      path.name.isdigit() and (not storage.is_remote(str(path))
                               or (path / 'commit_success.txt').exists())
      for path in directory.iterdir())


def on_one_device(abstract: Any) -> Any:
  """ShapeDtypeStructs, to be restored to this process's first device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)


def restore_params(workdir: epath.Path, abstract: Any) -> tuple[Any, int]:
  """The parameters of a workdir's best or else newest checkpoint on one device, and its step.

  Args:
    workdir: of the run that made it.
    abstract: ShapeDtypeStructs of the parameters.

  Raises:
    UserError: there is none, or it is of another model.
  """
  folders = [absolute(workdir) / name for name in FOLDERS]
  folders = [folder for folder in folders if folder.exists()]
  if not folders:
    raise UserError(f'{workdir} holds no checkpoints: train with --workdir={workdir} first')
  for directory in folders:
    with ocp.CheckpointManager(directory, item_names=('params', 'optimizer')) as manager:
      step = manager.latest_step()
      if step is None:
        continue
      try:
        found = manager.restore(step, args=ocp.args.Composite(
            params=ocp.args.StandardRestore(on_one_device(abstract))))
      except (ValueError, KeyError) as e:
        raise UserError(f'{directory}/{step} does not fit {workdir}/run.json: {e}') from e
    return found['params'], step
  raise UserError(f'{directory} holds no complete checkpoint yet')
