"""Surveys a corpus in constant memory: its size, its copies, and which part to hold out.

A document is identified by a hash of its text. The documents with the smallest hashes are
held out. So copies of a document are always on the same side, and the choice does not
depend on the order of the files.
"""

import array
from collections.abc import Iterable
import hashlib
from typing import NamedTuple

import numpy as np

HASHES = 1 << 64  # number of possible hashes
_HASHES_IN_MEMORY = 4_000_000
# Each evaluation reads the held-out documents and keeps them in memory: 10,000 articles
# are 30 MB.
_MAX_HELD_OUT = 10_000
_VOCABULARY_TEXT = 256 << 20  # most bytes of text for training a vocabulary


def text_hash(text: bytes) -> int:
  """A 64-bit hash of a text."""
  return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), 'little')


class Distinct:
  """Counts distinct texts: exactly up to 4 million, by a sample beyond that."""

  def __init__(self, capacity: int = _HASHES_IN_MEMORY):
    self._capacity, self.below = capacity, HASHES  # hashes >= `below` are ignored
    self._hashes = array.array('Q')
    self.total = 0

  def add(self, value: int):
    """Counts the hash of one text."""
    self.total += 1
    if value < self.below:
      self._hashes.append(value)
      if len(self._hashes) > self._capacity:
        # The smaller half is an unbiased sample. It has every document that may be held
        # out.
        self.below //= 2
        self._hashes = array.array('Q', (h for h in self._hashes if h < self.below))

  def smallest(self) -> np.ndarray:
    """The distinct hashes below `below`, ascending: [hashes] uint64."""
    return np.unique(np.frombuffer(self._hashes, np.uint64))

  def different(self) -> int:
    """The number of different texts, an estimate beyond 4 million hashes."""
    if self.below == HASHES:
      return len(self.smallest())
    # The share of distinct texts in the sample estimates the share in the corpus.
    return round(self.total * len(self.smallest()) / max(len(self._hashes), 1))


class Survey(NamedTuple):
  """The size of a corpus and the choice of its held-out documents."""

  documents: int
  different: int  # distinct documents
  size: int  # bytes of text, in UTF-8
  heldout_below: int  # documents whose hash is below this are held out

  @property
  def copies(self) -> int:
    return self.documents - self.different

  def is_held_out(self, document: str) -> bool:
    """True if a document is held out for evaluation."""
    return bool(self.heldout_below) and text_hash(document.encode()) < self.heldout_below

  def in_vocabulary_text(self, document: str) -> bool:
    """True if the vocabulary is trained on a document: about 256 MiB, sampled by hash."""
    share = min(_VOCABULARY_TEXT / max(self.size, 1), 1.0)
    value = text_hash(document.encode())
    # The modulus is nearly independent of the comparison with `heldout_below`.
    return value >= self.heldout_below and (value >> 8) % 10_000 < 10_000 * share


def survey_of(documents: Iterable[str], heldout: float) -> Survey:
  """Reads a corpus once and chooses which share of its documents to hold out."""
  distinct, size = Distinct(), 0
  for document in documents:
    text = document.encode()
    distinct.add(text_hash(text))
    size += len(text)
  hashes, different = distinct.smallest(), distinct.different()
  below = 0
  # Next-sentence pairs need two documents on each side. With fewer than four documents,
  # all are for training.
  if heldout and different >= 4:
    count = min(max(2, round(heldout * different)), different - 2, _MAX_HELD_OUT,
                len(hashes))
    below = int(hashes[count - 1]) + 1
  return Survey(distinct.total, different, size, below)
