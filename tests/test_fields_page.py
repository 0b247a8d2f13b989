"""docs/fields.md lists every config field with its default and the comment in the code.

After a change of a field, python -m tests.test_fields_page writes the page.
"""

import ast
from collections.abc import Iterable, Mapping
import dataclasses
import inspect
import io
import pathlib
import sys
import tokenize
from types import ModuleType
from typing import Any

import pytest

from bert_jax import config
from bert_jax.fields import finetuning_fields, pretraining_fields, run_fields
from bert_jax.model import architectures, bert_config
from bert_jax.objectives import masking
from bert_jax.runtime import console
from bert_jax.tasks import task_list
from bert_jax.training import lora, optimizer

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'fields.md'
GROUPS = {'masking': masking, 'optimizer': optimizer, 'lora': lora, 'model': bert_config}

_HEAD = """# Config fields

Every field, its default and its meaning. A file in `configs/` sets some of them, \
`--config.FIELD=VALUE` sets any of them ([config and overrides](running.md#config-and-overrides)). \
This page is made from the comments in the code.
"""


def _entries(source: str) -> Iterable[tuple[str, int, int]]:
  """Yields (name, first line, last line) of the entries of tables and of dataclasses."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Dict):
      for key, value in zip(node.keys, node.values):
        if isinstance(key, ast.Constant):
          yield key.value, key.lineno, value.end_lineno
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      yield node.target.id, node.lineno, node.end_lineno


def comments(module: ModuleType) -> dict[str, str]:
  """The comment of each entry in a file: after it, or else the lines above it."""
  source = inspect.getsource(module)
  of_line, alone = {}, set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      of_line[token.start[0]] = token.string.lstrip('# ')
      if not token.line[:token.start[1]].strip():
        alone.add(token.start[0])
  result = {}
  for name, first, last in _entries(source):
    lines = [of_line[i] for i in range(first, last + 1) if i in of_line and i not in alone]
    above = first
    while not lines and above - 1 in alone:
      above -= 1
    lines = lines or [of_line[i] for i in range(above, first)]
    if lines:
      result.setdefault(name, ' '.join(lines))
  return result


def comment(name: str, *modules: ModuleType) -> str:
  """The comment of a field, from the first of the modules that has one."""
  group, _, field = name.rpartition('.')
  places = [(name, module) for module in modules]
  places += [(field, x) for x in (*modules, GROUPS[group])] if group in GROUPS else []
  for key, module in places:
    if text := comments(module).get(key):
      return text.rstrip('.')
  raise ValueError(f'{name} has no comment')


def _shown(value: Any) -> str:
  """A default as a flag has it; '' as two quotation marks."""
  is_names = isinstance(value, tuple) and value and isinstance(value[0], str)
  return f'`{",".join(value)}`' if is_names else f'`{value}`' if value != '' else "`''`"


def _table(rows: Iterable[tuple[str, ...]], *columns: str) -> str:
  return '\n' + console.markdown_table([columns, *rows]) + '\n'


def _fields(values: Mapping[str, Any], *modules: ModuleType) -> str:
  return _table([(f'`{name}`', _shown(value), comment(name, *modules))
                 for name, value in values.items()], 'field', 'default', 'meaning')


def _without_model(task: str) -> dict[str, Any]:
  return {name: field.default for name, field in config.fields(task).items()
          if not name.startswith('model.') and name != 'task'}


def _defined_in(kind: type) -> list[ModuleType]:
  """The modules of a class and of the classes that it extends."""
  return [inspect.getmodule(x) for x in kind.__mro__ if x.__module__.startswith('bert_jax')]


def page() -> str:
  """The content of docs/fields.md."""
  pretraining = _without_model('pretrain')
  of_task = {task: _without_model(task) for task in task_list.ALL}
  first = of_task['sequence_classification']
  common = {name: value for name, value in first.items()
            if all(name in values for values in of_task.values())}
  in_both = [name for name in run_fields.FIELDS if name in pretraining and name in common]
  text = _HEAD + '\n## Every run\n' + _table(
      [(f'`{name}`', _shown(pretraining[name]), _shown(common[name]), comment(name, run_fields))
       for name in in_both], 'field', 'pretraining', 'fine-tuning', 'meaning')
  text += '\n## Pretraining\n' + _fields(
      {name: value for name, value in pretraining.items() if name not in in_both},
      pretraining_fields)
  text += '\n## Fine-tuning\n' + _fields(
      {name: value for name, value in common.items() if name not in in_both}, finetuning_fields)
  for task, values in of_task.items():
    own = {name: value for name, value in values.items() if common.get(name, ...) != value}
    text += f'\n### {task}\n' + _fields(own, *_defined_in(task_list.ALL[task].files),
                                        finetuning_fields, run_fields)
  base = dataclasses.asdict(bert_config.BertConfig())
  text += '\n## The model\n' + _fields({f'model.{name}': x for name, x in base.items()})
  for name, architecture in architectures.ALL.items():
    own = {f'model.{field}': value
           for field, value in dataclasses.asdict(architecture.config()).items()
           if base.get(field, ...) != value and field != 'architecture'}
    if own:
      text += f'\n### {name}\n' + _fields(own, *_defined_in(architecture.config))
  return text


def test_the_page_has_every_field_with_its_comment():
  assert PAGE.read_text() == page(), 'run python -m tests.test_fields_page'


def test_a_field_without_a_comment_is_an_error():
  with pytest.raises(ValueError, match='masking.nothing has no comment'):
    comment('masking.nothing')


if __name__ == '__main__':
  PAGE.write_text(page())
  sys.exit()
