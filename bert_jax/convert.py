"""Converts a model: python -m bert_jax.convert --input=DIR --output=DIR --to=bert_jax"""

import functools
import os

from absl import flags

from bert_jax import errors
from bert_jax.commands import checkpoint_flags, command, overwrite_flag

_INPUT = flags.DEFINE_string('input', None, checkpoint_flags.ANY_MODEL)
_OUTPUT = flags.DEFINE_string('output', None, 'A new folder.')
_TO = flags.DEFINE_string(
    'to', None,
    'huggingface, bert_jax, sentence_transformers (the encoder and its pooling), onnx '
    '(needs onnx and onnxruntime), or stablehlo (only the encoder).')
_OPSET = flags.DEFINE_integer(
    'opset', None, "The version of ONNX's operators, by default 18.")
_QUANTIZE = flags.DEFINE_enum(
    'quantize', None, ['int8'],
    'With --to=onnx: also write onnx/model_quantized.onnx, and compare the two files.')
_EVAL = flags.DEFINE_string(
    'eval', '', 'With --quantize: labeled examples of a classifier with one label for each '
    'text, to compare accuracies, or JSON lines with a "text", to compare outputs.')
_FIELDS = flags.DEFINE_list(
    'fields', [], 'With --eval: fields of `data` that say how to read it, such as '
    'format=glue/sst2.')
_MOST_LOST = flags.DEFINE_float(
    'most_lost', None,
    'With --quantize: the largest accepted loss of accuracy, or of the mean cosine of '
    'the outputs if --eval has no labeled examples; by default 0.05.')
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
  _check_quantize()
  overwrite = overwrite_flag.get('--output', _OUTPUT.value)
  from bert_jax.interop import conversion  # after the flags: JAX is slow to import
  from bert_jax.runtime import storage
  # A hub name is not a path, and with --push an existing --output is only uploaded.
  writes = not _VERIFY.value and (overwrite or not _PUSH.value)
  source = _INPUT.value if writes and os.path.exists(_INPUT.value) else None
  with storage.exclusive('--output', _OUTPUT.value, source):
    # A mistake in the examples must end the command before it writes a file.
    compared = _compared() if _QUANTIZE.value else None
    finish = None
    if compared:
      from bert_jax.evaluation import quantized
      finish = functools.partial(quantized.quantize, *compared, most_lost=_MOST_LOST.value)
    conversion.convert(_INPUT.value, _OUTPUT.value, _TO.value, verify_only=_VERIFY.value,
                       step=checkpoint_flags.STEP.value,
                       allow_older=checkpoint_flags.ALLOW_OLDER.value, push=_PUSH.value,
                       overwrite=overwrite, opset=_OPSET.value, finish=finish)


def _check_quantize():
  """Raises UserError for a flag without effect."""
  is_onnx = _TO.value == 'onnx' and not _VERIFY.value
  errors.require(is_onnx or not _QUANTIZE.value,
                 '--quantize has no effect here: it is for --to=onnx without --verify')
  for flag, value in (('eval', _EVAL.value), ('fields', _FIELDS.value),
                      ('most_lost', _MOST_LOST.value is not None)):
    errors.require(_QUANTIZE.value or not value,
                   f'--{flag} has no effect here: it is for --quantize=int8')


def _compared():
  """The model and the texts on which the int8 file is compared with the float32 file."""
  from bert_jax.evaluation import quantized
  from bert_jax.interop import load
  from bert_jax.interop.onnx_export import folder
  model = folder.exported(load.load(_INPUT.value, checkpoint_flags.STEP.value,
                                    checkpoint_flags.ALLOW_OLDER.value))
  return model, quantized.Texts(model, _INPUT.value, _EVAL.value, _FIELDS.value)


if __name__ == '__main__':
  command.run_command(_main)
