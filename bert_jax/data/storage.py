"""Buckets and local disks: memory-mapping needs files on this machine; and JSON files on both."""

import hashlib
import json
import os
import pathlib

from etils import epath
from tqdm import auto as tqdm

from bert_jax.errors import UserError


def read_json(path: epath.Path) -> dict:
  """The object in a JSON file.

  Raises:
    UserError: the file cannot be read, or holds no JSON object.
  """
  try:
    content = json.loads(path.read_bytes())
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  if not isinstance(content, dict):
    raise UserError(f'{path} holds no JSON object')
  return content


def is_remote(path: str) -> bool:
  """Whether a path names a bucket, gs://... say."""
  return '://' in path


def local_folder(remote: str) -> epath.Path:
  """Where the files of a remote folder are on this machine."""
  cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
  name = hashlib.sha256(remote.rstrip('/').encode()).hexdigest()[:16]
  return epath.Path(cache / 'bert_jax' / name)


def _copy(source: epath.Path, target: epath.Path):
  """Copies a file; under its name there is either all of it or nothing."""
  target.parent.mkdir(parents=True, exist_ok=True)
  partial = target.parent / f'{target.name}.partial'
  source.copy(partial, overwrite=True)
  partial.replace(target)


def _files(folder: epath.Path) -> list[epath.Path]:
  """All files below a folder, the manifest last. (A bucket has no recursive glob.)"""
  found = []
  for path in sorted(folder.iterdir()):
    found += _files(path) if path.is_dir() else [path]
  return sorted(found, key=lambda path: path.name == 'manifest.json')


def upload(local: epath.Path, remote: epath.Path):
  """Copies a local folder into a bucket, its manifest last."""
  for path in tqdm.tqdm(_files(local), 'uploading', unit=' files', leave=False, disable=None):
    _copy(path, remote / path.relative_to(local).as_posix())


def download(remote: epath.Path) -> epath.Path:
  """Copies a remote folder to this machine, unless it is there already, and says where."""
  local = local_folder(os.fspath(remote))
  if (local / 'manifest.json').exists() and ((local / 'manifest.json').read_bytes()
                                             == (remote / 'manifest.json').read_bytes()):
    return local
  for path in tqdm.tqdm(_files(remote), 'copying', unit=' files', leave=False, disable=None):
    _copy(path, local / path.relative_to(remote).as_posix())
  return local
