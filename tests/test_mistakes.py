"""tests/mistakes.md: each command prints exactly its line, and each remedy works."""

import contextlib
import multiprocessing
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from tests import mistakes, remedies, typed, typed_here

TABLE = re.findall(r'^\| `(.+)` \| (.+) \|$',
                   (mistakes.ROOT / 'tests/mistakes.md').read_text(), re.M)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp('mistakes')
  with contextlib.chdir(path):  # commands run in this folder: paths are as short as a user's
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


def test_the_table_has_no_duplicates_and_the_docs_show_twenty_mistakes():
  assert len({command for command, _ in TABLE}) == len(TABLE)
  page = (mistakes.ROOT / 'docs/mistakes.md').read_text()
  shown = re.findall(r'^\| (.+) \| (.+) \|$', page, re.M)[2:]  # without the head
  assert len(shown) == 20 and {line for line, _ in shown} <= {line for _, line in TABLE}


@pytest.mark.parametrize('command, line', TABLE)
def test_a_mistake_prints_its_line_and_changes_no_run(run, folder, command, line):
  shutil.rmtree(folder / 'new', ignore_errors=True)
  before = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  status, error = answer(run, folder, command.removeprefix('python -m bert_jax.'))
  assert (status, error) == (2, f'bert_jax: {line}\n')
  after = sorted((p, p.stat().st_mtime_ns) for p in (folder / 'run').rglob('[!.]*') if p.is_file())
  assert after == before  # nothing is overwritten
  assert not list((folder / 'new').glob('checkpoints/*'))


@pytest.fixture(scope='module')
def type_here(run, folder):
  """Runs all commands in one process; see `typed_here`."""
  ours, theirs = multiprocessing.Pipe()
  process = multiprocessing.get_context('forkserver').Process(
      target=typed_here.serve, args=(theirs, str(folder)))
  process.start()

  def type_it(command: str, checks_only: bool = False) -> tuple[int, str]:
    ours.send((command, checks_only))
    assert ours.poll(300), command
    return ours.recv()

  yield type_it
  ours.send(None)
  process.join()


@contextlib.contextmanager
def undone(folder: pathlib.Path, spare: pathlib.Path):
  """Afterwards removes new files from the folder and restores its run."""
  shutil.rmtree(folder / 'new', ignore_errors=True)
  before = set(folder.iterdir())
  shutil.copytree(folder / 'run', spare / 'run')
  try:
    yield
  finally:
    shutil.rmtree(folder / 'run')
    shutil.move(spare / 'run', folder / 'run')
    for path in set(folder.iterdir()) - before:
      shutil.rmtree(path) if path.is_dir() else path.unlink()


# A plan compiles a step, which takes seconds.
SLOW = [command for command, _ in TABLE if ' bert_jax.plan' in command]


@pytest.mark.medium
@pytest.mark.parametrize('command, line', [
    pytest.param(command, line, marks=pytest.mark.slow if command in SLOW else ())
    for command, line in TABLE])
def test_the_remedy_in_the_line_works(type_here, folder, tmp_path, command, line):
  command = command.removeprefix('python -m bert_jax.')
  named = remedies.of(command, line)
  assert named is not None, 'what does the line tell people to do? Add it to tests/remedies.py'
  mistake = (2, f'bert_jax: {line}\n')
  # If a run refuses the mistake before it opens its data, its remedy is checked up to there.
  with undone(folder, tmp_path):
    checks_only = command.startswith('main') and type_here(command, True) == mistake
  for remedy in named:
    mended = remedy.command.replace('--to=huggingface', '--to=bert_jax')  # needs no slow imports
    if command.startswith('main') and not checks_only and '.data.' not in mended:
      mended += ' --config.data.source=corpus.txt'  # the built-in corpus is slow
    with undone(folder, tmp_path):
      if remedy.before.startswith('!'):
        subprocess.run(remedy.before[1:], shell=True, check=True, cwd=folder)
      elif remedy.before:
        assert type_here(remedy.before)[0] == 0
      status, error = type_here(mended, checks_only)
    past_it = error.startswith('bert_jax: ') and error != mistake[1]
    assert status == 0 or remedy.may_fail_later and past_it, (mended, error)
