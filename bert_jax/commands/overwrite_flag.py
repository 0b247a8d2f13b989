"""The flag --overwrite, shared by the commands that write an output."""

from absl import flags

from bert_jax import errors

_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace an existing output.')


def get(name: str, output: str | None) -> bool:
  """The value of the flag; raises UserError for --overwrite without an output `name`."""
  errors.require(output or not _OVERWRITE.value,
                 f'--overwrite has no effect here: give {name} too')
  return _OVERWRITE.value
