"""The lock of a workdir: who is let in, who waits, who is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from etils import epath
import pytest

from bert_jax import errors
from bert_jax.errors import UserError
from bert_jax.training import lock


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
  monkeypatch.setattr(lock, 'BEAT_SECONDS', 0.05)
  monkeypatch.setattr(lock, 'STALE_SECONDS', 0.4)


def leave(folder, **changed) -> dict:
  """A lock that nobody released, of a process that is not this one's machine's by default."""
  holder = {'host': 'elsewhere', 'pid': 1, 'started': '1', 'boot': 'another', 'beat': 1,
            'since': '2026-01-02 03:04:05 UTC', **changed}
  (folder / lock.NAME).write_text(json.dumps(holder))
  return holder


def test_one_at_a_time_and_nothing_stays(tmp_path):
  workdir = epath.Path(tmp_path / 'run')
  with lock.held(workdir):
    assert len(errors.before_end) == 1  # SIGTERM before the first step releases it too
    held = json.loads((workdir / lock.NAME).read_text())
    assert held['pid'] == os.getpid() and held['host'] == socket.gethostname()
    with pytest.raises(UserError) as refused, lock.held(workdir):
      pass
    assert str(refused.value) == (
        f'{workdir} is in use by process {os.getpid()} on {socket.gethostname()}, since '
        f'{held["since"]}: wait until that run ends, or use another --workdir')
  assert not list(workdir.iterdir()) and not errors.before_end
  with lock.held(workdir):
    pass


def test_it_ends_with_its_process(tmp_path):
  """By SIGKILL, also while children of the process live on."""
  script = ('import subprocess, sys, time\n'
            'from etils import epath\n'
            'from bert_jax.training import lock\n'
            f'lock.Lock(epath.Path({str(tmp_path)!r})).acquire()\n'
            'subprocess.Popen(["sleep", "20"])\n'
            'print("held", flush=True)\n'
            'time.sleep(60)')
  holder = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
  assert holder.stdout.readline() == 'held\n'
  with pytest.raises(UserError, match=f'in use by process {holder.pid} on '):
    lock.Lock(epath.Path(tmp_path)).acquire()
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  began = time.monotonic()
  taken = lock.Lock(epath.Path(tmp_path))
  taken.acquire()
  assert time.monotonic() - began < 0.3
  taken.release()


def test_another_machine_is_given_time_for_a_sign_of_life(tmp_path, capsys):
  leave(tmp_path)
  began = time.monotonic()
  taken = lock.Lock(epath.Path(tmp_path))
  taken.acquire()
  assert 0.4 <= time.monotonic() - began < 3
  assert 'locked by process 1 on elsewhere: waiting' in capsys.readouterr().err
  taken.release()


def test_another_machine_that_lives_is_left_alone(tmp_path):
  holder = leave(tmp_path)
  timer = threading.Timer(0.1, lambda: leave(tmp_path, beat=2))
  timer.start()
  with pytest.raises(UserError, match='in use by process 1 on elsewhere, since 2026-01-02'):
    lock.Lock(epath.Path(tmp_path)).acquire()
  timer.join()
  assert json.loads((tmp_path / lock.NAME).read_text()) == {**holder, 'beat': 2}


@pytest.mark.parametrize('content', ['', '{"pid": ', '[]', '{}'])
def test_a_holder_that_died_as_it_wrote(tmp_path, content):
  (tmp_path / lock.NAME).write_text(content)
  with lock.held(epath.Path(tmp_path)):
    assert json.loads((tmp_path / lock.NAME).read_text())['pid'] == os.getpid()


def test_the_beat_changes(tmp_path):
  with lock.held(epath.Path(tmp_path)):
    beats = set()
    deadline = time.monotonic() + 5
    while len(beats) < 3 and time.monotonic() < deadline:
      beats.add((tmp_path / lock.NAME).read_text())
      time.sleep(0.02)
  assert len(beats) == 3


@pytest.mark.parametrize('entered, exclusive, changed, expected', [
    (True, True, {'boot': lock._boot()}, False),
    (True, True, {'host': socket.gethostname()}, False),  # a machine that has booted since
    (True, True, {}, None),
    (True, False, {'boot': lock._boot(), 'pid': 2 ** 22 + 1}, False),
    (True, False, {'boot': lock._boot(), 'pid': os.getpid()}, False),  # the id of another by now
    (True, False, {'boot': lock._boot(), 'pid': os.getpid(),
                   'started': lock._started(os.getpid())}, True),
    (True, False, {'host': socket.gethostname()}, None),
    (False, False, {'boot': lock._boot()}, True),
    (False, False, {}, None)])  # a network disk
def test_who_lives(tmp_path, entered, exclusive, changed, expected):
  assert lock._lives(leave(tmp_path, **changed), entered, exclusive) is expected
  assert lock._lives({}, entered, exclusive) is not entered


def test_a_disk_without_locks(tmp_path, monkeypatch):
  """The content alone tells; a run whose lock was taken over ends."""
  def unknown(*_):
    raise OSError(lock.errno.ENOLCK, 'no locks')

  monkeypatch.setattr(lock.fcntl, 'flock', unknown)
  ended = threading.Event()
  held = lock.Lock(epath.Path(tmp_path))
  monkeypatch.setattr(lock.os, '_exit', lambda status: (ended.set(), held._ended.set()))
  held.acquire()
  with pytest.raises(UserError, match='in use by process'):
    lock.Lock(epath.Path(tmp_path)).acquire()
  leave(tmp_path)
  assert ended.wait(5)
  held.release()
  assert json.loads((tmp_path / lock.NAME).read_text())['host'] == 'elsewhere'
