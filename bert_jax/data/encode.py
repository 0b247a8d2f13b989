"""From documents to arrays of tokens: what each worker process of `prepare` does."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
import functools
import itertools
import json
from typing import NamedTuple

import numpy as np

from bert_jax.data import corpus
from bert_jax.data import records
from bert_jax.data import tokenizer as tokenizer_lib

_AT_ONCE = 1 << 19  # characters: the library's encodings take 100 times the memory of their tokens


class Rules(NamedTuple):
  """How text becomes sentences."""

  format: str
  language: str  # ISO 639
  lines_are_sentences: bool

  def sentences(self, document: str) -> list[str]:
    """The sentences of a document."""
    return corpus.split_sentences(document, self.format, self.language, self.lines_are_sentences)


class Encoded(NamedTuple):
  """Some documents as arrays; see `records.ShardWriter.add`."""

  tokens: np.ndarray
  words: np.ndarray
  lengths: np.ndarray
  counts: np.ndarray
  heldout: list[int]  # the held-out sentences that occur in these documents
  documents: int  # that went in
  size: int  # bytes of their text


def batches(texts: Iterable[str], size: int = 1 << 20) -> Iterator[list[str]]:
  """Texts in lists of at least `size` characters, but for the last."""
  batch, held = [], 0
  for text in texts:
    batch.append(text)
    held += len(text)
    if held >= size:
      yield batch
      batch, held = [], 0
  if batch:
    yield batch


def _segmented(tokenizer: tokenizer_lib.Tokenizer,
               sentences: list[str]) -> tuple[list[list[int]], np.ndarray]:
  """Tokens of each sentence, and where Chinese words start among all of them.

  A character that is cut into pieces, as in a byte-level BPE, starts with the first.
  """
  import rjieba  # its dictionary takes half a second to load

  tokens, starts = [], []
  for sentence, (ids, offsets) in zip(sentences, tokenizer.encode_with_offsets(sentences)):
    words = {start for _, start, _ in rjieba.tokenize(sentence)}
    tokens.append(ids)
    starts.extend([begin in words and (i == 0 or begin != offsets[i - 1][0])
                   for i, (begin, _) in enumerate(offsets)])
  return tokens, np.array(starts, bool)


def _keys(tokens: np.ndarray, lengths: np.ndarray) -> list[bytes]:
  """The tokens of each sentence as bytes."""
  ends = np.cumsum(lengths).tolist()
  return [tokens[begin:end].tobytes() for begin, end in zip([0, *ends], ends)]


class Encoder:
  """Turns documents into arrays."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer, rules: Rules,
               heldout: Iterable[bytes] = ()):
    """`heldout`: keys of the held-out sentences, to be recognised in the training text."""
    self._tokenizer, self._rules = tokenizer, rules
    self._heldout = collections.defaultdict(list)
    for i, key in enumerate(heldout):
      self._heldout[key].append(i)
    self._heldout.pop(b'', None)  # no token: it stands in no text
    self._starts = tokenizer.word_starts()
    self._dtype = records.token_dtype(tokenizer.vocab_size)

  def documents(self, documents: Iterable[str]) -> Encoded:
    """Splits and encodes whole documents."""
    documents = list(documents)
    encoded = self.sentences([self._rules.sentences(document) for document in documents])
    return encoded._replace(size=sum(len(d.encode()) for d in documents))

  def sentences(self, documents: list[list[str]]) -> Encoded:
    """Encodes documents that are split into sentences; what has no token is left out."""
    tokens, words, lengths = self._tokens(list(itertools.chain.from_iterable(documents)))
    seen = []
    if self._heldout:
      seen = [i for key in _keys(tokens, lengths) for i in self._heldout.get(key, ())]
    document = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    counts = np.bincount(document[lengths > 0], minlength=len(documents))
    lengths, counts = records.split_long(lengths[lengths > 0], counts[counts > 0])
    return Encoded(tokens, words, lengths, counts, seen, len(documents), 0)

  def keys(self, sentences: list[str]) -> list[bytes]:
    """A key of each sentence: the same for sentences that the model cannot tell apart."""
    tokens, _, lengths = self._tokens(sentences)
    return _keys(tokens, lengths)

  def _tokens(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_arrays` of any number of sentences."""
    parts = [self._arrays(batch) for batch in list(batches(sentences, _AT_ONCE)) or [[]]]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts))

  def _arrays(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, where words start, and the length of each sentence."""
    if self._rules.language.startswith('zh'):
      ids, words = _segmented(self._tokenizer, sentences)
    else:
      ids, words = self._tokenizer.encode_batch(sentences), True
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    tokens = np.fromiter(itertools.chain.from_iterable(ids), self._dtype, int(lengths.sum()))
    if self._rules.language.startswith('zh') and self._tokenizer.kind != 'wordpiece':
      return tokens, words, lengths  # its entries know of spaces alone
    return tokens, self._starts[tokens] & words, lengths


def write_heldout(path: str, documents: Iterable[list[str]]):
  """Writes the sentences of the held-out documents, a document a line."""
  with open(path, 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(sentences) + '\n' for sentences in documents)


def read_heldout(path: str) -> list[list[str]]:
  """What `write_heldout` wrote."""
  with open(path, encoding='utf-8') as file:
    return [json.loads(line) for line in file]


def write_keys(path: str, keys: Iterable[bytes]):
  """Writes the keys of sentences, one a line."""
  with open(path, 'w', encoding='ascii') as file:
    file.writelines(key.hex() + '\n' for key in keys)


def read_keys(path: str) -> list[bytes]:
  """What `write_keys` wrote."""
  with open(path, encoding='ascii') as file:
    return [bytes.fromhex(line) for line in file]


@functools.cache
def _encoder(tokenizer: str, rules: Rules, heldout: str) -> Encoder:
  """The encoder of this process."""
  return Encoder(tokenizer_lib.load(tokenizer), rules, read_keys(heldout))


def encode(documents: list[str], *, tokenizer: str, rules: Rules, heldout: str) -> Encoded:
  """Encodes documents in a worker process.

  Args:
    documents: their texts.
    tokenizer: the folder of the vocabulary.
    rules: how they are split.
    heldout: the file of `write_keys`.
  """
  return _encoder(tokenizer, rules, heldout).documents(documents)
