"""Encodes documents as arrays of tokens: the work of `prepare`'s worker processes."""

import collections
from collections.abc import Iterable, Iterator
import functools
import itertools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from bert_jax.data import chinese_words, records
from bert_jax.data.corpus import Settings
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader

# Characters per call: the library's encodings take 100 times the memory of their tokens.
_AT_ONCE = 1 << 19


class Encoded(NamedTuple):
  """Documents as arrays; for the first four, see `records.ShardWriter.add`."""

  tokens: np.ndarray  # [T] uint16 or uint32
  words: np.ndarray  # [T] bool
  lengths: np.ndarray  # [S] int64
  counts: np.ndarray  # [E] int64
  heldout: list[int]  # indices of the held-out sentences that occur in these documents
  documents: int  # number of documents before encoding
  size: int  # bytes of text


def batches(texts: Iterable[str], size: int = 1 << 18) -> Iterator[list[str]]:
  """Groups texts into lists of at least `size` characters; the last may be shorter."""
  batch, characters = [], 0
  for text in texts:
    batch.append(text)
    characters += len(text)
    if characters >= size:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


class Encoder:
  """Encodes documents; a worker process unpickles it by reading its files."""

  def __init__(self, tokenizer: tokenizer_base.Tokenizer, settings: Settings,
               heldout: Iterable[str] = (), reopen: tuple[Any, ...] = ()):
    """Prepares to encode, and to recognize held-out sentences by their keys.

    Args:
      tokenizer: of the corpus.
      settings: how documents are split into sentences.
      heldout: the keys of held-out sentences; see `keys`.
      reopen: the arguments of `_reopened`, which makes this encoder in a worker process.
    """
    # `parsing(False)`: "[SEP]" in a corpus is text, never the special token.
    self.tokenizer, self._settings, self._reopen = (
        tokenizer.parsing(False), settings, reopen)
    self._heldout = collections.defaultdict(list)
    for i, key in enumerate(heldout):
      self._heldout[bytes.fromhex(key)].append(i)
    self._heldout.pop(b'', None)  # a sentence without tokens
    self._starts = tokenizer.word_starts()
    self._marks_words = bool(self._starts.any())
    self._is_chinese = settings.language.startswith('zh')
    self._before = '' if self._is_chinese else tokenizer.before_word
    self._dtype = records.token_dtype(tokenizer.vocab_size)

  def __reduce__(self):
    # A worker reads the tokenizer and the keys once, from their files, not for each task.
    return _reopened, self._reopen

  def documents(self, documents: Iterable[str]) -> Encoded:
    """Splits documents into sentences and encodes them."""
    documents = list(documents)
    encoded = self.sentences([self._settings.sentences(d) for d in documents])
    return encoded._replace(size=sum(len(d.encode()) for d in documents))

  def sentences(self, documents: list[list[str]]) -> Encoded:
    """Encodes lists of sentences; drops sentences without tokens; `size` stays 0."""
    flat = itertools.chain.from_iterable(documents)
    # Without sentences, an empty batch gives the empty arrays their dtypes.
    encoded = map(self._encode_batch, list(batches(flat, _AT_ONCE)) or [[]])
    tokens, words, lengths = map(np.concatenate, zip(*encoded))
    seen = []
    # Held-out sentences are compared whole, before long sentences are cut.
    if self._heldout:
      ends = np.cumsum(lengths).tolist()
      keys = (tokens[begin:end].tobytes() for begin, end in zip([0, *ends], ends))
      seen = [i for key in keys for i in self._heldout.get(key, ())]
    counts = np.fromiter(map(len, documents), np.int64, len(documents))
    document = np.repeat(np.arange(len(documents)), counts)[lengths > 0]
    # Lengths are stored as uint16: a longer sentence becomes several.
    lengths, pieces = records.cut(lengths[lengths > 0], records.LONGEST_SENTENCE)
    counts = np.bincount(np.repeat(document, pieces))
    return Encoded(tokens, words, lengths, counts[counts > 0], heldout=seen,
                   documents=len(documents), size=0)

  def keys(self, sentences: list[str]) -> list[str]:
    """A hex key for each sentence: equal for sentences with equal tokens."""
    return [np.array(ids, self._dtype).tobytes().hex() for ids in self._ids(sentences)]

  def _ids(self, sentences: list[str]) -> list[list[int]]:
    return self.tokenizer.encode_batch([self._before + x for x in sentences])

  def _encode_batch(self,
                    sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, word starts, and the length of each sentence."""
    if self._is_chinese:
      ids, words = chinese_words.encode(self.tokenizer, sentences)
    elif self._marks_words:
      ids, words = self._ids(sentences), None
    else:
      encoded = self.tokenizer.encode_with_words([self._before + x for x in sentences])
      ids, words = [x for x, _ in encoded], np.concatenate([[], *(x for _, x in encoded)])
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(itertools.chain.from_iterable(ids), self._dtype,
                         int(lengths.sum()))
    return tokens, self._starts[tokens] if words is None else words.astype(bool), lengths


def warm_up(settings: Settings):
  """Imports the packages and loads the tables that the first document needs."""
  settings.sentences('')
  if settings.language.startswith('zh'):
    chinese_words.load()


@functools.cache
def _reopened(tokenizer: str, settings: Settings, heldout: str) -> Encoder:
  """Makes the encoder of a worker process; cached, so it reads the files only once."""
  keys = json.loads(pathlib.Path(heldout).read_text())['keys']
  return Encoder(tokenizer_reader.load(tokenizer), settings, keys)
