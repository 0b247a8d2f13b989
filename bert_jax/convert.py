"""Checkpoints in and out: python -m bert_jax.convert --input=DIR --output=DIR --to=huggingface"""

from absl import flags

from bert_jax import errors

_INPUT = flags.DEFINE_string(
    'input', None, 'A workdir, a checkpoint of bert_jax, a Hugging Face folder or hub name, or a '
    'TensorFlow checkpoint of google-research/bert.')
_OUTPUT = flags.DEFINE_string('output', None, 'A new folder.')
_TO = flags.DEFINE_string('to', None, 'huggingface, bert_jax, or stablehlo (the encoder alone).')
_VERIFY = flags.DEFINE_bool(
    'verify', False, 'Check only: is --input sound? With --output: are they equal? With --to: can '
    'it be converted?')
_STEP = flags.DEFINE_integer(
    'step', None, 'Of the checkpoint of a workdir; by default the best, or else the newest.')
_ALLOW_OLDER = flags.DEFINE_bool(
    'allow_older', False, 'Where that checkpoint is damaged, take the next sound one.')


def main(argv: list[str]):
  """Flags in, one call."""
  del argv
  if not _INPUT.value:
    raise errors.UserError('give --input=DIR, the model to convert')
  from bert_jax.interop import conversion  # after the flags: JAX takes a while to import
  conversion.convert(_INPUT.value, _OUTPUT.value, _TO.value, verify_only=_VERIFY.value,
                     step=_STEP.value, allow_older=_ALLOW_OLDER.value)


if __name__ == '__main__':
  errors.run_command(main)
