"""The interface of every tokeniser, and the code that they share."""

import abc
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import functools
import json
import math
from typing import Any

from etils import epath
import numpy as np
import tokenizers

from bert_jax.errors import UserError, require
from bert_jax.runtime import storage

# Token ids of a text, and the characters [start, end) of each token.
Offsets = tuple[list[int], list[tuple[int, int]]]
CONFIG = 'tokenizer_config.json'
SPACE = '\u2581'  # how SentencePiece writes the space before a word
_SHORTEST = 8  # tokens of the longest input


class Tokenizer(abc.ABC):
  """Text to token ids."""

  kind: str  # wordpiece, sentencepiece or bpe
  roles: Sequence[str] = ('pad', 'unk', 'cls', 'sep', 'mask')  # of the special tokens
  separators = 1  # number of [SEP] between two texts
  before_word = ''  # what a caller writes before a word or sentence inside a text
  vocab: list[str]  # the entries, in the order of their ids
  pad_id: int
  unk_id: int
  cls_id: int
  sep_id: int
  mask_id: int

  @property
  def vocab_size(self) -> int:
    return len(self.vocab)

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""

  @abc.abstractmethod
  def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
    """Token ids of each text, and the characters [start, end) of each token."""

  def encode_with_masks(self, text: str) -> list[int]:
    """Token ids of a text in which "[MASK]" stands for the mask token."""
    first, *rest = self.encode_batch(text.split('[MASK]'))
    return first + [i for part in rest for i in (self.mask_id, *part)]

  @abc.abstractmethod
  def word_starts(self) -> np.ndarray:
    """[V] bool: True for entries that start a word."""

  def tokens(self, ids: Sequence[int]) -> list[str]:
    """The vocabulary entry of each id."""
    return [self.vocab[i] for i in ids]

  def padded(self, size: int) -> 'Tokenizer':
    """A tokeniser with `size` entries. No text gets the new ones. Returns self if it cannot."""
    del size
    return self

  @abc.abstractmethod
  def serialized(self) -> bytes:
    """Everything that decides the ids: the vocabulary and its settings."""

  @abc.abstractmethod
  def save(self, directory: epath.Path):
    """Writes the files that `load` reads, as Hugging Face has them."""

  def _save(self, directory: epath.Path, files: dict[str, bytes], settings: dict[str, Any]):
    """Writes `files`, and tokenizer_config.json with `settings` and the special tokens."""
    special = {f'{role}_token': self.vocab[getattr(self, f'{role}_id')] for role in self.roles}
    config = (json.dumps({**settings, **special}, indent=2) + '\n').encode()
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, CONFIG: config}.items():
      (directory / name).write_bytes(content)

  def _around_texts(self) -> tokenizers.processors.PostProcessor:
    """[CLS] A [SEP] B [SEP], for an exported tokeniser; two [SEP] between them in MPNet."""
    cls, sep = self.tokens([self.cls_id, self.sep_id])
    if self.separators == 2:
      return tokenizers.processors.RobertaProcessing(
          (sep, self.sep_id), (cls, self.cls_id), add_prefix_space=False)
    return tokenizers.processors.TemplateProcessing(
        single=f'{cls}:0 $A:0 {sep}:0', pair=f'{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1',
        special_tokens=[(cls, self.cls_id), (sep, self.sep_id)])


def longest_input(directory: epath.Path) -> float:
  """Tokens to which transformers cuts an input, `model_max_length`; infinite if it says nothing.

  Raises:
    UserError: it is no number, or too small for a text.
  """
  path = directory / CONFIG
  longest = storage.read_json_if_any(path).get('model_max_length')
  if longest is None:
    return math.inf
  require(isinstance(longest, int | float) and longest >= _SHORTEST,
          f'{path} has model_max_length={longest!r}: it must be a number, at least {_SHORTEST}')
  return longest


def unused_names(first: int, size: int) -> list[str]:
  """Names of the entries `first` to `size` - 1, which stand for nothing."""
  return [f'[unused{i}]' for i in range(first, size)]


def added_tokens(names: Sequence[str], first: int, special: bool) -> list[dict[str, Any]]:
  """Entries of `added_tokens` in a tokenizer.json, from the id `first` on."""
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  return [{'id': i, 'content': name, 'special': special, **flags}
          for i, name in enumerate(names, first)]


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
  """Turns errors of the library, which have no class of their own, into a UserError."""
  try:
    yield
  except UserError:
    raise
  except BaseException as e:  # where Rust panics it is not even an Exception
    if not isinstance(e, Exception) and type(e).__name__ != 'PanicException':
      raise
    raise UserError(f'{problem}: {" ".join(str(e).split())[:200]}') from e


class LibraryTokenizer(Tokenizer):
  """A tokeniser that the package `tokenizers` runs, as the attribute `library`."""

  library: tokenizers.Tokenizer
  _settings: dict[str, Any]  # the content of a tokenizer.json; a WordPiece has none

  def _spans(self, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters of each token, without the space before a word."""
    return [(end - len(text[start:end].lstrip()), end) for start, end in offsets]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
    return [e.ids for e in encodings]

  def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
    encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
    return [(e.ids, self._spans(text, e.offsets)) for text, e in zip(texts, encodings)]

  def _find_special(self, names: Mapping[str, Sequence[str]], where: Any,
                    *vocabularies: Mapping[str, int]):
    """Sets the id of each role: its first name in the first vocabulary that has one."""
    for role, spellings in names.items():
      index = next((ids[name] for ids in vocabularies for name in spellings if name in ids), None)
      require(index is not None, f'{where} has no {" or ".join(spellings)}: BERT needs it')
      setattr(self, f'{role}_id', index)

  def serialized(self) -> bytes:
    return json.dumps(self._settings, sort_keys=True).encode()

  def padded(self, size: int) -> 'LibraryTokenizer':
    first = self.vocab_size
    unused = added_tokens(unused_names(first, size), first, special=True)
    known = self._settings.get('added_tokens') or []
    return type(self)(self._settings | {'added_tokens': [*known, *unused]})

  def _parsing(self, *special: str) -> tokenizers.Tokenizer:
    """A copy of `library` that a caller may teach these special tokens."""
    del special
    return tokenizers.Tokenizer.from_str(self.library.to_str())

  @functools.cached_property
  def _with_masks(self) -> tokenizers.Tokenizer:
    mask = self.vocab[self.mask_id]
    parsing = self._parsing(mask)
    if self.mask_id not in parsing.get_added_tokens_decoder():  # it has rules of its own there
      parsing.add_special_tokens([tokenizers.AddedToken(mask, lstrip=True, special=True)])
    return parsing

  def encode_with_masks(self, text: str) -> list[int]:
    text = text.replace('[MASK]', self.vocab[self.mask_id])
    return self._with_masks.encode(text, add_special_tokens=False).ids
