"""Verifies checkpoints on disk: reading one proves that it has not changed.

After a flipped bit, orbax returns wrong parameters and no error. So a checkpoint has a
third item in addition to `params` and `optimizer`: the shape, dtype and fingerprint of
every array, sealed by a checksum. Reading compares the arrays with it, on any mesh.
"""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from bert_jax.errors import UserError, require
from bert_jax.runtime import ending, processes, sealed, storage
from bert_jax.training import fingerprint

FINGERPRINTS = 'fingerprints'
# Errors of a storage that is busy or refuses access. They say nothing about the data.
_ACCESS_ERRORS = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED',
                  'PERMISSION_DENIED', 'UNAUTHENTICATED', 'CANCELLED')


class Damaged(Exception):
  """A checkpoint has changed since it was saved; the message says where."""


def _types(tree: Any) -> dict[str, list]:
  """The dtype and shape of each array of a tree."""
  return {name: [str(x.dtype), list(x.shape)]
          for name, x in fingerprint.named_leaves(tree).items()}


def arrays(items: Mapping[str, Any]) -> dict[str, dict[str, list]]:
  """Dtype, shape and fingerprint of each array of {name: tree}; waits for the arrays."""
  result = {}
  for item, tree in items.items():
    fingerprints = fingerprint.of(tree)
    result[item] = {name: [*types, fingerprints[name]]
                    for name, types in _types(tree).items()}
  return result


def steps(directory: epath.Path) -> list[int]:
  """The steps of the complete checkpoints in a folder, oldest first; not a collective."""
  if not directory.exists():
    return []
  # Orbax renames a complete folder to the bare number of its step. In a bucket, where
  # nothing can be renamed, it adds a file.
  return sorted(int(path.name) for path in directory.iterdir()
                if path.name.isdigit() and (not storage.is_remote(str(path))
                                            or (path / 'commit_success.txt').exists()))


def description(folder: epath.Path) -> dict[str, Any]:
  """The description of the items of a step; raises Damaged if it has changed."""
  try:
    content = sealed.read(folder / FINGERPRINTS / 'metadata')
  except UserError as e:
    # Failed access says nothing about the data.
    if isinstance(e.__cause__, PermissionError) or ending.storage_trouble(e.__cause__):
      raise e.__cause__ from e
    raise Damaged(str(e)) from e
  if content['step'] != int(folder.name):
    raise Damaged(f'it is the checkpoint of step {content["step"]}')
  return content


def check_fit(folder: epath.Path, saved: Mapping[str, Any], abstract: Mapping[str, Any]):
  """Raises UserError if a dtype or a shape in `saved` differs from `abstract`."""
  for item, tree in abstract.items():
    ours = _types(tree)
    theirs = {name: array[:2] for name, array in saved['arrays'].get(item, {}).items()}
    for name in sorted(ours.keys() | theirs.keys()):
      require(ours.get(name) == theirs.get(name),
              f'{folder} does not fit this config: {item}/{name} is '
              f'{theirs.get(name, "missing")} in the checkpoint, and '
              f'{ours.get(name, "missing")} in the config')


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
  """Turns an error while reading into Damaged, unless it says nothing about the data."""
  try:
    yield
  except (MemoryError, PermissionError):
    raise
  except Exception as e:  # orbax and tensorstore have many kinds of errors
    if any(name in str(e) for name in _ACCESS_ERRORS):
      raise
    raise Damaged(f'{what} cannot be read: {" ".join(str(e).split())[:300]}') from e


def _restore(folder: epath.Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
  # Only the handler: a checkpointer ends with a barrier, which a failed process skips.
  with contextlib.closing(ocp.StandardCheckpointHandler()) as handler, _reading('it'):
    return {item: handler.restore(folder / item, args=ocp.args.StandardRestore(tree))
            for item, tree in abstract.items()}


def read(folder: epath.Path, abstract: Mapping[str, Any],
         saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Reads items of a checkpoint and compares their fingerprints; a collective.

  Args:
    folder: the checkpoint of a step.
    abstract: trees of ShapeDtypeStructs with shardings, by item.
    saved: the description of the items; None = read it too.

  Returns:
    {item: tree of arrays}, sharded like `abstract`.

  Raises:
    Damaged: the checkpoint has changed since it was saved.
    UserError: it belongs to another model.
  """
  items, damage = {}, None
  try:
    saved = saved or description(folder)
    check_fit(folder, saved, abstract)
    items = _restore(folder, abstract)
  except Damaged as e:
    damage = e
  # Fingerprints are collectives: either all processes compute them or none does.
  if processes.anywhere(damage is not None):
    raise damage or Damaged('another process cannot read it')
  for item, tree in items.items():
    _compare(item, fingerprint.of(tree), saved['arrays'][item])
  return items


def _compare(item: str, fingerprints: Mapping[str, str], saved: Mapping[str, list]):
  for name in sorted(fingerprints.keys() | saved.keys()):
    if name not in saved or fingerprints.get(name) != saved[name][2]:
      raise Damaged(f'{item}/{name} does not have the fingerprint that it was saved with')


def check(folder: epath.Path) -> dict[str, Any]:
  """Reads a whole checkpoint of any model; returns its description or raises Damaged."""
  saved = description(folder)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    for item, arrays in saved['arrays'].items():
      with _reading(item):
        tree = handler.metadata(folder / item).tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        tree = handler.restore(
            folder / item, args=ocp.args.PyTreeRestore(restore_args=args))
      _compare(item, fingerprint.of(tree), arrays)
  return saved
