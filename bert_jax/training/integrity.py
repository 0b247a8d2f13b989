"""Checkpoints on disk: read, and proven to be what was saved.

orbax hands back wrong parameters after a flipped bit, without a word. So a checkpoint has a third
item beside its `params` and `optimizer`: the shape, type and fingerprint of every array, sealed by
a checksum. What is read on any mesh is compared with it.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.errors import UserError
from bert_jax.runtime import processes
from bert_jax.runtime import sealed
from bert_jax.runtime import storage
from bert_jax.training import fingerprint

ITEM = 'fingerprints'
# What a storage says that is busy, or that does not let us in: nothing is known of the data then.
_PASSING = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED', 'PERMISSION_DENIED',
            'UNAUTHENTICATED', 'CANCELLED')


class Damaged(Exception):
  """A checkpoint is not what was saved; the message says where."""


def arrays(items: Mapping[str, Any]) -> dict[str, dict[str, list]]:
  """Type, shape and fingerprint of each array of `items` ({name: tree}); waits for them."""
  found = fingerprint.of(items)
  return {item: {name: [str(x.dtype), list(x.shape), found[f'{item}/{name}']]
                 for name, x in fingerprint.named_leaves(tree).items()}
          for item, tree in items.items()}


def describe(step: int, items: Mapping[str, Any], **facts) -> dict[str, Any]:
  """What is saved beside `items`, as JSON."""
  return sealed.seal({'step': step, 'arrays': arrays(items), **facts})


def steps(directory: epath.Path) -> list[int]:
  """The complete checkpoints of a folder, the oldest first; asks no other process."""
  if not directory.exists():
    return []
  # When all of it is written, orbax renames a folder to the bare number of its step; in a bucket,
  # where nothing can be renamed, it adds a file.
  return sorted(int(path.name) for path in directory.iterdir()
                if path.name.isdigit() and (not storage.is_remote(str(path))
                                            or (path / 'commit_success.txt').exists()))


def description(folder: epath.Path) -> dict[str, Any]:
  """What was saved beside the items of a step.

  Raises:
    Damaged: it is not there, or not as it was written.
  """
  path = folder / ITEM / 'metadata'
  try:
    found = sealed.read(path)
  except UserError as e:
    raise Damaged(str(e)) from e
  if found['step'] != int(folder.name):
    raise Damaged(f'it is the checkpoint of step {found["step"]}')
  return found


def _check_fit(folder: epath.Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]):
  for item, tree in wanted.items():
    asked = {name: [str(x.dtype), list(x.shape)]
             for name, x in fingerprint.named_leaves(tree).items()}
    there = {name: x[:2] for name, x in saved['arrays'].get(item, {}).items()}
    for name in sorted(asked.keys() | there.keys()):
      if asked.get(name) != there.get(name):
        raise UserError(f'{folder} does not fit this config: {item}/{name} is '
                        f'{there.get(name, "not there")}, asked for '
                        f'{asked.get(name, "nothing")}')


def _restore(folder: epath.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
  # The handler alone: a checkpointer waits for the others at the end, who may have failed.
  handler = ocp.StandardCheckpointHandler()
  try:
    return {item: handler.restore(folder / item, args=ocp.args.StandardRestore(tree))
            for item, tree in wanted.items()}
  except MemoryError:
    raise
  except Exception as e:  # each part of orbax and tensorstore has errors of its own
    if isinstance(e, PermissionError) or any(name in str(e) for name in _PASSING):
      raise
    raise Damaged(f'it cannot be read: {" ".join(str(e).split())[:300]}') from e
  finally:
    handler.close()


def read(folder: epath.Path, wanted: Mapping[str, Any],
         saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Reads items of a checkpoint and compares their fingerprints; all processes together.

  Args:
    folder: of a step.
    wanted: the trees of ShapeDtypeStructs with shardings, by item.
    saved: what `describe` said; None = it is beside the items.

  Raises:
    Damaged: it is not what was saved.
    UserError: it is of another model.
  """
  found, damage = {}, None
  try:
    saved = saved or description(folder)
    _check_fit(folder, saved, wanted)
    found = _restore(folder, wanted)
  except Damaged as e:
    damage = e
  if processes.anywhere(damage is not None):
    raise damage or Damaged('another process cannot read it')
  for item, tree in found.items():
    _compare(item, fingerprint.of(tree), saved['arrays'][item])
  return found


def _compare(item: str, found: Mapping[str, str], saved: Mapping[str, list]):
  for name in sorted(found.keys() | saved.keys()):
    if name not in found or name not in saved or found[name] != saved[name][2]:
      raise Damaged(f'{item}/{name} has not the fingerprint that it was saved with')


def check(folder: epath.Path) -> dict[str, Any]:
  """Reads the whole of a checkpoint, of whatever model; its description.

  Raises:
    Damaged: it is not what was saved.
  """
  saved, handler = description(folder), ocp.PyTreeCheckpointHandler()
  for item, arrays in saved['arrays'].items():
    try:
      tree = handler.metadata(folder / item).tree
      found = handler.restore(folder / item, args=ocp.args.PyTreeRestore(
          restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)))
      found = fingerprint.of(found)
    except Exception as e:  # as above
      raise Damaged(f'{item} cannot be read: {" ".join(str(e).split())[:300]}') from e
    _compare(item, found, arrays)
  return saved


def set_aside(workdir: epath.Path, folder: epath.Path) -> epath.Path:
  """Moves a damaged checkpoint into `damaged/` of its workdir, where nothing is written over."""
  target = workdir / 'damaged' / f'{folder.parent.name}-{folder.name}'
  for number in range(2, 1000):
    if not target.exists():
      break
    target = target.parent / f'{folder.parent.name}-{folder.name}-{number}'
  if not jax.process_index():
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)
  processes.anywhere(False)  # the others go on when it is gone
  return target
