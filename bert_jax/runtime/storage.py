"""Buckets and local disks: memory-mapping needs files on this machine; and JSON files on both.

Buckets are read and written through epath, so by gcsfs, or TensorFlow where that is installed.
"""

from collections.abc import Collection
import hashlib
import json
import os
import re
from typing import Any

from etils import epath
import filelock
from tqdm import auto as tqdm

from bert_jax.errors import UserError
from bert_jax.runtime import host

_SURROGATE_ESCAPE, _SURROGATE = re.compile(r'\\u[dD][89a-fA-F]'), re.compile('[\ud800-\udfff]')
_LARGEST_JSON = 256 << 20  # bytes of a description or a vocabulary


def parse_json(text: str | bytes) -> Any:
  """What JSON says; half of a surrogate pair, which is no character, becomes U+FFFD.

  Raises:
    ValueError: it is none, or so deep or with such numbers that Python gives up; says where.
  """
  try:
    found = json.loads(text)
    if _SURROGATE_ESCAPE.search(text if isinstance(text, str) else text.decode(errors='replace')):
      written = json.dumps(found, ensure_ascii=False)
      if _SURROGATE.search(written):
        return json.loads(_SURROGATE.sub('\ufffd', written))
    return found
  except json.JSONDecodeError as e:
    line = f'line {e.lineno}, ' if e.lineno > 1 else ''
    raise ValueError(f'{e.msg} at {line}column {e.colno}') from e
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e


def read_json(path: epath.Path) -> dict:
  """The object in a JSON file.

  Raises:
    UserError: the file cannot be read, is too large, or holds no JSON object.
  """
  try:
    size = path.stat().length
    if size > _LARGEST_JSON:
      raise UserError(f'{path} has {size >> 20} MiB: that is no description of a model')
    content = parse_json(path.read_bytes())
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  if not isinstance(content, dict):
    raise UserError(f'{path} holds no JSON object')
  return content


def is_remote(path: str) -> bool:
  """Whether a path names a bucket, gs://... say."""
  return '://' in path


def check(name: str, path: str):
  """Raises UserError if a path that was given as `name` is in a bucket that cannot be reached."""
  if not is_remote(path):
    return
  if not path.startswith('gs://'):
    raise UserError(f'{name}={path}: buckets are named gs://BUCKET/FOLDER')
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise UserError(f'{name}={path}: pip install gcsfs, which reads and writes gs://') from e
  except Exception as e:  # each library for buckets has errors of its own
    raise UserError(f'{name}={path} cannot be reached: {e}') from e


def local_folder(remote: str) -> epath.Path:
  """Where the files of a remote folder are on this machine."""
  name = hashlib.sha256(remote.rstrip('/').encode()).hexdigest()[:16]
  return epath.Path(host.cache_folder() / name)


def _copy(source: epath.Path, target: epath.Path):
  """Copies a file; under its name there is either all of it or nothing."""
  target.parent.mkdir(parents=True, exist_ok=True)
  if is_remote(os.fspath(target)):  # a bucket shows an object when all of it is there
    source.copy(target, overwrite=True)
    return
  partial = target.parent / f'{target.name}.partial'
  source.copy(partial, overwrite=True)
  partial.replace(target)


def _state(path: epath.Path) -> tuple[int, int]:
  """Size and time of change, by which a changed file is known."""
  found = os.stat(path)
  return found.st_size, found.st_mtime_ns


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
  local.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(f'{local}.lock'):  # the processes of one machine share the copy
    manifest = local / 'manifest.json'
    if not manifest.exists() or manifest.read_bytes() != (remote / manifest.name).read_bytes():
      for path in tqdm.tqdm(_files(remote), 'copying', unit=' files', leave=False, disable=None):
        _copy(path, local / path.relative_to(remote).as_posix())
  return local


class Folder:
  """A folder that may be in a bucket: what grows is kept on this machine and uploaded whole.

  Attributes:
    path: the folder.
    local: the files on this machine; `path` itself if that is local.
  """

  def __init__(self, path: epath.Path, apart: Collection[str] = (), process: int = 0):
    """Makes nothing yet.

    Args:
      path: the folder.
      apart: names in it that are written straight to the bucket and not kept here.
      process: which one this is; the first alone uploads.
    """
    self.path, self.local = path, path
    self._apart, self._process = frozenset(apart), process
    self._known: dict[str, tuple[int, int]] = {}  # name: size and time of what the bucket has
    if is_remote(os.fspath(path)):
      self.local = local_folder(f'{os.fspath(path)}#{process}')

  def __str__(self) -> str:
    return os.fspath(self.path)

  def fetch(self):
    """Makes the files here those of the bucket; what else is here goes."""
    if self.local is self.path:
      return
    remote = [path for top in self._top() for path in (_files(top) if top.is_dir() else [top])]
    names = {path.relative_to(self.path).as_posix(): path for path in remote}
    self.local.mkdir(parents=True, exist_ok=True)
    for path in _files(self.local):
      if path.relative_to(self.local).as_posix() not in names:
        path.unlink()
    # Token records are large and never change: with the same manifest they are the same.
    same = {name.partition('/')[0] for name, path in names.items()
            if name.endswith('/manifest.json') and (self.local / name).exists()
            and (self.local / name).read_bytes() == path.read_bytes()}
    for name, path in tqdm.tqdm(names.items(), 'copying', unit=' files', leave=False,
                                disable=None):
      if name.partition('/')[0] not in same or not (self.local / name).exists():
        _copy(path, self.local / name)
      self._known[name] = _state(self.local / name)

  def push(self):
    """Uploads what was written since the last time."""
    if self.local is self.path or self._process:
      return
    for path in _files(self.local):
      name, state = path.relative_to(self.local).as_posix(), _state(path)
      if self._known.get(name) != state:
        _copy(path, self.path / name)
        self._known[name] = state

  def _top(self) -> list[epath.Path]:
    if not self.path.exists():
      return []
    return [path for path in self.path.iterdir() if path.name not in self._apart]
