"""The flag --config=FILE and its overrides --config.FIELD=VALUE, for the commands that have it."""

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
    'config', help_string='A config file, or the name of one of bert_jax: tiny. Its fields are '
    'overridden as --config.FIELD=VALUE.')
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
  # ml_collections would say so at length.
  errors.require(pathlib.Path(path).is_file(), f'--config={path} is no file')


def given() -> dict[str, Any]:
  """The fields that the command line overrides, and their values in the config file."""
  names = config_flags.get_override_values(flags.FLAGS['config'])
  return {name: flags.FLAGS[f'config.{name}'].default for name in names}


def explain(argv: list[str]):
  """Raises UserError with the mistake in the file, or the field nearest to a misspelt override."""
  paths = [a.partition('=')[2] for a in argv if a.startswith(('--config=', '-config='))]
  if not paths:
    return
  errors.require(len(paths) == 1, f'--config={paths[-1]} is given beside --config={paths[0]}: give '
                 'one of them')
  path = paths[0]
  _check_file(path)
  try:
    config = runpy.run_path(path)['get_config']()
  except errors.UserError:
    raise
  except Exception as e:  # whatever the code in it does
    reason = 'it has no get_config()' if isinstance(e, KeyError) else f'{type(e).__name__}: {e}'
    raise errors.UserError(f'--config={path} cannot be loaded: {reason}') from e
  config_lib.check_overrides(config, argv[1:])
