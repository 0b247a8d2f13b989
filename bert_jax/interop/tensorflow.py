"""Reads Google's TensorFlow checkpoints: bert_model.ckpt.*, bert_config.json, vocab.txt.

The names are those of google-research/bert (`modeling.py`, `run_pretraining.py`). Needs tensorflow,
an optional install.
"""

import re

from etils import epath

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.interop import families, huggingface, layout
from bert_jax.interop.pretrained import Pretrained, fitted
from bert_jax.runtime import storage

# Variables of the optimiser and the run.
_IGNORED = re.compile(r'(^|/)(adam_[mv]|global_step|AdamWeightDecayOptimizer(_\d+)?)$')
_NAMES = {'cls.predictions.output_bias': 'cls.predictions.bias',
          'cls.seq_relationship.output_weights': 'cls.seq_relationship.weight',
          'cls.seq_relationship.output_bias': 'cls.seq_relationship.bias'}


def _canonical(name: str) -> tuple[str, bool]:
  """(the canonical name of a variable, True if the variable is its transpose)."""
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
    UserError: tensorflow is not installed, or something is missing, surplus or of another shape.
  """
  try:
    import tensorflow as tf
  except ImportError as e:
    raise UserError(f'{directory} is a TensorFlow checkpoint: to read it, pip install '
                    'tensorflow-cpu') from e
  path = directory / 'bert_config.json'
  config = huggingface.config_from(storage.read_json(path), path)
  indices = sorted(directory.glob('*.index'))
  require(len(indices) == 1,
          f'{directory} holds {len(indices)} TensorFlow checkpoints (*.index): it has to '
          'hold one')
  try:
    reader = tf.train.load_checkpoint(str(indices[0]).removesuffix('.index'))
    variables = reader.get_variable_to_shape_map()
  except (tf.errors.OpError, ValueError) as e:
    raise UserError(f'{indices[0]} cannot be read: {e}') from e
  tensors = {}
  for variable in filter(lambda name: not _IGNORED.search(name), variables):
    try:
      x = reader.get_tensor(variable)
    except (tf.errors.OpError, IndexError, RuntimeError) as e:  # the last two where it is cut short
      raise UserError(f'{directory}: {variable} cannot be read: {e}') from e
    name, transposed = _canonical(variable)
    tensors[name] = x.T if transposed else x
  params = layout.from_tensors(tensors, config, (), directory)
  # The published folders do not say; a vocabulary with capitals is read as cased.
  tokenizer = fitted(tokenizer_reader.load(directory / 'vocab.txt'), config, directory)
  return Pretrained(config, params, tokenizer, facts={'source': str(directory)})
