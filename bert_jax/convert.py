"""Converts a model: python -m bert_jax.convert --input=DIR --output=DIR --to=bert_jax"""

from absl import flags

from bert_jax import errors
from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_INPUT = flags.DEFINE_string(
    'input', None,
    'A workdir, a checkpoint of bert_jax, a Hugging Face or sentence-transformers '
    'folder, a hub name, or a TensorFlow checkpoint of google-research/bert.')
_OUTPUT = flags.DEFINE_string('output', None, 'A new folder.')
_TO = flags.DEFINE_string(
    'to', None,
    'huggingface, bert_jax, sentence_transformers (the encoder and its pooling), onnx '
    '(needs onnx and onnxruntime), or stablehlo (only the encoder).')
_OPSET = flags.DEFINE_integer(
    'opset', None, "The version of ONNX's operators, by default 18.")
_VERIFY = flags.DEFINE_bool(
    'verify', False,
    'Write nothing. Check that --input is intact; with --output: that both are equal; '
    'with --to: that it can be converted.')
_PUSH = flags.DEFINE_string(
    'push', '',
    'ORGANIZATION/NAME on the Hugging Face hub: upload the result, and each checkpoint '
    'of a workdir as a branch.')


def _main(argv: list[str]):
  errors.require(bool(_INPUT.value), 'give --input=DIR, the model to convert')
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  from bert_jax.interop import conversion  # after the flags: JAX is slow to import
  from bert_jax.runtime import storage
  with storage.exclusive('--output', _OUTPUT.value):
    conversion.convert(_INPUT.value, _OUTPUT.value, _TO.value, verify_only=_VERIFY.value,
                       step=checkpoint_flags.STEP.value,
                       allow_older=checkpoint_flags.ALLOW_OLDER.value, push=_PUSH.value,
                       overwrite=overwrite, opset=_OPSET.value)


if __name__ == '__main__':
  command.run_command(_main)
