"""The flag --config=FILE and its overrides --config.FIELD=VALUE, for the commands that have it."""

import pathlib
import runpy

from absl import flags
from ml_collections import ConfigDict
from ml_collections import config_flags

from bert_jax import config as config_lib
from bert_jax import errors

_CONFIG = config_flags.DEFINE_config_file(
    'config', help_string='A config file; its fields are overridden as --config.FIELD=VALUE.')


def is_given() -> bool:
  """Whether there is a --config."""
  return flags.FLAGS['config'].value is not None


def get() -> ConfigDict:
  """The config with its overrides.

  Raises:
    UserError: the file cannot be loaded.
  """
  config = _CONFIG.value
  try:
    config.copy_and_resolve_references()  # a file that cannot be loaded says so when it is used
  except OSError as e:
    raise errors.UserError(f'the config cannot be loaded: {e}') from e
  return config


def explain(argv: list[str], error: Exception):
  """Names the nearest field where an override is misspelt."""
  del error
  path = next((a.partition('=')[2] for a in argv if a.startswith(('--config=', '-config='))), None)
  if path and pathlib.Path(path).is_file():
    config_lib.check_overrides(runpy.run_path(path)['get_config'](), argv[1:])
