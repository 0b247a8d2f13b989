"""One run a workdir: a lock that names its holder and does not outlive it.

The kernel holds the lock of a local folder and releases it with the process. A bucket has writes
on the condition that nobody else wrote. Both keep a JSON object that says who holds the lock, with
a beat: another machine, which cannot ask for the process, sees it change as long as the run lives.
No clocks are compared.
"""

from collections.abc import Iterator
import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any
from typing import Protocol

from etils import epath
import jax
import tensorstore

from bert_jax import errors
from bert_jax.data import storage
from bert_jax.errors import UserError
from bert_jax.parallel import processes

NAME = '.lock'
BEAT_SECONDS = 15  # between two writes of the holder
STALE_SECONDS = 120  # without a beat the holder is gone

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class _Place(Protocol):
  """Where the lock is."""

  exclusive: bool  # the kernel lets nobody else in

  def open(self) -> bool:
    """False if the kernel says that somebody else holds the lock."""

  def read(self) -> bytes:
    """The content; nothing if nobody holds the lock."""

  def replace(self, content: bytes) -> bool:
    """Writes, unless somebody else wrote since this process last did or read."""

  def remove(self):
    """Releases the lock."""

  def close(self):
    """Lets go without having held the lock."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Leaves out what C++ prints: tensorstore logs on standard error how it got its credentials."""
  kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nowhere, 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


class _File:
  """In a local folder."""

  def __init__(self, workdir: epath.Path):
    self._path = pathlib.Path(workdir / NAME)
    self._file, self._known, self.exclusive = -1, b'', False

  def open(self) -> bool:
    self._path.parent.mkdir(parents=True, exist_ok=True)
    while True:
      self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.exclusive = True
      except BlockingIOError:
        return False
      except OSError as e:
        if e.errno not in _NO_LOCKS:
          raise
        return True  # a network disk without locks: the content alone tells
      if os.fstat(self._file).st_nlink:
        return True
      os.close(self._file)  # its holder removed the file in between

  def read(self) -> bytes:
    # By the name: a network disk shows what other machines wrote to those who open the file.
    self._known = self._now()
    return self._known

  def _now(self) -> bytes:
    try:
      return self._path.read_bytes()
    except FileNotFoundError:
      return b''

  def replace(self, content: bytes) -> bool:
    if self._now() not in (self._known, b''):
      return False
    os.pwrite(self._file, content, 0)
    os.ftruncate(self._file, len(content))
    os.fsync(self._file)
    self._known = content
    return True

  def remove(self):
    if self._now() == self._known:
      self._path.unlink()
    self.close()

  def close(self):
    os.close(self._file)


class _Object:
  """In a bucket."""

  exclusive = False

  def __init__(self, workdir: epath.Path):
    bucket, _, folder = os.fspath(workdir).removeprefix('gs://').strip('/').partition('/')
    self._store = tensorstore.KvStore.open(
        {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/' if folder else ''}).result()
    self._generation = b''  # of the object as it was last seen
    with _quiet():
      self.read()

  def open(self) -> bool:
    return True

  def read(self) -> bytes:
    found = self._store.read(NAME).result()
    self._generation = found.stamp.generation
    return found.value

  def replace(self, content: bytes) -> bool:
    written = self._write(content)
    self._generation = written or self._generation
    return bool(written)

  def _write(self, content: bytes | None) -> bytes:
    """The new generation; nothing if the object was written in between."""
    return self._store.write(NAME, content, if_equal=self._generation).result().generation

  def remove(self):
    self._write(None)

  def close(self):
    pass


def _boot() -> str:
  """Names this boot of the kernel and what its process ids count in; '' where neither is known."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _started(pid: int) -> str:
  """When a process of this machine started, in ticks since the boot; '' if it is gone."""
  try:
    fields = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  except OSError:
    return ''
  return '' if fields[0] in 'ZX' else fields[19]


def _parsed(content: bytes) -> dict[str, Any]:
  """The holder that a lock names; nothing if it was released, or its holder died as it wrote."""
  try:
    found = json.loads(content)
  except ValueError:
    return {}
  return found if isinstance(found, dict) and 'pid' in found else {}


def _lives(holder: dict[str, Any], entered: bool, exclusive: bool) -> bool | None:
  """Whether the holder lives; None if it is on another machine, where only its beat tells."""
  same_kernel = bool(_boot()) and holder.get('boot') == _boot()
  same_host = holder.get('host') == socket.gethostname()
  if not entered:  # on a network disk the lock of a dead machine lasts for a while
    return True if not holder or same_kernel or same_host else None
  if not holder:
    return False
  if exclusive:  # else the kernel would still hold the lock of a living one
    return False if same_kernel or same_host else None
  return _started(holder['pid']) == holder.get('started') if same_kernel else None


class Lock:
  """The lock of a workdir, held by one process from `acquire` to `release`."""

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir
    self._place: _Place = (_Object if storage.is_remote(os.fspath(workdir)) else _File)(workdir)
    self._me = {'host': socket.gethostname(), 'pid': os.getpid(), 'started': _started(os.getpid()),
                'boot': _boot(),
                'since': f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC'}
    self._beats, self._held = 0, False
    self._ended, self._mutex = threading.Event(), threading.RLock()

  def acquire(self):
    """Takes the lock; waits where only time tells whether its holder lives.

    Raises:
      UserError: another run holds it.
    """
    silent = None  # a content that did not change for `STALE_SECONDS`
    while True:
      entered = self._place.open()
      if not entered:
        time.sleep(0.5)  # its holder may be about to write who it is
      content = self._place.read()
      lives = _lives(_parsed(content), entered, self._place.exclusive)
      if lives is None:
        lives = not entered if content == silent else self._beats_on(content)
        silent = content
      if lives:
        self._place.close()
        self._refuse(_parsed(content))
      if entered and self._place.replace(self._content()):
        break
      self._place.close()
    self._held = True
    threading.Thread(target=self._beat, name='lock', daemon=True).start()

  def _refuse(self, holder: dict[str, Any]):
    who = (f'process {holder["pid"]} on {holder.get("host")}, since {holder.get("since")}'
           if holder else 'another process')
    raise UserError(f'{self._workdir} is in use by {who}: wait until that run ends, or use another '
                    '--workdir')

  def _content(self) -> bytes:
    self._beats += 1
    return json.dumps({**self._me, 'beat': self._beats}).encode()

  def _beats_on(self, content: bytes) -> bool:
    """Whether the holder, on another machine, gives a sign of life."""
    holder = _parsed(content)
    print(f'bert_jax: {self._workdir} was locked by process {holder["pid"]} on '
          f'{holder.get("host")}: waiting up to {STALE_SECONDS:.0f} s for a sign of life',
          file=sys.stderr, flush=True)
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
      time.sleep(BEAT_SECONDS / 5)
      found = self._place.read()
      if found != content:
        return bool(found)  # without content it was released
    return False

  def _beat(self):
    while not self._ended.wait(BEAT_SECONDS):
      with self._mutex:
        if self._ended.is_set():
          return
        try:
          mine = self._place.replace(self._content())
        except Exception:  # each storage has errors of its own, and the next beat may get through
          continue
      if not mine:
        print(f'bert_jax: another run took over {self._workdir}, because this one gave no sign of '
              f'life for {STALE_SECONDS:.0f} s: ended', file=sys.stderr, flush=True)
        os._exit(errors.EXIT_FAILED)

  def release(self):
    """Lets the next run in; a second call does nothing."""
    with self._mutex:
      self._ended.set()
      if self._held:
        self._held = False
        with contextlib.suppress(Exception):  # a bucket that is gone: the lock goes stale
          self._place.remove()


@contextlib.contextmanager
def held(workdir: epath.Path) -> Iterator[None]:
  """Has the first process hold the lock of a workdir, for all processes of the run.

  Raises:
    UserError: another run holds it, or nothing can be written there.
  """
  lock, refused = None, ''
  if not jax.process_index():
    try:
      lock = Lock(workdir)
      lock.acquire()
    except UserError as e:
      refused = str(e)
    except Exception as e:  # each storage has errors of its own
      if errors.storage_trouble(e) == 'the disk is full':
        raise
      refused = f'--workdir={workdir} cannot be written: {getattr(e, "strerror", None) or e}'
  refused = processes.from_first('lock', refused)
  if refused:
    raise UserError(refused)
  if lock:
    errors.before_end.append(lock.release)
  try:
    yield
  finally:
    if lock:
      errors.before_end.remove(lock.release)
      lock.release()
