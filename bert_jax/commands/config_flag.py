"""The flag --config=FILE and its overrides --config.FIELD=VALUE."""

import pathlib
import runpy
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from bert_jax import config as config_lib
from bert_jax import errors
from bert_jax.commands import tuple_flag

config_flags.register_flag_parser_for_type(tuple, tuple_flag.Parser())
_CONFIG = config_flags.DEFINE_config_file(
    'config',
    help_string='A config file, or the name of a config of bert_jax, such as tiny. '
    'Override a field by --config.FIELD=VALUE.')
flags.FLAGS['config'].default_as_str = ''  # --help would show None


def is_given() -> bool:
  """True if the command line has a --config."""
  return flags.FLAGS['config'].value is not None


def get() -> ConfigDict:
  """The config with its overrides; raises UserError if the file cannot be loaded."""
  path = config_flags.get_config_filename(flags.FLAGS['config'])
  _check_file(path)
  return _CONFIG.value


def _check_file(path: str):
  # The message of ml_collections has many lines.
  errors.require(pathlib.Path(path).is_file(), f'--config={path} is not a file')


def given() -> dict[str, Any]:
  """{field: value in the config file} for the fields that the command line overrides."""
  names = config_flags.get_override_values(flags.FLAGS['config'])
  return {name: flags.FLAGS[f'config.{name}'].default for name in names}


def explain(argv: list[str]):
  """Raises UserError with the mistake in the file, or with the field next to a typo."""
  paths = [a.partition('=')[2] for a in argv if a.startswith(('--config=', '-config='))]
  if not paths:
    return
  errors.require(len(paths) == 1, f'--config={paths[0]} and --config={paths[-1]}: give '
                                  'one of them')
  path = paths[0]
  _check_file(path)
  try:
    config = runpy.run_path(path)['get_config']()
  except errors.UserError:
    raise
  except Exception as e:  # a config file is code, which may raise anything
    reason = ('it has no get_config()' if isinstance(e, KeyError)
              else f'{type(e).__name__}: {e}')
    raise errors.UserError(f'--config={path} cannot be loaded: {reason}') from e
  config_lib.check_overrides(config, argv[1:])
