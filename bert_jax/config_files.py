"""Finds and loads config files: configs/tiny.py, or a name such as tiny."""

import pathlib
import runpy

from ml_collections import ConfigDict

from bert_jax.errors import UserError, require

_HOME = pathlib.Path(__file__).parent


def named() -> dict[str, pathlib.Path]:
  """{name: file} of the configs of bert_jax, sorted."""
  # A wheel has them inside the package, a checkout next to it.
  folders = filter(pathlib.Path.is_dir, (_HOME / 'configs', _HOME.parent / 'configs'))
  paths = [path for folder in folders for path in folder.glob('*.py')]
  return {path.stem: path for path in sorted(paths)}


def find(name: str) -> pathlib.Path:
  """Returns the config file with this name or path; raises UserError if none exists."""
  path = pathlib.Path(name)
  if path.is_file():
    return path
  configs = named()
  require(path.suffix == '.py' or name in configs,
          f'--config={name} is not a file or a config of bert_jax: the configs are '
          f'{", ".join(configs)}')
  require(name in configs, f'--config={name} is not a file')
  return configs[name]


def load(path: str | pathlib.Path) -> ConfigDict:
  """Returns the config of a file; raises UserError if it cannot be loaded."""
  try:
    names = runpy.run_path(str(path))
    require('get_config' in names,
            f'--config={path} cannot be loaded: it has no get_config()')
    config = names['get_config']()
    require(isinstance(config, ConfigDict), f'--config={path} cannot be loaded: its get_config() '
            f'returns {type(config).__name__}, not a ConfigDict')
    return config
  except UserError:
    raise
  except Exception as e:  # a config file is code, which may raise anything
    raise UserError(f'--config={path} cannot be loaded: {type(e).__name__}: {e}') from e
