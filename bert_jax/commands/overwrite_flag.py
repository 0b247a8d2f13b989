"""The flag --overwrite of the commands that write an output."""

from absl import flags

from bert_jax import errors

_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace an output that is there already.')


def get(name: str, output: str | None) -> bool:
  """The flag; raises UserError if it is given and the flag `name` names no output to replace."""
  errors.require(output or not _OVERWRITE.value, f'--overwrite has no effect here: give {name} too')
  return _OVERWRITE.value
