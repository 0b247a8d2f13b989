"""--help of every command: what it says, and exit status 0."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from bert_jax import config as config_lib
from bert_jax.commands import config_flag
from bert_jax.tasks import task_list

ROOT = pathlib.Path(__file__).parent.parent
HOME = ROOT / 'bert_jax'
COMMANDS = sorted(path.stem for path in HOME.glob('*.py') if 'run_command' in path.read_text()
                  and path.stem != 'errors')


def python(*arguments) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize('command, flag', [
    (('-m', 'bert_jax.main'), '--help'), (('-m', 'bert_jax.plan'), '-h'),
    (('-m', 'bert_jax.prepare'), '-help'), (('-m', 'bert_jax.predict'), '--help'),
    (('-m', 'bert_jax.convert'), '--helpshort'), (('-m', 'bert_jax.evaluate'), '--help'),
    (('-m', 'bert_jax.explore'), '-?'), (('-m', 'bert_jax.mine'), '--helpfull'),
    (('launch/sweep.py',), '--help'), (('launch/supervise.py',), '--help')])
def test_help_prints_the_flags_and_exits_with_0(command, flag):
  done = python(*command, '--model=x', flag) if 'predict' in command[-1] else python(*command, flag)
  assert done.returncode == 0 and not done.stderr, done.stderr
  source = ROOT / (command[-1] if len(command) == 1 else command[-1].replace('.', '/') + '.py')
  assert done.stdout.startswith(re.search('"""([^"\\n]*)', source.read_text())[1])
  # The flags of the command, and the flags that it shares with others.
  modules = {HOME / f'commands/{name}.py'
             for name in re.findall(r'\b(\w+_flags?)\.', source.read_text())}
  shared = filter(pathlib.Path.exists, modules)
  for name in re.findall(r"flags\.DEFINE_\w+\(\s*'(\w+)'",
                         ''.join(path.read_text() for path in (source, *shared))):
    assert re.search(rf'--(\[no\])?{name}:', done.stdout), name
  assert 'None' not in done.stdout
  assert (config_flag.help_text() in done.stdout) == (
      command[-1] in ('bert_jax.main', 'bert_jax.plan'))


def test_the_test_of_help_covers_every_command():
  tried = next(mark for mark in test_help_prints_the_flags_and_exits_with_0.pytestmark).args[1]
  assert {command[-1].removeprefix('bert_jax.') for command, _ in tried} == {
      *COMMANDS, 'launch/sweep.py', 'launch/supervise.py'}


def test_the_help_has_the_groups_of_the_configs():
  configs = [config_lib.pretraining('tiny'), *map(config_lib.finetuning, task_list.ALL)]
  groups = {name.rpartition('.')[0] for config in configs for name in config_lib.flat(config)}
  assert groups == set(config_flag.GROUPS)


def test_the_help_names_the_files_that_define_each_group():
  config = config_lib.flat(config_lib.pretraining('tiny'))
  for group, (_, files) in config_flag.GROUPS.items():
    source = ''.join(path.read_text() for name in files.split(', ')
                     for path in ([HOME / name] if name.endswith('.py') else
                                  sorted((HOME / name).glob('*.py'))))
    fields = [name.rpartition('.')[2] for name in config if name.rpartition('.')[0] == group]
    assert fields and all(re.search(rf'\b{field}\b', source) for field in fields), group


def test_the_example_of_the_help_overrides_existing_fields():
  words = shlex.split(re.search(r'python -m bert_jax.main.*\\\n.*', config_flag.help_text())[0])
  overrides = [word for word in words if word.startswith('--config.')]
  config = config_lib.pretraining('tiny')
  config_lib.check_overrides(config, overrides)
  assert len(overrides) == 2 and '--config=tiny' in words


@pytest.mark.parametrize('script', sorted(
    path.stem for path in (ROOT / 'launch').glob('*.sh') if path.read_text().startswith('#!')))
def test_help_of_a_script_has_no_side_effects(script, tmp_path):
  """It installs nothing and makes no folder named --help."""
  copy = tmp_path / 'launch'
  copy.mkdir()
  for path in (ROOT / 'launch').glob('*.sh'):
    (copy / path.name).write_text(path.read_text())
  for argument in ('--help', '-h'):
    done = subprocess.run(['bash', str(copy / f'{script}.sh'), argument], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.returncode == 0 and not done.stderr
    assert f'launch/{script}.sh' in done.stdout and 'shellcheck' not in done.stdout
  assert [path.name for path in tmp_path.iterdir()] == ['launch']
