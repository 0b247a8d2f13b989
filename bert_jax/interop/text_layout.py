"""The modules, prompts and longest input in a folder of sentence-transformers.

The model turns a text into a vector (`sentence_layout`), turns a text into weights of the
vocabulary (`sparse_layout`) or into vectors of its tokens (`late_layout`), or scores a pair
(`cross_layout`).
"""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from etils import epath
import numpy as np
import safetensors
from safetensors.numpy import load_file
import tokenizers

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage

FILE = 'modules.json'
PACKAGE = 'sentence_transformers'
WEIGHTS = 'model.safetensors'  # of a module
SETTINGS, ENCODER_SETTINGS = (
    'config_sentence_transformers.json', 'sentence_bert_config.json')
# Older folders name this file after the class of their encoder. The first one counts.
_OLD_ENCODER_SETTINGS = [f'sentence_{kind}_config.json' for kind in (
    'roberta', 'distilbert', 'camembert', 'albert', 'xlm-roberta')]
# The defaults of each transformer_task: the output of the model that is used, and its
# name in sentence-transformers.
_ENCODER = 'feature-extraction'
_OUTPUTS = {_ENCODER: ('last_hidden_state', 'token_embeddings'),
            'fill-mask': ('logits', 'token_embeddings'),
            'sequence-classification': ('logits', 'scores')}
# Arguments for the loading and the calls of a model, by their new and old names.
_ARGUMENTS = ('model_kwargs', 'model_args', 'processor_kwargs', 'tokenizer_args',
              'config_kwargs', 'config_args', 'processing_kwargs')
# The keys of these arguments that never change the output for a text.
_HARMLESS = ('trust_remote_code', 'attn_implementation', 'low_cpu_mem_usage', 'device_map',
             'use_safetensors', 'use_fast', 'use_cache', 'add_pooling_layer',
             'output_hidden_states', 'image', 'audio', 'video', 'chat_template')
_FULL_PRECISION = ('auto', 'float32', 'torch.float32')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLayout(abc.ABC):
  """How a model reads texts, as its folder describes.

  Attributes:
    prompts: prefixes of texts, by name.
    default_prompt: the name of the prompt for texts without one; None = no prompt.
    similarity: the function that compares two vectors, for sentence-transformers.
    max_len: the maximum number of tokens of a text, special tokens included; None = the
      positions of the model.
    lowercase: True = texts are lowercased before tokenization.
  """

  prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  default_prompt: str | None = None
  similarity: str | None = None
  max_len: int | None = None
  lowercase: bool = False

  def prompt(self, name: str | None) -> str:
    """Returns the prompt with this name; None = the default one, '' = no prompt."""
    name = self.default_prompt if name is None else name
    known = (f'expected one of {", ".join(self.prompts)}' if self.prompts else
             'the model has no prompts')
    require(not name or name in self.prompts, f'prompt={name!r} is unknown: {known}')
    return self.prompts[name] if name else ''

  def first_prompt(self, names: Sequence[str]) -> str:
    """Returns the first of these names that is a prompt of the model; '' = no prompt."""
    return next((name for name in names if name in self.prompts), '')

  def prepared(self, texts: Sequence[tuple[str, ...]],
               prompt: str) -> list[tuple[str, ...]]:
    """Returns texts or pairs with a prompt, ready for the tokenizer."""
    # The library's rules: Python's str.lower differs for some letters.
    lower = tokenizers.normalizers.Lowercase().normalize_str if self.lowercase else str
    return [(lower(prompt + first), *map(lower, rest)) for first, *rest in texts]

  @abc.abstractmethod
  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """Computes the last step on the host: [texts, D] outputs -> [texts, D'] results."""

  @abc.abstractmethod
  def files(self, width: int) -> dict[str, bytes]:
    """Returns the files of a folder, except the encoder, by path.

    Args:
      width: the size of the hidden states of the encoder.
    """

  def _files(self, modules: Sequence[tuple[str, str]], contents: Mapping[str, Any],
             settings: Mapping[str, Any], encoder: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the JSON files of a folder, by path.

    Args:
      modules: (path, type without PACKAGE) of each module.
      contents: the files of the modules, by path.
      settings, encoder: further fields of SETTINGS and ENCODER_SETTINGS.
    """
    listed = [{'idx': i, 'name': str(i), 'path': path, 'type': f'{PACKAGE}.{kind}'}
              for i, (path, kind) in enumerate(modules)]
    settings = {'prompts': dict(self.prompts),
                'default_prompt_name': self.default_prompt,
                'similarity_fn_name': self.similarity,
                **settings}
    encoder = {'max_seq_length': self.max_len, 'do_lower_case': self.lowercase, **encoder}
    contents = {FILE: listed, **contents, SETTINGS: settings, ENCODER_SETTINGS: encoder}
    return {name: (json.dumps(x, indent=2) + '\n').encode()
            for name, x in contents.items()}

  def write(self, directory: epath.Path, width: int):
    """Writes all files except the encoder."""
    for name, content in self.files(width).items():
      (directory / name).parent.mkdir(parents=True, exist_ok=True)
      (directory / name).write_bytes(content)


def encoder_settings(encoder: epath.Path) -> dict[str, Any]:
  """Returns the settings of the encoder in this folder; {} = none."""
  files = (storage.read_json_if_any(encoder / name)
           for name in (ENCODER_SETTINGS, *_OLD_ENCODER_SETTINGS))
  return next(filter(None, files), {})


def _acting(contents: Any) -> Any:
  """Returns the part of some arguments that may change outputs; falsy = none."""
  if not isinstance(contents, dict):
    return contents
  return {x: value for x, value in contents.items()
          if x not in _HARMLESS and value not in (None, {})
          and not (x in ('torch_dtype', 'dtype') and value in _FULL_PRECISION)}


def check_encoder(encoder: epath.Path):
  """Raises UserError for a setting of the encoder that bert_jax does not apply."""
  limits = encoder_settings(encoder)
  where = f'{encoder / ENCODER_SETTINGS}: bert_jax does not apply'
  for name in _ARGUMENTS:
    acting = _acting(limits.get(name))
    require(not acting, f'{where} {name}={acting!r}: use a model without it')
  modalities = limits.get('modality_config')
  if modalities is not None:
    task, place = limits.get('transformer_task', _ENCODER), limits.get('module_output_name')
    text = modalities.get('text') if isinstance(modalities, dict) else modalities
    output, default = _OUTPUTS.get(str(task), (None, None))
    require(text == {'method': 'forward', 'method_output_name': output}
            and place in (None, default),
            f'{where} modality_config={modalities!r} with module_output_name={place!r}: it '
            f'knows only the default text output of transformer_task={task!r}')


def tensors(folder: epath.Path) -> dict[str, np.ndarray]:
  """Reads the tensors of a module, as float32; raises UserError if it has none."""
  path = folder / WEIGHTS
  # Older folders have a pickle, which this code does not open.
  require(path.exists(),
          f'{folder} lacks {WEIGHTS}: save_pretrained(NEW) of sentence-transformers writes '
          'it')
  try:
    return {name: x.astype(np.float32) for name, x in load_file(str(path)).items()}
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f'{path} is corrupt or not a safetensors file: {e}') from e
  except (AttributeError, KeyError, TypeError) as e:  # NumPy lacks the dtype
    raise UserError(f'{path} has numbers of an unknown dtype ({e}): save it in float32, '
                    'float16 or bfloat16') from e


def read(settings: Mapping[str, Any], path: epath.Path, encoder: epath.Path,
         positions: int, tokenizer: tokenizer_base.Tokenizer) -> dict[str, Any]:
  """Reads the fields of a `TextLayout`.

  Args:
    settings, path: the content of the file SETTINGS, and its path.
    encoder: the folder of the encoder.
    positions: the number of positions of the model.
    tokenizer: the tokenizer of the encoder.

  Raises:
    UserError: a field has an unexpected value.
  """
  limits = encoder_settings(encoder)
  # Tokenizers without a limit say 1e30, a float.
  longest = limits.get('max_seq_length') or tokenizer_reader.longest_input(encoder)
  require(isinstance(longest, int | float),
          f'{encoder}: the longest input {longest!r} is not a number')
  prompts, default = settings.get('prompts') or {}, settings.get('default_prompt_name')
  require(isinstance(prompts, dict) and all(isinstance(x, str) for x in prompts.values()),
          f'{path}: prompts={prompts!r} is not a table of names and texts')
  require(default is None or default in list(prompts),
          f'{path}: default_prompt_name={default!r} is not one of its prompts')
  # A tokenizer that lowercases needs no second pass.
  lowercase = bool(limits.get('do_lower_case')) and not tokenizer.lowercase
  return {'prompts': prompts,
          'default_prompt': default,
          'similarity': settings.get('similarity_fn_name'),
          'max_len': int(min(longest, positions)),
          'lowercase': lowercase}
