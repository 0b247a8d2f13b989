"""A config is resolved once: one file changes it, and the result is frozen."""

import ast
import pathlib

from etils import epath
from ml_collections import FrozenConfigDict
import pytest

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.runs import resolve
from bert_jax.runtime import storage
from bert_jax.tasks import task_list
from tests import conftest

PACKAGE = pathlib.Path(config_lib.__file__).parent
# They define configs, or copy one before they change it.
DEFINITIONS = ('config.py', 'config_fields.py')
# The config.json of published models and tokenizers is a config too, but not of a run.
OTHER_CONFIGS = ('interop/', 'data/tokenizers/')
CONFIGS = [config_lib.pretraining('tiny'), *map(config_lib.finetuning, task_list.ALL)]
FIELDS = {part for config in CONFIGS for name in config_lib.flat(config)
          for part in name.split('.')}
CHANGING = {'update', 'update_from_flattened_dict', 'unlocked', 'unlock', 'setdefault', 'pop'}


def root(node: ast.expr) -> str:
  """The name that an expression such as `config.data.train` or `c['data']` begins with."""
  while isinstance(node, ast.Attribute | ast.Subscript):
    node = node.value
  return node.id if isinstance(node, ast.Name) else ''


def configs_of(function: ast.AST) -> set[str]:
  """The names of configs in a function: parameters of that type, and names derived from them."""
  names = {'config', 'c', 'cfg'}
  for node in ast.walk(function):
    if isinstance(node, ast.arg) and node.annotation and 'ConfigDict' in ast.unparse(
        node.annotation):
      names.add(node.arg)
    if isinstance(node, ast.Assign | ast.For) and 'copy_and_resolve' in ast.unparse(node):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      names |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Call):
      value = node.value.func if isinstance(node.value, ast.Call) else node.value
      if root(value) in names and ast.unparse(value).split('.')[-1] in FIELDS | {'ConfigDict'}:
        names |= {x.id for x in node.targets if isinstance(x, ast.Name)}
  return names


def changes(source: str) -> list[str]:
  """The statements that change a field of a config."""
  statements = []
  for function in ast.walk(ast.parse(source)):
    if not isinstance(function, ast.FunctionDef):
      continue
    names = configs_of(function)
    for node in ast.walk(function):
      targets = (node.targets if isinstance(node, ast.Assign | ast.Delete) else
                 [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else [])
      parts = [x for target in targets for x in ast.walk(target)
               if isinstance(x, ast.Attribute | ast.Subscript)]
      if any(root(x) in names for x in parts) or (
          isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
          and node.func.attr in CHANGING and root(node.func.value) in names) or (
              isinstance(node, ast.Call) and ast.unparse(node.func) == 'setattr'
              and root(node.args[0]) in names):
        statements.append(ast.unparse(node))
  return statements


@pytest.mark.parametrize('line', [
    'config.train_steps = 1', 'config.data.train += "x"', "config['seed'] = 0", 'del config.seed',
    'd = config.data; d.train = "x"', 'config.data.update(train="x")', 'group.unlock()',
    'a, config.seed = 1, 2', 'copy = config.copy_and_resolve_references(); copy.seed = 1',
    'setattr(config, "seed", 1)', 'other.seed = 0'])
def test_a_change_of_a_config_is_detected(line):
  source = f'def f(config, group: ConfigDict, other: FrozenConfigDict):\n  {line}\n'
  assert changes(source)
  assert not changes('def f(config):\n  config = changed(config, {})\n  seed = config.seed\n')


def test_only_the_files_that_define_configs_change_them():
  sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob('*.py')}
  by_file = {path: changes(source) for path, source in sources.items()
             if 'ConfigDict' in source or not path.startswith(OTHER_CONFIGS)}
  assert not {path: lines for path, lines in by_file.items() if lines and path not in DEFINITIONS}


def test_changed_returns_a_frozen_copy():
  c = conftest.tiny_config('x')
  after = config_fields.changed(c, {'optimizer.learning_rate': 0.5, 'model.embedding_size': 8,
                                    'phases': ((12, 32, 8),)})
  assert isinstance(after, FrozenConfigDict) and isinstance(after.model, FrozenConfigDict)
  before, now = config_lib.flat(c), config_lib.flat(after)
  assert c.optimizer.learning_rate == 1e-3 and 'embedding_size' not in c.model
  assert {name: now[name] for name in now if now[name] != before.get(name)} == {
      'optimizer.learning_rate': 0.5, 'model.embedding_size': 8, 'phases': ((12, 32, 8),)}
  group = config_fields.changed(after.data, {'source': 'y'})
  assert group.source == 'y' and after.data.source == 'x'
  with pytest.raises(TypeError):  # a value of another type
    config_fields.changed(after, {'train_steps': 'many'})


def test_the_resolved_config_has_the_fields_that_devices_and_data_decide(corpus_file, tmp_path):
  c = conftest.tiny_config(corpus_file, **{'model.dtype': 'auto', 'model.vocab_size': 100_000})
  before, path = c.to_dict(), epath.Path(tmp_path)
  asked = resolve.checked(c, {'train_steps': 24})
  config, job, notes = resolve.resolve(
      asked, conftest.sub_mesh(1, 1), storage.Folder(path), {}, False)
  size = job.tokenizer.vocab_size
  assert c.to_dict() == before and isinstance(config, FrozenConfigDict)
  assert size < 100_000 and job.task.model.config.vocab_size == size
  expected = {'model.dtype': conftest.DTYPE, 'model.vocab_size': size, 'model.scan_unroll': 1,
              'optimizer.warmup_steps': 2}
  now = config_lib.flat(config)
  assert {name: now[name] for name, value in config_lib.flat(c).items()
          if now[name] != value} == expected
  assert notes == ['warmup of 4 of 24 steps scaled to 2 of 12']
