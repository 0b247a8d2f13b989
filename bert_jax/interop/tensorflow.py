"""Reads Google's TensorFlow checkpoints: bert_model.ckpt.*, bert_config.json, vocab.txt.

The variables have the names of google-research/bert (`modeling.py`,
`run_pretraining.py`). Reading needs tensorflow, which is an optional dependency.
"""

import re

from etils import epath

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.interop import families, huggingface, layout
from bert_jax.interop.pretrained import Pretrained, fitted
from bert_jax.runtime import storage

# Variables of the optimizer and of the run.
_IGNORED = re.compile(r'(^|/)(adam_[mv]|global_step|AdamWeightDecayOptimizer(_\d+)?)$')
_NAMES = {'cls.predictions.output_bias': 'cls.predictions.bias',
          'cls.seq_relationship.output_weights': 'cls.seq_relationship.weight',
          'cls.seq_relationship.output_bias': 'cls.seq_relationship.bias'}


def _canonical(name: str) -> tuple[str, bool]:
  """Returns (canonical name, True if the tensor is the transpose of the variable)."""
  name = re.sub(r'/layer_(\d+)', r'/layer/\1', name).replace('/', '.')
  name = families.BERT.canonical(name)
  if name.endswith('.kernel'):
    return name.removesuffix('kernel') + 'weight', True
  if re.fullmatch(r'embeddings\.\w+_embeddings', name):
    return name + '.weight', False
  return _NAMES.get(name, name), False


def load(directory: epath.Path) -> Pretrained:
  """Reads a TensorFlow checkpoint of google-research/bert.

  Raises:
    UserError: tensorflow is not installed, the checkpoint is damaged, or its tensors do
      not fit its config.
  """
  # Not at the top: everything else works without it.
  try:
    import tensorflow as tf
  except ImportError as e:
    raise UserError(f'{directory} is a TensorFlow checkpoint: to read it, pip install '
                    'tensorflow-cpu') from e
  path = directory / 'bert_config.json'
  config = huggingface.config_from(storage.read_json(path), path)
  indices = storage.matching(directory, '*.index')
  require(len(indices) == 1,
          f'{directory} contains {len(indices)} TensorFlow checkpoints (*.index), not '
          'one')
  try:
    reader = tf.train.load_checkpoint(str(indices[0]).removesuffix('.index'))
    variables = reader.get_variable_to_shape_map()
  except (tf.errors.OpError, ValueError) as e:
    raise UserError(f'{indices[0]} cannot be read: {e}') from e
  tensors = {}
  for variable in [name for name in variables if not _IGNORED.search(name)]:
    try:
      x = reader.get_tensor(variable)
    # A truncated file raises IndexError or RuntimeError.
    except (tf.errors.OpError, IndexError, RuntimeError) as e:
      raise UserError(f'{directory}: {variable} cannot be read: {e}') from e
    name, transposed = _canonical(variable)
    tensors[name] = x.T if transposed else x
  params = layout.from_tensors(tensors, config, (), directory)
  # Published folders do not say whether they are cased: a vocabulary with capital letters
  # is cased.
  tokenizer = fitted(tokenizer_reader.load(directory / 'vocab.txt'), config, directory)
  return Pretrained(config, params, tokenizer, facts={'source': str(directory)})
