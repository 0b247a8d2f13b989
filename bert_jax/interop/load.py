"""Loads a model in any format from a folder, or by its name on the Hugging Face hub."""

import dataclasses
import os
import re

from etils import epath
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.interop import (
  huggingface,
  native,
  sentence_transformers,
  tensorflow,
  text_layout,
)
from bert_jax.interop.pretrained import Pretrained
from bert_jax.runtime import storage
from bert_jax.training import fingerprint

HUB_NAME = re.compile(r'[\w.-]+/[\w.-]+')  # ORGANIZATION/NAME
_HUB_FILES = [
    'config.json', '*.safetensors', 'model.safetensors.index.json', 'vocab.txt',
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
    'added_tokens.json', '*.model', 'vocab.json', 'merges.txt',
    # Folders of sentence-transformers; older ones have the encoder in 0_Transformer.
    'modules.json', 'sentence_*_config.json', 'config_sentence_transformers.json',
    '?_*/*.json', '0_*/*.txt']
_HUB_PICKLES = [
    'pytorch_model*.bin', 'pytorch_model.bin.index.json', '0_*/pytorch_model*.bin',
    '0_*/pytorch_model.bin.index.json']


def _from_hub(name: str) -> epath.Path:
  import huggingface_hub  # only here: everything else works without it
  try:
    folder = epath.Path(
        huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    # Most repositories have both formats. Pickles are just as large, so download them
    # only without safetensors.
    if not [*folder.glob('*.safetensors'), *folder.glob('0_*/*.safetensors')]:
      huggingface_hub.snapshot_download(name, allow_patterns=_HUB_PICKLES)
    return folder
  # The network libraries below the hub's package raise errors of their own classes.
  except Exception as e:
    raise UserError(f'{name} is not a folder here, and could not be downloaded from the '
                    f'Hugging Face hub: {e}') from e


def load(directory: str, step: int | None = None,
         allow_older: bool = False) -> Pretrained:
  """Loads a model in any format; downloads it if its name is on the hub.

  Args:
    directory: a workdir of a run, a checkpoint of bert_jax, a folder in the Hugging Face
      layout or of sentence-transformers, a TensorFlow checkpoint of google-research/bert,
      or a name on the hub.
    step: the step of the checkpoint in a workdir; None = the best one, or the newest one
      if the run selected none.
    allow_older: if this checkpoint is damaged, take the newest sound one before it.

  Raises:
    UserError: `directory` is not a model, or the model is damaged.
  """
  model = _read(directory, step, allow_older)
  # A run that diverged saves NaN or infinity, and such parameters load without an error.
  for name, x in fingerprint.named_leaves(model.params).items():
    require(np.isfinite(x).all(),
            f'{directory}: {name.removeprefix("params/")} holds NaN or infinity: this '
            'model is broken')
  return model


def _read(directory: str | os.PathLike, step: int | None, allow_older: bool) -> Pretrained:
  directory = os.path.expanduser(directory)
  storage.check('model', directory)
  folder = epath.Path(directory)
  is_of_hub = not folder.exists() and HUB_NAME.fullmatch(directory)
  if is_of_hub:
    folder = _from_hub(directory)
  require(folder.exists(),
          f'{directory} is not a folder here, and not a name on the Hugging Face hub, '
          'which would be ORGANIZATION/NAME')
  if (folder / native.WORKDIR_FILE).exists():
    return native.load_workdir(folder, step, allow_older)
  require(step is None and not allow_older,
          f'{directory} is not a workdir: --step and --allow_older choose among the '
          'checkpoints of a run')
  # The order matters: folders of sentence-transformers have a config.json too.
  for name, read in ((native.CHECKPOINT_FILE, native.load),
                     (text_layout.FILE, sentence_transformers.load),
                     ('config.json', huggingface.load),
                     ('bert_config.json', tensorflow.load)):
    if (folder / name).exists():
      model = read(folder)
      # Model cards and mteb name the source. Other people know the name on the hub, but
      # not the path in this machine's cache.
      return dataclasses.replace(
          model, facts={**model.facts, 'source': directory}) if is_of_hub else model
  raise UserError(f'{directory} holds no model: none of {native.WORKDIR_FILE} (a '
                  f'workdir), {native.CHECKPOINT_FILE} (a checkpoint of bert_jax), '
                  'config.json (Hugging Face), bert_config.json (TensorFlow) exists')
