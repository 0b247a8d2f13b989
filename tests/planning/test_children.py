"""Child processes of a plan: the plan repeats a crashed one, and none outlives the plan."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from bert_jax.errors import Failed, UserError
from bert_jax.planning import children
from tests import test_commands


def _dies(marker, always):
  if always or not os.path.exists(marker):
    pathlib.Path(marker).touch()
    os.kill(os.getpid(), signal.SIGSEGV)
  return 'done'


@pytest.mark.medium
def test_a_compiler_that_crashes_is_tried_again(tmp_path):
  assert children.run([(_dies, (str(tmp_path / 'once'), False)), (abs, (-3,))]) == ['done', 3]
  with pytest.raises(Failed, match='crashed twice'):
    children.run([(_dies, (str(tmp_path / 'always'), True))])


def _mistake(marker):
  pathlib.Path(marker).touch()
  raise UserError('a mistake')


def test_a_mistake_ends_the_other_processes(tmp_path):
  began, others = time.monotonic(), set(children.multiprocessing.active_children())
  with pytest.raises(UserError, match='a mistake'):
    children.run([(_mistake, (str(tmp_path / 'marker'),)), (time.sleep, (60,))])
  assert time.monotonic() - began < 30
  assert not set(children.multiprocessing.active_children()) - others


def _in_session(leader: int) -> list[int]:
  """The live processes of a session."""
  live = []
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      state, _, _, session = path.read_text().rpartition(')')[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(session) == leader and state != 'Z':
      live.append(int(path.parent.name))
  return live


def _stop(process: subprocess.Popen, send, number: int, status: int):
  """Sends a signal to a command, and asserts that it prints one line and leaves no child."""
  began = time.monotonic()
  send(process.pid, number)
  _, err = process.communicate(timeout=60)
  assert process.returncode == status and len(err.splitlines()) == 1, err
  while _in_session(process.pid):
    assert time.monotonic() - began < 20, 'a child stays'
    time.sleep(0.1)


# Starts the resource tracker and two children, which sleep.
SLEEPS = """
import time
from bert_jax.commands import command
from bert_jax.planning import children
command.run_command(lambda argv: children.run([(time.sleep, (120,))] * 2))
"""


@pytest.mark.parametrize('send, number, status', [
    (os.kill, signal.SIGTERM, 75), (os.killpg, signal.SIGTERM, 75),
    (os.killpg, signal.SIGINT, 130)])
def test_a_signal_leaves_no_child(send, number, status):
  process = subprocess.Popen([sys.executable, '-c', SLEEPS], cwd=test_commands.ROOT, text=True,
                             stderr=subprocess.PIPE, start_new_session=True)
  while len(_in_session(process.pid)) < min(os.cpu_count(), 2) + 2:
    assert process.poll() is None
    time.sleep(0.05)
  _stop(process, send, number, status)


def _has_compiler(pid: int) -> bool:
  try:
    return 'libtpu' in pathlib.Path(f'/proc/{pid}/maps').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False


@pytest.mark.medium
def test_a_signal_to_a_compiling_plan_prints_one_line():
  """The signal reaches the children too, whose compiler would print a stack trace."""
  pytest.importorskip('libtpu')
  process = subprocess.Popen(**test_commands.command(
      'plan', '--config=tests/tiny.py', '--topology=v5e:2x2'), start_new_session=True)
  while not any(map(_has_compiler, set(_in_session(process.pid)) - {process.pid})):
    assert process.poll() is None
    time.sleep(0.2)
  time.sleep(2)  # the compiler sets its signal handlers
  _stop(process, os.killpg, signal.SIGTERM, 75)
