"""Files in buckets and on local disks, and JSON files in both.

epath reads and writes buckets through gcsfs or TensorFlow. Memory-mapped files need local
copies.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import re
import shutil
from typing import Any

from etils import epath
import filelock
from tqdm import auto as tqdm

from bert_jax.errors import Failed, UserError, require
from bert_jax.runtime import host, network

_SURROGATE_ESCAPE = re.compile(r'\\u[dD][89a-fA-F]')
_SURROGATE = re.compile('[\ud800-\udfff]')
_LARGEST_JSON = 256 << 20  # bytes; a model's description or vocabulary is smaller


def parse_json(text: str | bytes) -> Any:
  """Parses JSON; an unpaired surrogate, which is not a character, becomes U+FFFD.

  Raises:
    ValueError: the text is not JSON (the message says where), or it is nested too deeply
      or has too long a number for Python.
  """
  try:
    content = json.loads(text)
    decoded = text if isinstance(text, str) else text.decode(errors='replace')
    if _SURROGATE_ESCAPE.search(decoded):
      # Only after parsing: then the two halves of a valid pair are one character.
      content = json.loads(
          _SURROGATE.sub('\ufffd', json.dumps(content, ensure_ascii=False)))
    return content
  except json.JSONDecodeError as e:
    line = f'line {e.lineno}, ' if e.lineno > 1 else ''
    raise ValueError(f'{e.msg} at {line}column {e.colno}') from e
  except RecursionError as e:
    raise ValueError('it is nested too deeply') from e


def size_and_time(path: epath.Path) -> tuple[int, int]:
  """Returns (bytes, time of the last change in seconds) of a file.

  `epath.Path.stat` looks up the name of the owner, which a container may not know. So
  local files use `os.stat`.
  """
  if is_remote(os.fspath(path)):
    stat = path.stat()
    return stat.length, int(stat.mtime)
  stat = os.stat(path)
  return stat.st_size, int(stat.st_mtime)


def read_json(path: epath.Path, parse: Callable[[bytes], Any] = parse_json) -> dict:
  """Reads the JSON object in a file; raises UserError if it has none or is too large."""
  try:
    size, _ = size_and_time(path)
    # A wrong path may name the weights: parsing them would exhaust the memory.
    require(size <= _LARGEST_JSON,
            f'{path} has {size >> 20} MiB: too large to describe a model')
    content = parse(path.read_bytes())
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read: {e}') from e
  require(isinstance(content, dict), f'{path} does not hold a JSON object')
  return content


def read_json_if_any(path: epath.Path) -> dict:
  """Reads the JSON object in a file; {} if the file does not exist. See `read_json`."""
  return read_json(path) if path.exists() else {}


def through_link(path: epath.Path) -> epath.Path:
  """The target of a symbolic link, so that a write keeps the link; else `path`."""
  return epath.Path(os.path.realpath(path)) if os.path.islink(path) else path


def matching(folder: epath.Path, pattern: str) -> list[epath.Path]:
  """The sorted entries of a folder whose names match a pattern; [] without the folder.

  `epath.Path.glob` would read brackets in the name of the folder as a pattern, too.
  """
  return sorted(path for path in (folder.iterdir() if folder.exists() else ())
                if fnmatch.fnmatchcase(path.name, pattern))


def write_whole(path: epath.Path, text: str):
  """Writes a file atomically; a symbolic link stays a link."""
  path = through_link(path)
  # In the same folder: a rename is atomic only within one file system.
  partial = path.parent / f'{path.name}.partial'
  partial.write_text(text)
  partial.replace(path)


def replaced(folder: epath.Path) -> epath.Path:
  """The name of a folder while it is replaced: hidden, so that no user has chosen it."""
  return folder.parent / f'.{folder.name}.replaced'


def replace_folder(whole: epath.Path, folder: epath.Path):
  """Replaces a local folder, or the target of a link, with the complete folder `whole`."""
  folder = through_link(folder)
  before = replaced(folder)
  shutil.rmtree(before, ignore_errors=True)
  # Two renames, because one cannot replace a folder that has files. A kill in between
  # leaves the old content under `before`.
  if folder.exists():
    folder.rename(before)
  whole.rename(folder)
  shutil.rmtree(before, ignore_errors=True)


def make_writable(folder: epath.Path, output: str, process: int = 0):
  """Creates a folder; raises UserError, which names `output`, if it cannot be written."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f'.writable{process or ""}'
    probe.write_text('')
    probe.unlink(missing_ok=True)  # another command may probe the same folder
  except OSError as e:
    raise UserError(f'{output} cannot be written: {e.strerror or e}') from e


def make_parent(flag: str, path: epath.Path):
  """Creates the parent folder of the output `flag`.

  Raises UserError if it cannot be created or written to, or if `path` is a folder. So a
  command fails before its work, not after it.
  """
  try:
    require(not path.is_dir(), f'{flag}={path} is a folder: give a file')
  except OSError as e:
    raise UserError(f'{flag}={path} cannot be written: {e.strerror or e}') from e
  make_writable(through_link(path).parent, f'{flag}={path}')


def require_absent(flag: str, output: str, *paths: epath.Path):
  """Raises UserError if a file of an output exists; see `check` for buckets."""
  check(flag, output)
  for path in paths:
    other = '' if path == epath.Path(output) else f': {path}'
    require(not path.exists() or path.is_dir(),
            f'{flag}={output}{other} already exists: give another {flag}, or --overwrite '
            'to replace it')


def require_not_read(flag: str, output: str, paths: Iterable[epath.Path],
                     sources: Iterable[str | None]):
  """Raises UserError if a file of an output is one of the files or globs `sources`."""
  read = {os.path.realpath(path) for source in sources if source
          for path in (source, *glob.glob(source, recursive=True))}
  for path in paths:
    other = '' if path == epath.Path(output) else f': {path}'
    require(os.path.realpath(path) not in read,
            f'{flag}={output}{other} would overwrite what this command reads: give another '
            f'{flag}')


@contextlib.contextmanager
def exclusive(flag: str, output: str | None, *sources: str | None,
              overwrite: bool = True) -> Iterator[None]:
  """Keeps other processes of this host from writing the output `flag`.

  Args:
    flag: the flag that names the output.
    output: a file or a folder; None = no output.
    sources: the files or globs that the command reads.
    overwrite: False = an existing file is an error.

  Raises:
    UserError: another process writes the output, the command reads it, or it exists and
      `overwrite` is False.
  """
  if not output:
    yield
    return
  check(flag, output)
  require(not os.path.exists(output) or os.path.isfile(output) or os.path.isdir(output),
          f'{flag}={output} is a device or a pipe: give a file')
  require_not_read(flag, output, [epath.Path(f'{output}{end}') for end in ('', '.partial')],
                   sources)
  # The lock is in the cache folder, so that it leaves no file next to the output.
  name = hashlib.sha256(os.path.realpath(output).encode()).hexdigest()[:16]
  lock = filelock.FileLock(host.cache_folder() / 'locks' / name, blocking=False)
  try:
    epath.Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    lock.acquire()
  except filelock.Timeout as e:
    raise UserError(f'{flag}={output}: another process is writing it: wait until it '
                    f'ends, or give another {flag}') from e
  except OSError:  # a read-only home: go without the lock
    pass
  try:
    if not overwrite:
      require_absent(flag, output, epath.Path(output))
    yield
  finally:
    lock.release()


def is_remote(path: str) -> bool:
  """True if a path names a bucket: gs://..."""
  return '://' in path


def _server() -> str:
  """The URL of the storage server, by the environment variables that gcsfs reads."""
  domain = os.environ.get('GOOGLE_CLOUD_UNIVERSE_DOMAIN') or 'googleapis.com'
  emulator = os.environ.get('STORAGE_EMULATOR_HOST')
  if not emulator or emulator == 'default':
    return f'https://storage.{domain}'
  return emulator if '://' in emulator else f'http://{emulator}'


def check(name: str, path: str):
  """Checks access to the path that was given as `name`, if it is in a bucket.

  Raises:
    Failed: the storage server does not answer.
    UserError: the URL is not gs://, or this host may not read it.
  """
  require('://' not in path or path.startswith('gs://'),
          f'{name}={path}: buckets are named gs://BUCKET/FOLDER')
  if not is_remote(path):
    return
  try:
    network.check(_server())
  except OSError as e:
    raise Failed(f'{name}={path} cannot be reached: {e}: fix the network and run the '
                 'same command again') from e
  try:
    epath.Path(path).exists()
  except ImportError as e:
    raise UserError(
        f'{name}={path}: pip install gcsfs, which reads and writes gs://') from e
  except Exception as e:  # each backend has its own errors
    raise UserError(f'{name}={path} cannot be reached: {e}') from e


def local_folder(remote: str) -> epath.Path:
  """The local folder for copies of a remote folder's files."""
  name = hashlib.sha256(remote.rstrip('/').encode()).hexdigest()[:16]
  return epath.Path(host.cache_folder() / name)


def _files(folder: epath.Path, apart: Collection[str] = ()) -> dict[str, epath.Path]:
  """All files below a folder by relative path, without `apart`; manifests come last.

  A manifest is written last, so that a folder with a manifest is complete.
  """
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
  """Copies a file atomically."""
  target.parent.mkdir(parents=True, exist_ok=True)
  if is_remote(os.fspath(target)):  # a bucket shows only complete objects
    source.copy(target, overwrite=True)
    return
  partial = target.parent / f'{target.name}.partial'
  source.copy(partial, overwrite=True)
  partial.replace(target)


def _copy_all(files: Mapping[str, epath.Path], folder: epath.Path, label: str):
  for name, path in tqdm.tqdm(
      files.items(), label, unit=' files', leave=False, disable=None):
    _copy(path, folder / name)


def _state(path: epath.Path) -> tuple[int, int]:
  """(bytes, time of the last change in ns), which differ after every change of a file."""
  stat = os.stat(path)
  return stat.st_size, stat.st_mtime_ns


def _is_same(name: str, local: epath.Path, remote: epath.Path) -> bool:
  """True if both folders have a file with the same content."""
  return ((local / name).exists()
          and (local / name).read_bytes() == (remote / name).read_bytes())


def upload(local: epath.Path, remote: epath.Path):
  """Copies a local folder into a bucket, the manifest last."""
  _copy_all(_files(local), remote, 'uploading')


def download(remote: epath.Path) -> epath.Path:
  """Copies a remote folder to a local disk, unless a copy exists; returns the copy."""
  local = local_folder(os.fspath(remote))
  local.parent.mkdir(parents=True, exist_ok=True)
  with filelock.FileLock(f'{local}.lock'):  # the processes of one machine share the copy
    if not _is_same('manifest.json', local, remote):
      _copy_all(_files(remote), local, 'copying')
  return local


class Folder:
  """A local folder, or a folder in a bucket with a local copy; `push` uploads files.

  The constructor does not create the folder.

  Attributes:
    path: the folder.
    local: the local copy; `path` itself if that is local.

  Args of the constructor:
    apart: names of entries that are not copied: other code writes them to the bucket.
    process: index of this process; only process 0 uploads.
  """

  def __init__(self, path: epath.Path, apart: Collection[str] = (), process: int = 0):
    self.path = path
    self._apart = apart
    self._process = process
    # `_state` of each file at its last transfer, to upload only what changed since.
    self._uploaded: dict[str, tuple[int, int]] = {}
    remote = is_remote(os.fspath(path))
    self.local = local_folder(f'{os.fspath(path)}#{process}') if remote else path

  def __str__(self) -> str:
    return os.fspath(self.path)

  def fetch(self):
    """Makes the local copy equal to the bucket: downloads files and deletes others."""
    if self.local is self.path:
      return
    remote = _files(self.path, self._apart) if self.path.exists() else {}
    self.local.mkdir(parents=True, exist_ok=True)
    for name, path in _files(self.local).items():
      if name not in remote:
        path.unlink(missing_ok=True)
    # An empty tokenizer/ would look like the folder of another program.
    for folder, _, _ in os.walk(self.local, topdown=False):
      if folder != os.fspath(self.local) and not os.listdir(folder):
        os.rmdir(folder)
    # Token records are large and never change: an equal manifest means equal records.
    same = tuple(name.removesuffix('manifest.json') for name in remote
                 if name.endswith('/manifest.json') and _is_same(name, self.local, self.path))
    missing = {name: path for name, path in remote.items()
               if not name.startswith(same) or not (self.local / name).exists()}
    _copy_all(missing, self.local, 'copying')
    self._uploaded = {name: _state(self.local / name) for name in remote}

  def push(self):
    """Uploads the files that changed since the last transfer."""
    if self.local is self.path or self._process:
      return
    for name, path in _files(self.local).items():
      state = _state(path)
      if self._uploaded.get(name) != state:
        _copy(path, self.path / name)
        self._uploaded[name] = state
