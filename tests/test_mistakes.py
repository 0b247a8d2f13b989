"""docs/mistakes.md: what is typed, and the one line that it gets, to the letter."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import runpy
import shlex
import shutil
import sys

import pytest

from tests import mistakes

PAGE = (mistakes.ROOT / 'docs/mistakes.md').read_text()
TABLE = re.findall(r'^\| `(.+)` \| (.+) \|$', PAGE, re.M)


def _type(words: list[str], out: str):
  """Runs a command as its own process would, in one that has imported everything already."""
  sys.argv = [f'bert_jax/{words[0]}.py', *words[1:]]
  # The real descriptors: what libraries in C++ write counts too.
  with open(out + '.out', 'w') as told, open(out, 'w') as error:
    os.dup2(told.fileno(), 1)
    os.dup2(error.fileno(), 2)
  sys.stdout = open(1, 'w', closefd=False)
  sys.stderr = open(2, 'w', closefd=False)
  runpy.run_module(f'bert_jax.{words[0]}', run_name='__main__', alter_sys=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  made = tmp_path_factory.mktemp('mistakes')
  with contextlib.chdir(made):  # the commands are typed there: paths are as short as a user's
    mistakes.make(made)
  return made


@pytest.fixture(scope='module')
def server():
  """Starts processes that have imported what the commands import, but not asked for a device."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload([
      'bert_jax.runs.run', 'bert_jax.interop.conversion', 'bert_jax.inference.predictions',
      'bert_jax.data.preparation', 'bert_jax.planning.planner', 'tests.test_mistakes'])
  before = os.environ.get('PYTHONPATH')
  os.environ['PYTHONPATH'] = str(mistakes.ROOT)  # where the server, too, finds them
  yield context
  if before is None:
    del os.environ['PYTHONPATH']
  else:
    os.environ['PYTHONPATH'] = before


def typed(server, folder, command: str) -> tuple[int, str]:
  """The exit status of a command and what it wrote on standard error."""
  with contextlib.chdir(folder):
    process = server.Process(target=_type, args=(shlex.split(command), str(folder / 'stderr')))
    process.start()
    process.join(300)
  return process.exitcode, (folder / 'stderr').read_text()


def test_each_stands_once_and_the_guide_counts_them():
  assert len({command for command, _ in TABLE}) == len(TABLE)
  guide = (mistakes.ROOT / 'docs/running.md').read_text()
  assert f'lists {len(TABLE)} mistakes' in guide


@pytest.mark.parametrize('command, line', TABLE)
def test_mistake(server, folder, command, line):
  before = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  status, error = typed(server, folder, command.removeprefix('python -m bert_jax.'))
  assert (status, error) == (2, f'bert_jax: {line}\n')
  after = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  assert after == before  # nothing is written over
  assert not list((folder / 'new').glob('checkpoints/*'))
  shutil.rmtree(folder / 'new', ignore_errors=True)
