"""Trains what the config says: python -m bert_jax.main --config=configs/tiny.py --workdir=DIR"""

import pathlib
import runpy

from absl import flags
from ml_collections import config_flags

from bert_jax import config as config_lib
from bert_jax import errors

_CONFIG = config_flags.DEFINE_config_file(
    'config', help_string='A config file; its fields are overridden as --config.FIELD=VALUE.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')


def _explain(argv: list[str], error: Exception):
  """Names the nearest field where an override is misspelt."""
  del error
  path = next((a.partition('=')[2] for a in argv if a.startswith(('--config=', '-config='))), None)
  if path and pathlib.Path(path).is_file():
    config_lib.check_overrides(runpy.run_path(path)['get_config'](), argv[1:])


def main(argv: list[str]):
  """Flags in, one call."""
  del argv
  if flags.FLAGS['config'].value is None or _WORKDIR.value is None:
    raise errors.UserError('give both --config=configs/tiny.py (or another) and --workdir=DIR')
  try:
    config = _CONFIG.value
    config.copy_and_resolve_references()  # a file that cannot be loaded says so when it is used
  except OSError as e:
    raise errors.UserError(f'the config cannot be loaded: {e}') from e
  from bert_jax import run  # after the flags: JAX takes a while to import
  run.run(config, _WORKDIR.value)


if __name__ == '__main__':
  errors.run_command(main, _explain)
