"""The modules, prompts and longest input in a folder of sentence-transformers.

The model turns a text into a vector (`sentence_layout`) or into weights of the vocabulary
(`sparse_layout`), or it scores a pair (`cross_layout`).
"""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from etils import epath
import numpy as np
import tokenizers

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import require
from bert_jax.runtime import storage

FILE = 'modules.json'
PACKAGE = 'sentence_transformers'
SETTINGS, ENCODER_SETTINGS = 'config_sentence_transformers.json', 'sentence_bert_config.json'
# Older folders call it by the kind of their encoder; the first that is there counts.
_OLD_ENCODER_SETTINGS = [f'sentence_{kind}_config.json' for kind in (
    'roberta', 'distilbert', 'camembert', 'albert', 'xlm-roberta')]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLayout(abc.ABC):
  """How a model reads texts, as its folder says.

  Attributes:
    prompts: the texts that go before a text, by name; `default_prompt` is the name of one or None.
    similarity: the function that compares two vectors, for sentence-transformers.
    max_len: tokens of a text, special ones included; None = as many as the model has positions.
    lowercase: a text is put in lower case before the tokenizer reads it.
  """

  prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  default_prompt: str | None = None
  similarity: str | None = None
  max_len: int | None = None
  lowercase: bool = False

  def prompt(self, name: str | None) -> str:
    """The prompt of this name; None = the default one, '' = none at all."""
    name = self.default_prompt if name is None else name
    known = f'known are {", ".join(self.prompts)}' if self.prompts else 'the model has none'
    require(not name or name in self.prompts, f'prompt={name!r} is unknown: {known}')
    return self.prompts[name] if name else ''

  def prepared(self, texts: Sequence[tuple[str, ...]], prompt: str) -> list[tuple[str, ...]]:
    """The texts or pairs as the tokenizer reads them, behind a prompt."""
    lower = tokenizers.normalizers.Lowercase().normalize_str if self.lowercase else str
    return [(lower(prompt + first), *map(lower, rest)) for first, *rest in texts]

  @abc.abstractmethod
  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """The last step, on the host: [texts, D] of the model -> [texts, D'] of the folder."""

  @abc.abstractmethod
  def files(self, width: int) -> dict[str, bytes]:
    """The content of a folder around an encoder with hidden states of `width`, by path."""

  def _files(self, modules: Sequence[tuple[str, str]], contents: Mapping[str, Any],
             settings: Mapping[str, Any], encoder: Mapping[str, Any]) -> dict[str, bytes]:
    """The JSON files of a folder, by path.

    Args:
      modules: (path, type below PACKAGE) of each.
      contents: of the files of the modules, by path.
      settings, encoder: further fields of SETTINGS and ENCODER_SETTINGS.
    """
    listed = [{'idx': i, 'name': str(i), 'path': path, 'type': f'{PACKAGE}.{kind}'}
              for i, (path, kind) in enumerate(modules)]
    settings = {'prompts': dict(self.prompts), 'default_prompt_name': self.default_prompt,
                'similarity_fn_name': self.similarity, **settings}
    encoder = {'max_seq_length': self.max_len, 'do_lower_case': self.lowercase, **encoder}
    contents = {FILE: listed, **contents, SETTINGS: settings, ENCODER_SETTINGS: encoder}
    return {name: (json.dumps(x, indent=2) + '\n').encode() for name, x in contents.items()}

  def write(self, directory: epath.Path, width: int):
    """Writes all but the encoder."""
    for name, content in self.files(width).items():
      (directory / name).parent.mkdir(parents=True, exist_ok=True)
      (directory / name).write_bytes(content)


def encoder_settings(encoder: epath.Path) -> dict[str, Any]:
  """The settings of the encoder in this folder; {} if there are none."""
  names = (ENCODER_SETTINGS, *_OLD_ENCODER_SETTINGS)
  return next(filter(None, (storage.read_json_if_any(encoder / name) for name in names)), {})


def read(directory: epath.Path, encoder: epath.Path, positions: int,
         tokenizer: tokenizer_base.Tokenizer) -> dict[str, Any]:
  """The fields of a `TextLayout` in a folder whose encoder lies in `encoder`.

  Raises:
    UserError: one of them is not as we know it.
  """
  settings = storage.read_json_if_any(directory / SETTINGS)
  limits = encoder_settings(encoder)
  longest = limits.get('max_seq_length') or tokenizer_reader.longest_input(encoder)
  require(isinstance(longest, int | float), f'{encoder}: the longest input {longest!r} is '
          'no number')
  prompts, default = settings.get('prompts') or {}, settings.get('default_prompt_name')
  require(isinstance(prompts, dict) and all(isinstance(x, str) for x in prompts.values()),
          f'{directory}/{SETTINGS}: prompts={prompts!r} is no table of names and texts')
  require(default is None or default in list(prompts), f'{directory}/{SETTINGS}: '
          f'default_prompt_name={default!r} is none of its prompts')
  lowercase = bool(limits.get('do_lower_case')) and not tokenizer.lowercase
  return {'prompts': prompts, 'default_prompt': default,
          'similarity': settings.get('similarity_fn_name'),
          'max_len': int(min(longest, positions)), 'lowercase': lowercase}
