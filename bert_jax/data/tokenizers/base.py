"""The interface of all tokenizers, and the code that they share."""

import abc
from collections.abc import Iterable, Mapping, Sequence
import copy
import functools
import hashlib
import json
from typing import Any, NamedTuple
import unicodedata

from etils import epath
import numpy as np

from bert_jax.errors import require

# Token ids of a text, and the characters [start, end) of each token.
Offsets = tuple[list[int], list[tuple[int, int]]]
CONFIG = 'tokenizer_config.json'
ROWS = 'table_rows'  # in CONFIG: rows of the embedding table, if more than entries
# In CONFIG, under transformers' name: False = special tokens in a text are parsed.
PARSES = 'split_special_tokens'
SPACE = '\u2581'  # how SentencePiece writes the space before a word
# Trained vocabularies begin with these entries, in this order. Published vocabularies use
# the same names.
SPECIAL_TOKENS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
MOST_ROWS = 1 << 24  # far above any published vocabulary
ROLES = ('pad', 'unk', 'cls', 'sep', 'mask')


class Around(NamedTuple):
  """The ids of the special tokens around texts."""

  one: tuple[tuple[int, ...], tuple[int, ...]]  # before and after a text
  two: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # before, between, after

  @classmethod
  def berts(cls, cls_id: int, sep_id: int) -> 'Around':
    """[CLS] A [SEP], and [CLS] A [SEP] B [SEP]."""
    return cls(((cls_id,), (sep_id,)), ((cls_id,), (sep_id,), (sep_id,)))


class Tokenizer(abc.ABC):
  """Text to token ids.

  Attributes:
    kind: wordpiece, bpe, unigram, wordlevel or sentencepiece.
    vocab: the entries, in the order of their ids; "[unusedN]" for a row of the embedding
      table without an entry.
    entries: the number of entries in the vocabulary itself.
    around: the special tokens around texts.
    before_word: the string that callers add before a word or sentence inside a text.
    lowercase: whether BERT's normalizer lower-cases; None = the normalizer is not BERT's.
    markers: special tokens with a meaning in a text, such as "[H]"; they are never split.
    parses_special: whether "[SEP]" in a text is the special token; otherwise it is text.
      A corpus is always read with False, `encode_with_masks` uses True.
  """

  kind: str
  vocab: list[str]
  entries: int
  around: Around
  before_word = ''
  lowercase: bool | None = None
  is_bytewise = False  # writes each byte of a letter as a character, as RoBERTa's BPE
  splits_as_bert = False  # at spaces, and around punctuation and Han characters
  parses_special = False
  markers: tuple[str, ...] = ()
  pad_id: int
  unk_id: int
  cls_id: int
  sep_id: int
  mask_id: int

  @property
  def vocab_size(self) -> int:
    return len(self.vocab)

  def follows(self, lowercase: bool) -> bool:
    """False if the files of this tokenizer override data.lowercase=`lowercase`."""
    # A vocab.txt is only a list of entries; other files include their normalization.
    return self.kind == 'wordpiece' and not (lowercase and self.lowercase is False)

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each text, without special tokens around it."""

  @abc.abstractmethod
  def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
    """Returns the ids of each text, and the characters [start, end) of each token."""

  def encode_with_masks(self, text: str) -> list[int]:
    """Returns the token ids of a text in which "[MASK]" stands for the mask token."""
    text = text.replace('[MASK]', self.vocab[self.mask_id])
    return self.parsing(True).encode_batch([text])[0]

  def encode_with_spans(self, texts: Sequence[str]) -> list[Offsets]:
    """Encodes texts; returns offsets that can quote the text.

    A span excludes the space before its token, and includes accents after the token that
    the normalizer strips.
    """
    return [(ids, _quotable(text, offsets))
            for text, (ids, offsets) in zip(texts, self.encode_with_offsets(texts))]

  @abc.abstractmethod
  def word_starts(self) -> np.ndarray:
    """[V] bool, True for entries that start a word; all False if no entry shows it."""

  def tokens(self, ids: Iterable[int]) -> list[str]:
    """The vocabulary entry of each id."""
    return [self.vocab[i] for i in ids]

  def padded(self, rows: int) -> 'Tokenizer':
    """Returns a copy with at least `rows` entries; no text uses the new entries.

    Raises:
      UserError: `rows` is above 2**24.
    """
    require(rows <= MOST_ROWS, f'a table of {rows:,} rows: the most is {MOST_ROWS:,}')
    padded = copy.copy(self)
    padded.vocab = self.vocab + [f'[unused{i}]' for i in range(self.vocab_size, rows)]
    return padded

  def parsing(self, parses_special: bool) -> 'Tokenizer':
    """Returns a copy with another `parses_special`."""
    other = copy.copy(self)
    other.parses_special = parses_special
    return other

  def with_special(self, marks: Sequence[str]) -> 'Tokenizer':
    """Returns a copy that never splits or normalizes a mark that is an entry.

    A mark may end with a space, such as "[Q] "; then its first word may be the entry.

    Raises:
      UserError: a mark is an entry, and this kind of tokenizer would split it.
    """
    words = {word for mark in marks for word in (mark, *mark.split()[:1])}
    require(words.isdisjoint(self.vocab),
            f'the marks {", ".join(map(repr, marks))} are entries, and a {self.kind} '
            'tokenizer would split them: save the model with a tokenizer.json')
    return self

  @abc.abstractmethod
  def serialized(self) -> bytes:
    """Everything that determines the ids of a corpus: the vocabulary and its settings."""

  @abc.abstractmethod
  def save(self, directory: epath.Path, segments: bool | None = None):
    """Writes the files that `load` reads, in the Hugging Face layout.

    Args:
      directory: the folder.
      segments: whether transformers gives the model the segment ids of a pair, 0 and 1;
        None = the default of the tokenizer's class.
    """

  @property
  def _named(self) -> dict[str, str]:
    return {f'{role}_token': self.vocab[getattr(self, f'{role}_id')] for role in ROLES}

  def _save(self, directory: epath.Path, files: Mapping[str, bytes],
            settings: Mapping[str, Any], segments: bool | None):
    """Writes `files`, and CONFIG with `settings` and the special tokens."""
    config = {**settings, **self._named}
    if segments is not None:
      # The default depends on the class: BertTokenizer gives segment ids, but
      # PreTrainedTokenizerFast of transformers 5 gives none.
      config['model_input_names'] = [
          'input_ids', *['token_type_ids'] * segments, 'attention_mask']
    if self.parses_special or self.markers:
      config[PARSES] = not self.parses_special
    # Written only for an unusual table: other configs stay as transformers writes them.
    if self.vocab_size > self.entries:
      config[ROWS] = self.vocab_size
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {
        **files, CONFIG: (json.dumps(config, indent=2) + '\n').encode()}.items():
      (directory / name).write_bytes(content)


@functools.cache  # called for each character of a text
def _is_mark(character: str) -> bool:
  """True for a combining accent: a separate character after its letter."""
  return unicodedata.category(character).startswith('M')


def _quotable(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
  """The offsets without leading spaces, and with accents that are in no other token."""
  spans = [(end - len(text[start:end].lstrip()), end) for start, end in offsets]
  # Most texts have no accents, and the loop below is slow.
  if text.isascii() or not any(map(_is_mark, set(text))):
    return spans
  next_starts = [start for start, _ in spans[1:]] + [len(text)]

  def with_accents(end, limit):
    while end < limit and _is_mark(text[end]):
      end += 1
    return end

  return [(start, with_accents(end, limit))
          for (start, end), limit in zip(spans, next_starts)]


def special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
  """The ids of the special tokens, which are never masked, ascending."""
  return tuple(sorted(getattr(tokenizer, f'{role}_id') for role in ROLES))


def digest(tokenizer: Tokenizer) -> str:
  """A short hash of the vocabulary and its settings."""
  return hashlib.blake2b(tokenizer.serialized(), digest_size=16).hexdigest()
