"""One run a workdir: a lock that names its holder and does not outlive it.

A local folder has the kernel's lock, which ends with its process. A bucket has an object that is
written only if nobody else wrote it in between. Its holder writes it again every few seconds; a
holder that stops doing so is gone. No clocks are compared.
"""

from collections.abc import Iterator
import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any

from etils import epath
import filelock
import jax
import tensorstore

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.runtime import processes
from bert_jax.runtime import storage

NAME = '.lock'
BEAT_SECONDS = 15  # between two writes of the holder of a bucket
STALE_SECONDS = 120  # without a write the holder is gone


class _Held(Exception):
  """Another run holds the lock; the argument says who."""


def _me() -> dict[str, Any]:
  since = datetime.datetime.now(datetime.UTC)
  return {'host': socket.gethostname(), 'pid': os.getpid(), 'since': f'{since:%F %T} UTC'}


def _parsed(content: bytes) -> dict[str, Any]:
  """The holder that a lock names; nothing if it was released, or its holder died as it wrote."""
  try:
    holder = json.loads(content)
  except ValueError:
    return {}
  return holder if isinstance(holder, dict) and holder.keys() >= {'host', 'pid', 'since'} else {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences C++: at its first read tensorstore tells standard error where its credentials are."""
  stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nowhere, 2)
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)
    os.close(nowhere)


class _FolderLock:
  """The lock of a local folder."""

  def __init__(self, workdir: epath.Path):
    self._path = pathlib.Path(workdir) / NAME
    self._lock = filelock.FileLock(self._path, blocking=False, thread_local=False)

  def acquire(self):
    """Takes the lock; raises _Held if another process has it."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    try:
      self._lock.acquire()
    except filelock.Timeout:
      raise _Held(_parsed(self._path.read_bytes())) from None
    self._path.write_text(json.dumps(_me()))

  def release(self):
    """Lets the next run in. The file stays: a lock on a removed file excludes nobody."""
    self._path.write_text('')
    self._lock.release()


class _BucketLock:
  """The lock of a folder in a bucket."""

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir
    bucket, _, folder = os.fspath(workdir).removeprefix('gs://').strip('/').partition('/')
    self._store = tensorstore.KvStore.open(
        {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/' if folder else ''}).result()
    self._me, self._beats, self._generation = _me(), 0, b''
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)
    with _quiet():
      self._read()

  def _read(self) -> bytes:
    read = self._store.read(NAME).result()
    self._generation = read.stamp.generation
    return read.value

  def _write(self) -> bool:
    """False if somebody else wrote since this process last did or read."""
    self._beats += 1
    content = json.dumps({**self._me, 'beat': self._beats}).encode()
    written = self._store.write(NAME, content, if_equal=self._generation).result().generation
    self._generation = written or self._generation
    return bool(written)

  def acquire(self):
    """Takes the lock; waits for a sign of life where it has a holder.

    Raises:
      _Held: another run lives.
    """
    content = self._read()
    holder = _parsed(content)
    if holder and not self._is_gone(holder):
      print(f'bert_jax: {self._workdir} was locked by process {holder["pid"]} on {holder["host"]}: '
            f'waiting up to {STALE_SECONDS:.0f} s for a sign of life', file=sys.stderr, flush=True)
      deadline = time.monotonic() + STALE_SECONDS
      while time.monotonic() < deadline and content:
        time.sleep(BEAT_SECONDS / 5)
        if (now := self._read()) != content and now:
          raise _Held(holder)
        content = now
    if not self._write():
      raise _Held(_parsed(self._read()))
    self._thread.start()

  def _is_gone(self, holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that no longer runs."""
    return holder['host'] == socket.gethostname() and not pathlib.Path(
        f'/proc/{holder["pid"]}').exists() and pathlib.Path('/proc/self').exists()

  def _beat(self):
    while not self._ended.wait(BEAT_SECONDS):
      try:
        mine = self._write()
      except Exception:  # each storage has errors of its own, and the next beat may get through
        continue
      if not mine:
        print(f'bert_jax: another run took over {self._workdir}, because this one gave no sign of '
              f'life for {STALE_SECONDS:.0f} s: ended', file=sys.stderr, flush=True)
        os._exit(errors.EXIT_FAILED)

  def release(self):
    """Lets the next run in; a bucket that cannot be reached lets it in by and by."""
    self._ended.set()
    self._thread.join()
    with contextlib.suppress(Exception):
      self._store.write(NAME, None, if_equal=self._generation).result()


def _acquired(workdir: epath.Path) -> _FolderLock | _BucketLock:
  """The lock of a workdir, taken by this process."""
  try:
    lock = (_BucketLock if storage.is_remote(os.fspath(workdir)) else _FolderLock)(workdir)
    lock.acquire()
  except _Held as e:
    holder = e.args[0]
    who = (f'process {holder["pid"]} on {holder["host"]}, since {holder["since"]}' if holder
           else 'another process')
    raise UserError(f'{workdir} is in use by {who}: wait until that run ends, or use another '
                    '--workdir') from e
  except Exception as e:  # each storage has errors of its own
    if errors.storage_trouble(e) == 'the disk is full':
      raise
    reason = getattr(e, 'strerror', None) or e
    raise UserError(f'--workdir={workdir} cannot be written: {reason}') from e
  return lock


@contextlib.contextmanager
def held(workdir: epath.Path) -> Iterator[None]:
  """Has the first process hold the lock of a workdir, for all processes of the run.

  Raises:
    UserError: another run holds it, or nothing can be written there.
  """
  lock, refused = None, ''
  if not jax.process_index():
    try:
      lock = _acquired(workdir)
    except UserError as e:
      refused = str(e)
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
