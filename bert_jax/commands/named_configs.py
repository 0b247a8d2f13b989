"""The configs of the package by name: --config=tiny."""

import pathlib
import re

from bert_jax.errors import require

_HOME = pathlib.Path(__file__).parents[1]


def _named() -> dict[str, pathlib.Path]:
  """{name: file} of the configs."""
  # A wheel has them inside the package, a checkout next to it.
  folders = filter(pathlib.Path.is_dir, (_HOME / 'configs', _HOME.parent / 'configs'))
  return {path.stem: path for folder in folders for path in sorted(folder.glob('*.py'))}


def names() -> list[str]:
  """The names of all configs, sorted."""
  return sorted(_named())


def _joined(argv: list[str]) -> list[str]:
  """Replaces `--config FILE` by `--config=FILE`."""
  joined, rest = [], iter(argv)
  for argument in rest:
    value = next(rest, None) if argument in ('--config', '-config') else None
    joined.append(argument if value is None else f'{argument}={value}')
  return joined


def with_paths(argv: list[str]) -> list[str]:
  """Replaces `--config FILE` and `--config=NAME` by `--config=FILE`.

  Raises:
    UserError: no config has this name.
  """
  def with_path(argument: str) -> str:
    match = re.fullmatch(r'(--?config=)(\w+)', argument)
    if not match or pathlib.Path(match[2]).is_file():
      return argument
    named = _named()
    require(match[2] in named, f'--config={match[2]} is not a file or a config of '
                               f'bert_jax: the configs are {", ".join(names())}')
    return f'{match[1]}{named[match[2]]}'

  return list(map(with_path, _joined(argv)))
