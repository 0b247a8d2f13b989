"""Locks a workdir for one run; the lock names its holder and ends with it.

- A local folder uses a kernel lock, which the kernel releases when the process ends.
- On a file system without kernel locks the lock is the existence of the file. filelock
  detects a dead holder on the holder's own host only.
- A bucket uses an object with conditional writes. The holder rewrites it every 15 seconds.
  A holder that has not written for two minutes counts as dead. The lock never compares
  the clocks of two hosts.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any
import warnings

from etils import epath
import filelock
import jax
import tensorstore

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.runtime import ending, processes, storage

NAME = '.lock'
BEAT_SECONDS = 15  # between two heartbeats of a bucket's holder
_SECONDS_TO_SIGN = 2  # the most between taking a local lock and writing its holder
STALE_SECONDS = 120  # after this time without a write the holder is gone
_PROC = pathlib.Path('/proc')  # on Linux only


def _this_process() -> dict[str, Any]:
  return {'host': socket.gethostname(), 'pid': os.getpid(),
          'since': time.strftime('%F %T UTC', time.gmtime()),
          'machine': _machine(), 'started': _start_time(os.getpid())}


def _machine() -> str:
  """Names the boot and the container, which make a process id unique; '' = unknown."""
  try:
    boot = (_PROC / 'sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink(_PROC / "self/ns/pid")}'
  except OSError:
    return ''


def _start_time(pid: int) -> str:
  """The start of a process in clock ticks since boot; '' if it no longer runs."""
  try:
    return (_PROC / str(pid) / 'stat').read_text().rpartition(')')[2].split()[19]
  except OSError:
    return ''


def _parse(content: bytes) -> dict[str, Any]:
  """The holder that a lock names; {} if it was released or its holder died in a write."""
  try:
    holder = json.loads(content)
  except ValueError:
    return {}
  return (holder if isinstance(holder, dict)
          and holder.keys() >= {'host', 'pid', 'since'} else {})


def _in_use(workdir: epath.Path, content: bytes) -> UserError:
  holder = _parse(content)
  who = (f'process {holder["pid"]} on {holder["host"]}, since {holder["since"]}' if holder
         else 'another process')
  return UserError(f'{workdir} is in use by {who}: wait until that run ends, or use '
                   'another --workdir')


def _acquire_folder(workdir: epath.Path) -> Callable[[], None]:
  """Takes the lock of a local folder; returns the function that releases it."""
  path = pathlib.Path(workdir) / NAME
  path.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(path, blocking=False, thread_local=False)
  try:
    # filelock warns where it falls back to a lock by existence.
    with warnings.catch_warnings(action='ignore'):
      lock.acquire()
  except filelock.Timeout:
    if isinstance(lock, filelock.SoftFileLock):
      raise UserError(
          f'{workdir} is in use by process {lock.pid}: wait until that run ends, or '
          f'use another --workdir. If it has ended, delete {path}') from None
    # The holder takes the kernel lock first and writes its name a moment later.
    deadline = time.monotonic() + _SECONDS_TO_SIGN
    while not _parse(path.read_bytes()) and time.monotonic() < deadline:
      time.sleep(0.05)
    raise _in_use(workdir, path.read_bytes()) from None
  # filelock itself writes the process id into a SoftFileLock: leave its content alone.
  if isinstance(lock, filelock.SoftFileLock):
    return lock.release
  path.write_text(json.dumps(_this_process()))

  def release():
    # The file stays: a lock on a deleted file excludes nobody.
    path.write_text('')
    lock.release()

  return release


class _BucketLock:
  """A lock on a folder in a bucket."""

  def __init__(self, workdir: epath.Path):
    self._workdir = workdir
    bucket, _, folder = os.fspath(workdir).removeprefix('gs://').strip('/').partition('/')
    self._store = tensorstore.KvStore.open({
        'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/' if folder else ''
    }).result()
    self._me = _this_process()
    self._beats = 0
    self._generation = b''  # of the object, at this process's last read or write
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, daemon=True)
    # At its first read tensorstore prints the path of its credentials.
    with _without_stderr():
      self._read()

  def _read(self) -> bytes:
    read = self._store.read(NAME).result()
    self._generation = read.stamp.generation
    return read.value

  def _write(self) -> bool:
    """Returns False if another process wrote since this one last wrote or read."""
    self._beats += 1
    content = json.dumps({**self._me, 'beat': self._beats}).encode()
    # The generation is empty if the condition failed.
    generation = self._store.write(
        NAME, content, if_equal=self._generation).result().generation
    self._generation = generation or self._generation
    return bool(generation)

  def acquire(self):
    """Takes the lock; if it has a holder, first waits for a heartbeat of the holder."""
    content = self._read()
    holder = _parse(content)
    if holder and not _has_ended(holder):
      print(f'bert_jax: {self._workdir} is locked by process {holder["pid"]} on '
            f'{holder["host"]}: waiting up to {STALE_SECONDS:.0f} s for its heartbeat',
            file=sys.stderr, flush=True)
      # Any new content is a heartbeat. A timestamp would compare two hosts' clocks.
      deadline = time.monotonic() + STALE_SECONDS
      while time.monotonic() < deadline and content:
        time.sleep(BEAT_SECONDS / 5)
        before, content = content, self._read()
        if content and content != before:
          raise _in_use(self._workdir, before)
    if not self._write():
      raise _in_use(self._workdir, self._read())
    self._thread.start()

  def _beat(self):
    while not self._ended.wait(BEAT_SECONDS):
      try:
        # A write may succeed although its reply is lost. Then the next conditional write
        # fails, and the object holds this run's own name.
        is_mine = self._write() or self._me.items() <= _parse(self._read()).items()
      except Exception:  # each backend has its own errors; the next beat may succeed
        continue
      if not is_mine:
        print(f'bert_jax: stopped: another run took over {self._workdir}, because this '
              f'run sent no heartbeat for {STALE_SECONDS:.0f} s', file=sys.stderr,
              flush=True)
        os._exit(errors.EXIT_FAILED)

  def release(self):
    self._ended.set()
    self._thread.join()
    # If the bucket is unreachable, the lock becomes stale by itself.
    with contextlib.suppress(Exception):
      self._store.write(NAME, None, if_equal=self._generation).result()


def _has_ended(holder: dict[str, Any]) -> bool:
  """True if the holder was a process of this host that no longer runs."""
  machine = _machine()
  return bool(machine and machine == holder.get('machine')
              and _start_time(holder['pid']) != holder.get('started'))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
  """Silences stderr, including output of C++ code, which `redirect_stderr` misses."""
  stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nowhere, 2)
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)
    os.close(nowhere)


def _acquire(workdir: epath.Path) -> Callable[[], None]:
  """Takes the lock of a workdir; returns the function that releases it."""
  try:
    if not storage.is_remote(os.fspath(workdir)):
      return _acquire_folder(workdir)
    lock = _BucketLock(workdir)
    lock.acquire()
    return lock.release
  except UserError:
    raise
  except Exception as e:  # each backend has its own errors
    if ending.storage_trouble(e) == 'the disk is full':
      raise  # not the user's mistake: exit status 1, worth a retry
    reason = getattr(e, 'strerror', None) or e
    raise UserError(f'--workdir={workdir} cannot be written: {reason}') from e


@contextlib.contextmanager
def held(workdir: epath.Path) -> Iterator[None]:
  """Holds the lock of a workdir in the first process, for all processes of the run.

  Raises:
    UserError: another run holds it, or the workdir cannot be written.
  """
  release, refusal = (lambda: None), ''
  # Only the first process takes the lock. The others get its refusal, so all fail alike.
  if not jax.process_index():
    try:
      release = _acquire(workdir)
    except UserError as e:
      refusal = str(e)
  refusal = processes.from_first('lock', refusal)
  errors.require(not refusal, refusal)
  # `ending.end` skips the `finally` below.
  ending.before_end.append(release)
  try:
    yield
  finally:
    ending.before_end.remove(release)
    release()
