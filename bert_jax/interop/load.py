"""Any model by its folder or its name on the Hugging Face hub."""

import re

from etils import epath

from bert_jax.errors import UserError
from bert_jax.interop import huggingface
from bert_jax.interop import native
from bert_jax.interop.pretrained import Pretrained

_HUB_FILES = ['config.json', '*.safetensors', 'model.safetensors.index.json', 'vocab.txt',
              'tokenizer.json', 'tokenizer_config.json', 'spiece.model']


def _from_hub(name: str) -> epath.Path:
  import huggingface_hub  # only here: all else works without it
  try:
    return epath.Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
  except Exception as e:  # its own errors, and those of the network underneath
    raise UserError(f'{name} is no folder here, and no model of that name could be fetched from '
                    f'the Hugging Face hub: {e}') from e


def load(directory: str) -> Pretrained:
  """Loads a model.

  Args:
    directory: a workdir that main has trained, a checkpoint of bert_jax, a folder in the Hugging
      Face layout, a TensorFlow checkpoint of google-research/bert, or a name on the hub.

  Raises:
    UserError: there is no model, or something is wrong with it.
  """
  folder = epath.Path(directory)
  if not folder.exists() and re.fullmatch(r'[\w.-]+/[\w.-]+', directory):
    folder = _from_hub(directory)
  if (folder / native.WORKDIR_FILE).exists():
    return native.load_workdir(folder)
  if (folder / native.CHECKPOINT_FILE).exists():
    return native.load(folder)
  if (folder / 'config.json').exists():
    return huggingface.load(folder)
  if (folder / 'bert_config.json').exists():
    from bert_jax.interop import tensorflow  # an optional install
    return tensorflow.load(folder)
  raise UserError(f'{directory} holds no model: none of {native.WORKDIR_FILE} (a workdir), '
                  f'{native.CHECKPOINT_FILE} (a checkpoint of bert_jax), config.json (Hugging '
                  'Face), bert_config.json (TensorFlow) is there')
