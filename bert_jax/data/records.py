"""Token records on disk: the whole corpus as one array of tokens with sentence and document bounds.

  tokens.bin      uint16 or uint32, every token of every document, no special tokens
  sentences.bin   int64, where each sentence starts in tokens.bin, and the end of the last one
  documents.bin   int64, where each document starts in sentences.bin, and the end of the last one
  manifest.json   counts, dtype, and a digest of the three files

All three are memory-mapped: a run opens a corpus of any size at once.
"""

import hashlib
import json
import pathlib
from typing import NamedTuple

import numpy as np

from bert_jax.errors import UserError

_FLUSH_TOKENS = 1 << 20


class Records(NamedTuple):
  """A corpus of T tokens in S sentences in E documents."""

  tokens: np.ndarray  # [T] uint16 or uint32
  sentences: np.ndarray  # [S + 1] int64, token offsets
  documents: np.ndarray  # [E + 1] int64, sentence offsets
  digest: str

  @property
  def num_documents(self) -> int:
    """E."""
    return len(self.documents) - 1

  def counts(self, vocab_size: int) -> np.ndarray:
    """How often each vocabulary entry occurs: [V] int64."""
    total = np.zeros(vocab_size, np.int64)
    for start in range(0, len(self.tokens), _FLUSH_TOKENS):
      total += np.bincount(self.tokens[start:start + _FLUSH_TOKENS], minlength=vocab_size)
    return total


class Writer:
  """Streams documents into a records folder; nothing counts before `close` wrote the manifest."""

  def __init__(self, directory: pathlib.Path, vocab_size: int):
    directory.mkdir(parents=True, exist_ok=True)
    self._directory = directory
    self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    self._files = {name: (directory / f'{name}.bin').open('wb')
                   for name in ('tokens', 'sentences', 'documents')}
    self._hash = hashlib.blake2b(digest_size=16)
    self._tokens = self._sentences = self._documents = 0

  def _write(self, name: str, values: np.ndarray):
    self._hash.update(f'{name} {len(values)} '.encode())
    self._hash.update(values.tobytes())
    self._files[name].write(values.tobytes())

  def add(self, sentences: list[list[int]]):
    """Appends one document: the token ids of its sentences, empty ones left out."""
    sentences = [s for s in sentences if s]
    if not sentences:
      return
    lengths = np.array([len(s) for s in sentences], np.int64)
    starts = self._tokens + np.cumsum(lengths) - lengths
    self._write('tokens', np.fromiter((t for s in sentences for t in s), self._dtype))
    self._write('sentences', starts)
    self._write('documents', np.array([self._sentences], np.int64))
    self._tokens += int(lengths.sum())
    self._sentences += len(sentences)
    self._documents += 1

  def close(self) -> Records:
    """Finishes the records and opens them."""
    self._write('sentences', np.array([self._tokens], np.int64))
    self._write('documents', np.array([self._sentences], np.int64))
    for file in self._files.values():
      file.close()
    manifest = {'tokens': self._tokens, 'sentences': self._sentences,
                'documents': self._documents, 'dtype': self._dtype.name,
                'digest': self._hash.hexdigest()}
    (self._directory / 'manifest.json').write_text(json.dumps(manifest, indent=2) + '\n')
    return open_records(self._directory)


def open_records(directory: pathlib.Path) -> Records:
  """Opens a records folder.

  Raises:
    UserError: a file that is missing or not as long as the manifest says.
  """
  try:
    manifest = json.loads((directory / 'manifest.json').read_text())
    dtypes = {'tokens': np.dtype(manifest['dtype']), 'sentences': np.dtype(np.int64),
              'documents': np.dtype(np.int64)}
    arrays = {}
    for name, dtype in dtypes.items():
      path, length = directory / f'{name}.bin', manifest[name] + (name != 'tokens')
      if path.stat().st_size != length * dtype.itemsize:
        raise UserError(f'{path} has {path.stat().st_size} bytes, {length * dtype.itemsize} were '
                        f'written: remove {directory} to have it made again')
      # An empty file cannot be mapped.
      arrays[name] = np.memmap(path, dtype, 'r') if length else np.zeros(0, dtype)
  except (OSError, json.JSONDecodeError, KeyError) as e:
    raise UserError(f'{directory} holds no complete token records ({e}): remove it to have it made '
                    'again') from e
  return Records(digest=manifest['digest'], **arrays)
