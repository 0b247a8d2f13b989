"""The flag --config=FILE or NAME, and its overrides --config.FIELD=VALUE."""

import ast
from collections.abc import Callable
import csv
import pathlib
import re
import textwrap
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from bert_jax import config as config_lib
from bert_jax import config_files, errors
from bert_jax.commands import command

_HOME = pathlib.Path(__file__).parents[1]
_EXAMPLE = """
Override any field of the config:
  python -m bert_jax.main --config=tiny --workdir=runs/mine --config.train_steps=500 \\
      --config.optimizer.learning_rate=1e-3"""
# {group: (its content, the files that explain its fields)}; '' = fields without a group.
GROUPS = {
    '': ('length, rows, evaluations, checkpoints, initial model, devices', 'fields/'),
    'data': ('the text or the examples, and the vocabulary', 'fields/, tasks/'),
    'model': ('architecture, sizes, dropout, precision, memory', 'model/bert_config.py'),
    'masking': ('which tokens a pretraining run predicts', 'objectives/masking.py'),
    'optimizer': ('learning rate and schedule, weight decay', 'training/optimizer.py'),
    'lora': ('low-rank factors on a frozen encoder', 'training/lora.py'),
    'mesh': ('the devices on each axis', 'fields/'),
}


class TupleParser(flags.ArgumentParser):
  """Parses overrides that are tuples: --config.data.labels=a,b,c.

  It reads Python tuples, or integers and strings separated by commas. The parser of
  ml_collections reads a,b,c as one string, and joins the values of a repeated flag. Here
  the last value wins, as for all other flags. Nested or unclosed brackets that Python
  cannot parse raise a ValueError.
  """

  def parse(self, argument: Any) -> tuple:
    if not isinstance(argument, str):  # the default
      return argument
    text = argument.strip()
    # A single quote also begins a Python literal; a double quote may begin a CSV field.
    if text[:1] in ('(', '[', "'"):
      try:
        value = ast.literal_eval(text)
        return tuple(value) if isinstance(value, tuple | list) else (value,)
      except (ValueError, SyntaxError) as e:
        # (a,b,c) with unquoted strings is clear enough; nested brackets are not.
        inner = text[1:-1]
        if text[0] + text[-1] not in ('()', '[]') or re.search(r'[\[\]()]', inner):
          raise ValueError(f'{text} is not a list: give a,b,c') from e
        text = inner
    # csv, because a label may contain a comma between double quotes.
    elements = next(csv.reader([text], skipinitialspace=True), [])
    return tuple(int(x) if re.fullmatch(r'0|-?[1-9]\d*', x) else x
                 for x in map(str.strip, elements))


config_flags.register_flag_parser_for_type(tuple, TupleParser())
_CONFIG = config_flags.DEFINE_config_file(
    'config',
    help_string='A config file, or the name of a config of bert_jax, such as tiny. '
    'Override a field by --config.FIELD=VALUE.')
flags.FLAGS['config'].default_as_str = ''  # --help would show None


# ---- Names and help --------------------------------------------------------------------


def _joined(argv: list[str]) -> list[str]:
  """Replaces `--config FILE` with `--config=FILE`."""
  joined, rest = [], iter(argv)
  for argument in rest:
    value = next(rest, None) if argument in ('--config', '-config') else None
    joined.append(argument if value is None else f'{argument}={value}')
  return joined


def with_paths(argv: list[str]) -> list[str]:
  """Replaces `--config FILE` and `--config=NAME` with `--config=FILE`.

  Raises:
    UserError: no config has this name.
  """
  def with_path(argument: str) -> str:
    match = re.fullmatch(r'(--?config=)(\w+)', argument)
    return f'{match[1]}{config_files.find(match[2])}' if match else argument

  return list(map(with_path, _joined(argv)))


def help_text() -> str:
  """An example, the groups of fields with their files, and the names of the configs."""
  lines = [_EXAMPLE, '', f'Fields of the config, explained in these files of {_HOME}:']
  for group, (content, file) in GROUPS.items():
    flag = f'--config.{group}.FIELD' if group else '--config.FIELD'
    lines.append(f'  {flag:<25} {content} ({file})')
  configs = textwrap.fill(f'Configs: {", ".join(config_files.named())}', 100)
  return '\n'.join([*lines, '', configs])


# ---- The config ------------------------------------------------------------------------


def is_given() -> bool:
  """True if the command line has a --config."""
  return bool(flags.FLAGS['config'].present)


def get() -> ConfigDict:
  """The config with its overrides; raises UserError if the file cannot be loaded."""
  path = config_flags.get_config_filename(flags.FLAGS['config'])
  _check_file(path)
  # ml_collections keeps an error of the file to itself until the first field is read.
  return _CONFIG.value if isinstance(_CONFIG.value, ConfigDict) else config_files.load(path)


def _check_file(path: str):
  # The message of ml_collections has many lines.
  errors.require(pathlib.Path(path).is_file(), f'--config={path} is not a file')


def given() -> dict[str, Any]:
  """{field: value in the config file} for the fields that the command line overrides."""
  overrides = config_flags.get_override_values(flags.FLAGS['config'])
  return {name: flags.FLAGS[f'config.{name}'].default for name in overrides}


def explain(argv: list[str]):
  """Raises UserError for a mistake in the config file or for a misspelled field."""
  paths = [a.partition('=')[2] for a in argv if a.startswith(('--config=', '-config='))]
  if not paths:
    return
  errors.require(len(paths) == 1, f'--config={paths[0]} and --config={paths[-1]}: give '
                                  'one of them')
  path = paths[0]
  _check_file(path)
  config_lib.check_overrides(config_files.load(path), argv[1:])


def run_command(main: Callable[[list[str]], None]):
  """Runs a command that takes --config: see `command.run_command`."""
  command.run_command(main, explain, with_paths, more_help=help_text)
