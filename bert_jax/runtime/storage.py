"""Files in buckets and on this machine, and JSON files in both.

epath reads and writes buckets, through gcsfs or TensorFlow. Memory-mapping needs local copies.
"""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

from etils import epath
import filelock
from tqdm import auto as tqdm

from bert_jax.errors import Failed, UserError, require
from bert_jax.runtime import host, network

_SURROGATE_ESCAPE, _SURROGATE = re.compile(r'\\u[dD][89a-fA-F]'), re.compile('[\ud800-\udfff]')
_LARGEST_JSON = 256 << 20  # bytes of a description or a vocabulary


def parse_json(text: str | bytes) -> Any:
  """Parses JSON; half of a surrogate pair, which is no character, becomes U+FFFD.

  Raises:
    ValueError: it is no JSON, or Python gives up on its depth or its numbers; says where.
  """
  try:
    content = json.loads(text)
    if _SURROGATE_ESCAPE.search(text if isinstance(text, str) else text.decode(errors='replace')):
      content = json.loads(_SURROGATE.sub('\ufffd', json.dumps(content, ensure_ascii=False)))
    return content
  except json.JSONDecodeError as e:
    line = f'line {e.lineno}, ' if e.lineno > 1 else ''
    raise ValueError(f'{e.msg} at {line}column {e.colno}') from e
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e


def size_and_time(path: epath.Path) -> tuple[int, int]:
  """The bytes of a file and the second of its last change.

  epath's own `stat` asks for the name of the owner, which a container may not know.
  """
  if is_remote(os.fspath(path)):
    stat = path.stat()
    return stat.length, int(stat.mtime)
  stat = os.stat(path)
  return stat.st_size, int(stat.st_mtime)


def read_json(path: epath.Path) -> dict:
  """The object in a JSON file; raises UserError if it holds none, or one that is too large."""
  try:
    size, _ = size_and_time(path)
    if size > _LARGEST_JSON:
      raise UserError(f'{path} has {size >> 20} MiB: that is no description of a model')
    content = parse_json(path.read_bytes())
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  if not isinstance(content, dict):
    raise UserError(f'{path} holds no JSON object')
  return content


def read_json_if_any(path: epath.Path) -> dict:
  """The object in a JSON file, {} without the file; raises UserError as `read_json`."""
  return read_json(path) if path.exists() else {}


def through_link(path: epath.Path) -> epath.Path:
  """The file that a path stands for: of a link the target, for which the link stays."""
  return epath.Path(os.path.realpath(path)) if os.path.islink(path) else path


def write_whole(path: epath.Path, text: str):
  """Writes a file that has its name only when it is complete; a link stays one."""
  path = through_link(path)
  partial = path.parent / f'{path.name}.partial'
  partial.write_text(text)
  partial.replace(path)


def replace_folder(whole: epath.Path, folder: epath.Path):
  """Gives a complete folder the name of another, which it replaces; both on this machine."""
  before = folder.parent / f'{folder.name}.replaced'
  shutil.rmtree(before, ignore_errors=True)
  if folder.exists():
    folder.rename(before)
  whole.rename(folder)
  shutil.rmtree(before, ignore_errors=True)


def make_parent(flag: str, path: epath.Path):
  """Makes the folder of an output, which was given as `flag`; raises UserError if it cannot."""
  try:
    require(not path.is_dir(), f'{flag}={path} is a folder: give a file')
    through_link(path).parent.mkdir(parents=True, exist_ok=True)
  except OSError as e:
    raise UserError(f'{flag}={path} cannot be written: {e.strerror or e}') from e


def keep(flag: str, output: str, *paths: epath.Path):
  """Raises UserError for a file of an output that is there already, as `check` for a bucket."""
  check(flag, output)
  for path in paths:
    beside = '' if path == epath.Path(output) else f': {path}'
    require(not path.exists() or path.is_dir(),
            f'{flag}={output}{beside} is there already: give another {flag}, or --overwrite to '
            'replace it')


@contextlib.contextmanager
def exclusive(flag: str, output: str | None, *sources: str | None,
              overwrite: bool = True) -> Iterator[None]:
  """Keeps other processes of this machine from writing the output that was given as `flag`.

  Args:
    flag: the name of the output.
    output: a file or a folder; None = there is none.
    sources: the files or globs that the command reads.
    overwrite: False = a file that is there already is kept.

  Raises:
    UserError: another process writes the output, the command reads it, or it is to be kept.
  """
  if not output:
    yield
    return
  require(not os.path.exists(output) or os.path.isfile(output) or os.path.isdir(output),
          f'{flag}={output} is a device or a pipe: give a file')
  read = [path for source in sources if source for path in (source, *glob.glob(source))]
  require(os.path.realpath(output) not in map(os.path.realpath, read),
          f'{flag}={output} would overwrite what this command reads: give another {flag}')
  name = hashlib.sha256(os.path.realpath(output).encode()).hexdigest()[:16]
  lock = filelock.FileLock(host.cache_folder() / 'locks' / name, blocking=False)
  try:
    pathlib.Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    lock.acquire()
  except filelock.Timeout as e:
    raise UserError(f'{flag}={output}: another process writes it: wait until that ends, or give '
                    f'another {flag}') from e
  except OSError:  # a home that cannot be written: nothing keeps the two apart
    pass
  try:
    if not overwrite:
      keep(flag, output, epath.Path(output))
    yield
  finally:
    lock.release()


def is_remote(path: str) -> bool:
  """True if a path names a bucket: gs://..."""
  return '://' in path


def _server() -> str:
  """The URL of the server of buckets, as gcsfs finds it."""
  domain = os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN') or 'googleapis.com'
  emulator = os.environ.get('STORAGE_EMULATOR_HOST')
  if not emulator or emulator == 'default':
    return f'https://storage.{domain}'
  return emulator if '://' in emulator else f'http://{emulator}'


def check(name: str, path: str):
  """Looks for the path that was given as `name` if it is in a bucket.

  Raises:
    Failed: no server of buckets answers.
    UserError: the path is no bucket's, or this machine may not read it.
  """
  require('://' not in path or path.startswith('gs://'),
          f'{name}={path}: buckets are named gs://BUCKET/FOLDER')
  if not is_remote(path):
    return
  try:
    network.check(_server())
  except OSError as e:
    raise Failed(f'{name}={path} cannot be reached: {e}: mend the network and run the same command '
                 'again') from e
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise UserError(f'{name}={path}: pip install gcsfs, which reads and writes gs://') from e
  except Exception as e:  # each library for buckets has errors of its own
    raise UserError(f'{name}={path} cannot be reached: {e}') from e


def local_folder(remote: str) -> epath.Path:
  """The folder of this machine for copies of a remote folder's files."""
  name = hashlib.sha256(remote.rstrip('/').encode()).hexdigest()[:16]
  return epath.Path(host.cache_folder() / name)


def _files(folder: epath.Path, apart: Collection[str] = ()) -> dict[str, epath.Path]:
  """All files below a folder by their names in it, without `apart`; manifests come last."""
  files = {}
  for path in sorted(folder.iterdir()):  # a bucket has no recursive glob
    if path.name in apart or os.path.islink(path):  # W&B links to its newest run
      continue
    if path.is_dir():
      files |= {f'{path.name}/{name}': file for name, file in _files(path).items()}
    else:
      files[path.name] = path
  return dict(sorted(files.items(), key=lambda item: item[1].name == 'manifest.json'))


def _copy(source: epath.Path, target: epath.Path):
  """Copies a file; its name appears when the copy is complete."""
  target.parent.mkdir(parents=True, exist_ok=True)
  if is_remote(os.fspath(target)):  # a bucket shows complete objects only
    source.copy(target, overwrite=True)
    return
  partial = target.parent / f'{target.name}.partial'
  source.copy(partial, overwrite=True)
  partial.replace(target)


def _copy_all(files: Mapping[str, epath.Path], folder: epath.Path, label: str):
  for name, path in tqdm.tqdm(files.items(), label, unit=' files', leave=False, disable=None):
    _copy(path, folder / name)


def _state(path: epath.Path) -> tuple[int, int]:
  """Size and nanosecond of the last change: other numbers mean that the file changed."""
  stat = os.stat(path)
  return stat.st_size, stat.st_mtime_ns


def _is_same(name: str, local: epath.Path, remote: epath.Path) -> bool:
  """True if a file exists in two folders with equal content."""
  return (local / name).exists() and (local / name).read_bytes() == (remote / name).read_bytes()


def upload(local: epath.Path, remote: epath.Path):
  """Copies a local folder into a bucket, its manifest last."""
  _copy_all(_files(local), remote, 'uploading')


def download(remote: epath.Path) -> epath.Path:
  """Copies a remote folder to this machine, if it is not there yet; returns the copy."""
  local = local_folder(os.fspath(remote))
  local.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(f'{local}.lock'):  # the processes of one machine share the copy
    if not _is_same('manifest.json', local, remote):
      _copy_all(_files(remote), local, 'copying')
  return local


class Folder:
  """A folder that may be in a bucket; its files are kept on this machine and uploaded whole.

  The constructor makes no folder yet.

  Attributes:
    path: the folder.
    local: its files on this machine; the same as `path` if that is local.

  Args of the constructor:
    apart: names in it that others write straight to the bucket; they are not copied.
    process: number of this process; only the first one uploads.
  """

  def __init__(self, path: epath.Path, apart: Collection[str] = (), process: int = 0):
    self.path = path
    self._apart = apart
    self._process = process
    self._uploaded: dict[str, tuple[int, int]] = {}  # `_state` of the files that the bucket has
    remote = is_remote(os.fspath(path))
    self.local = local_folder(f'{os.fspath(path)}#{process}') if remote else path

  def __str__(self) -> str:
    return os.fspath(self.path)

  def fetch(self):
    """Downloads the files of the bucket and deletes all others on this machine."""
    if self.local is self.path:
      return
    remote = _files(self.path, self._apart) if self.path.exists() else {}
    self.local.mkdir(parents=True, exist_ok=True)
    for name, path in _files(self.local).items():
      if name not in remote:
        path.unlink(missing_ok=True)
    # Token records are large and never change: with the same manifest they are the same.
    same = {name.partition('/')[0] for name in remote
            if name.endswith('/manifest.json') and _is_same(name, self.local, self.path)}
    missing = {name: path for name, path in remote.items()
               if name.partition('/')[0] not in same or not (self.local / name).exists()}
    _copy_all(missing, self.local, 'copying')
    self._uploaded = {name: _state(self.local / name) for name in remote}

  def push(self):
    """Uploads the files that changed since the last time."""
    if self.local is self.path or self._process:
      return
    for name, path in _files(self.local).items():
      state = _state(path)
      if self._uploaded.get(name) != state:
        _copy(path, self.path / name)
        self._uploaded[name] = state
