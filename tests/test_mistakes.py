"""docs/mistakes.md: each command and its one line of output, to the letter."""

import contextlib
import pathlib
import re
import shlex
import shutil

import pytest

from tests import mistakes, typed

PAGE = (mistakes.ROOT / 'docs/mistakes.md').read_text()
TABLE = re.findall(r'^\| `(.+)` \| (.+) \|$', PAGE, re.M)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp('mistakes')
  with contextlib.chdir(path):  # the commands are typed there: paths are as short as a user's
    mistakes.make(path)
  return path


@pytest.fixture(scope='module')
def run():
  """Starts commands in processes that already hold their imports."""
  with typed.server() as run:
    yield run


def answer(run, folder, command: str) -> tuple[int, str]:
  """The exit status of a command, and its standard error."""
  module, *arguments = shlex.split(command)
  status = run(module, arguments, folder, folder / 'stderr')
  return status, (folder / 'stderr').read_text()


def test_each_stands_once_and_the_guide_counts_them():
  assert len({command for command, _ in TABLE}) == len(TABLE)
  guide = (mistakes.ROOT / 'docs/running.md').read_text()
  assert f'lists {len(TABLE)} mistakes' in guide


@pytest.mark.parametrize('command, line', TABLE)
def test_mistake(run, folder, command, line):
  before = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  status, error = answer(run, folder, command.removeprefix('python -m bert_jax.'))
  assert (status, error) == (2, f'bert_jax: {line}\n')
  after = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  assert after == before  # nothing is written over
  assert not list((folder / 'new').glob('checkpoints/*'))
  shutil.rmtree(folder / 'new', ignore_errors=True)
