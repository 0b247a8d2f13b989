"""The lock of a workdir: which run gets it, and which is refused."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from etils import epath
import filelock
import pytest

from bert_jax.errors import UserError
from bert_jax.runtime import ending, lock


def test_a_second_run_in_a_workdir_is_refused(tmp_path):
  workdir = epath.Path(tmp_path / 'run')
  with lock.held(workdir):
    assert len(ending.before_end) == 1  # SIGTERM before the first step releases it too
    holder = json.loads((workdir / lock.NAME).read_text())
    assert holder['pid'] == os.getpid() and holder['host'] == socket.gethostname()
    with pytest.raises(UserError) as refused, lock.held(workdir):
      pass
    assert str(refused.value) == (
        f'{workdir} is in use by process {os.getpid()} on {socket.gethostname()}, since '
        f'{holder["since"]}: wait until that run ends, or use another --workdir')
    assert json.loads((workdir / lock.NAME).read_text()) == holder
  assert (workdir / lock.NAME).read_text() == '' and not ending.before_end
  with lock.held(workdir):
    pass


def test_a_lock_ends_with_its_process(tmp_path):
  """Also after SIGKILL, and while children of the process still live."""
  script = ('import subprocess, time\n'
            'from etils import epath\n'
            'from bert_jax.runtime import lock\n'
            f'taken = lock._acquire(epath.Path({str(tmp_path)!r}))\n'
            'subprocess.Popen(["sleep", "20"])\n'
            'print("held", flush=True)\n'
            'time.sleep(60)')
  holder = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
  assert holder.stdout.readline() == 'held\n'
  with pytest.raises(UserError, match=f'in use by process {holder.pid} on '):
    lock._acquire(epath.Path(tmp_path))
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  began = time.monotonic()
  lock._acquire(epath.Path(tmp_path))()
  assert time.monotonic() - began < 10  # `sleep` would hold the lock for 20 s


def without_flock(*_):
  raise OSError(errno.ENOSYS, 'Function not implemented')


def test_a_file_system_without_flock_is_locked_too(tmp_path, monkeypatch):
  """A lock ends with its process there too."""
  script = ('import fcntl, time\n'
            'from etils import epath\n'
            'from bert_jax.runtime import lock\n'
            'from tests.runtime import test_workdir_lock\n'
            'fcntl.flock = test_workdir_lock.without_flock\n'
            f'taken = lock._acquire(epath.Path({str(tmp_path)!r}))\n'
            'print("held", flush=True)\n'
            'time.sleep(60)')
  monkeypatch.setattr(fcntl, 'flock', without_flock)
  holder = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
  assert holder.stdout.readline() == 'held\n'
  with pytest.raises(UserError) as refused:
    lock._acquire(epath.Path(tmp_path))
  assert str(refused.value) == (
      f'{tmp_path} is in use by process {holder.pid}: wait until that run ends, or use another '
      f'--workdir. If it has ended, delete {tmp_path}/{lock.NAME}')
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  lock._acquire(epath.Path(tmp_path))()
  lock._acquire(epath.Path(tmp_path))()


def test_a_dead_holder_is_recognized(monkeypatch):
  child = subprocess.Popen(['sleep', '60'])
  holder = lock._this_process() | {'pid': child.pid, 'started': lock._start_time(child.pid)}
  assert not lock._has_ended(lock._this_process()) and not lock._has_ended(holder)
  assert lock._has_ended(holder | {'started': '7'})  # another process has its pid now
  child.kill()
  child.wait()
  assert lock._has_ended(holder)
  # A container with the same host name has its own pids, and so has the next boot.
  assert not lock._has_ended(holder | {'machine': 'boot pid:[7]'})
  monkeypatch.setattr(lock, '_PROC', lock._PROC / 'nowhere')
  assert not lock._has_ended(holder | {'machine': ''})


def test_a_refused_run_waits_for_the_name_of_the_holder(tmp_path):
  """Two runs start at once, and the holder has not yet written its name."""
  taken = filelock.FileLock(tmp_path / lock.NAME, thread_local=False)
  taken.acquire()
  holder = json.dumps({'host': 'other', 'pid': 7, 'since': 'now'})
  writer = threading.Timer(0.3, (tmp_path / lock.NAME).write_text, [holder])
  writer.start()
  with pytest.raises(UserError, match='is in use by process 7 on other, since now'):
    lock._acquire(epath.Path(tmp_path))
  writer.join()
  taken.release()


@pytest.mark.parametrize('content', ['', '{"pid": ', '[]', '{}'])
def test_an_incomplete_lock_file_blocks_no_run(tmp_path, content):
  (tmp_path / lock.NAME).write_text(content)
  with lock.held(epath.Path(tmp_path)):
    assert json.loads((tmp_path / lock.NAME).read_text())['pid'] == os.getpid()


def test_a_folder_that_cannot_be_written_is_refused():
  with pytest.raises(UserError, match='--workdir=/proc/nowhere cannot be written'):
    lock._acquire(epath.Path('/proc/nowhere'))
