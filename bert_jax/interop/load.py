"""Loads a model of any format by its folder, or by its name on the Hugging Face hub."""

import re

from etils import epath
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.interop import huggingface, native, sentence_layout, sentence_transformers, tensorflow
from bert_jax.interop.pretrained import Pretrained
from bert_jax.runtime import storage
from bert_jax.training import fingerprint

_HUB_FILES = ['config.json', '*.safetensors', 'model.safetensors.index.json', 'vocab.txt',
              'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
              'added_tokens.json', '*.model', 'vocab.json', 'merges.txt',
              # Folders of sentence-transformers; older ones have the encoder in 0_Transformer.
              'modules.json', 'sentence_*_config.json', 'config_sentence_transformers.json',
              '?_*/*.json', '0_*/*.txt']
_HUB_PICKLES = ['pytorch_model*.bin', 'pytorch_model.bin.index.json', '0_*/pytorch_model*.bin',
                '0_*/pytorch_model.bin.index.json']


def _from_hub(name: str) -> epath.Path:
  import huggingface_hub  # only here: all else works without it
  try:
    folder = epath.Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    if not [*folder.glob('*.safetensors'), *folder.glob('0_*/*.safetensors')]:
      huggingface_hub.snapshot_download(name, allow_patterns=_HUB_PICKLES)
    return folder
  except Exception as e:  # its own errors, and those of the network underneath
    raise UserError(f'{name} is no folder here, and no model of that name could be fetched from '
                    f'the Hugging Face hub: {e}') from e


def load(directory: str, step: int | None = None, allow_older: bool = False) -> Pretrained:
  """Loads a model.

  Args:
    directory: a workdir that main has trained, a checkpoint of bert_jax, a folder in the Hugging
      Face layout or of sentence-transformers, a TensorFlow checkpoint of google-research/bert, or
      a name on the hub.
    step: checkpoint of a workdir; None = the best, or the newest where none was chosen.
    allow_older: where that one is damaged, take the next sound one.

  Raises:
    UserError: there is no model, or something is wrong with it.
  """
  model = _read(directory, step, allow_older)
  for name, x in fingerprint.named_leaves(model.params).items():
    require(np.isfinite(x).all(),
            f'{directory}: {name.removeprefix("params/")} holds NaN or infinity: this '
            'model is broken')
  return model


def _read(directory: str, step: int | None, allow_older: bool) -> Pretrained:
  storage.check('model', str(directory))
  folder = epath.Path(directory)
  if not folder.exists() and re.fullmatch(r'[\w.-]+/[\w.-]+', directory):
    folder = _from_hub(directory)
  require(folder.exists(),
          f'{directory} is no folder here, and no name on the Hugging Face hub, which '
          'would be ORGANISATION/NAME')
  if (folder / native.WORKDIR_FILE).exists():
    return native.load_workdir(folder, step, allow_older)
  require(step is None and not allow_older,
          f'{directory} is no workdir: --step and --allow_older choose among the '
          'checkpoints of a run')
  for name, read in ((native.CHECKPOINT_FILE, native.load),
                     (sentence_layout.FILE, sentence_transformers.load),
                     ('config.json', huggingface.load), ('bert_config.json', tensorflow.load)):
    if (folder / name).exists():
      return read(folder)
  raise UserError(f'{directory} holds no model: none of {native.WORKDIR_FILE} (a workdir), '
                  f'{native.CHECKPOINT_FILE} (a checkpoint of bert_jax), config.json (Hugging '
                  'Face), bert_config.json (TensorFlow) is there')
