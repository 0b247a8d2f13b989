"""Token records on disk: a tokenized corpus in shards that are memory-mapped.

  manifest.json    counts, settings, digests of the tokenizer and .bin files; written last
  tokenizer/       the vocabulary that made the tokens
  counts.npy       [V] int64, how often each entry occurs in the training text
  train-00000.*    a shard of the training text; heldout-00000.* of the held-out text:
    .tokens.bin      [T] uint16 or uint32, tokens of all documents, no special tokens
    .words.bin       [T / 8] uint8, a bit for each token: does a word start here?
    .sentences.bin   [S] uint16, tokens in each sentence
    .documents.bin   [E] int64, the sentence at which each document starts
    .blocks.bin      [G + 1, 3] int64, tokens, sentences, started documents before a block

A block has about 8,192 tokens: whole documents, or whole sentences of a longer document.
An epoch shuffles blocks. The index of the blocks fits in memory for any corpus, and a
block is one short read.
"""

from collections.abc import Callable, Iterable
import concurrent.futures
import functools
import hashlib
import json
import mmap
import os
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.runtime import console, storage

BLOCK = 8_192  # tokens
LONGEST_SENTENCE = 32_768  # tokens; a longer sentence is stored as several
_VERSION = 1
# The keys of a manifest.
_ENTRIES = ('settings', 'tokenizer', 'vocab_size', 'documents', 'bytes',
            'unigram_entropy', 'notes', 'splits', 'digest')
REMEDY = 'run bert_jax.prepare again into an empty folder'


class Shard(NamedTuple):
  """The arrays of one shard; see the module's docstring."""

  tokens: np.ndarray
  words: np.ndarray
  sentences: np.ndarray
  documents: np.ndarray
  blocks: np.ndarray


class ShardWriter:
  """Streams documents into the files of one shard."""

  def __init__(self, directory: epath.Path, name: str, vocab_size: int,
               block: int = BLOCK):
    self.name, self._block = name, block
    self._dtype = token_dtype(vocab_size)
    self._files = {f: (directory / f'{name}.{f}.bin').open('wb') for f in Shard._fields}
    self._hashes = {f: hashlib.sha256() for f in Shard._fields}
    self._tokens = self._sentences = self._documents = self._blocks = 0
    self._block_start = 0  # the first token of the current block
    self._bits = np.zeros(0, np.uint8)  # word starts that do not fill a byte yet
    self._write('blocks', np.zeros(3, np.int64))

  def _write(self, file: str, values: np.ndarray):
    data = values.tobytes()
    self._hashes[file].update(data)
    self._files[file].write(data)

  def _close_block(self, token: int, sentence: int):
    self._write('blocks', np.array([token, sentence, self._documents], np.int64))
    self._blocks += 1
    self._block_start = token

  def add(self, tokens: np.ndarray, words: np.ndarray, lengths: np.ndarray,
          counts: np.ndarray):
    """Appends documents.

    Args:
      tokens: [T] int, the tokens of all documents.
      words: [T] bool, True where a word starts.
      lengths: [S] int64, tokens in each sentence, from 1 to LONGEST_SENTENCE.
      counts: [E] int64, sentences in each document, at least 1.
    """
    # Writes whole bytes. The bits of an incomplete byte wait for the next call.
    bits = np.concatenate([self._bits, words.astype(np.uint8)])
    whole = len(bits) // 8 * 8
    self._bits = bits[whole:]
    self._write('words', np.packbits(bits[:whole], bitorder='little'))
    self._write('tokens', tokens.astype(self._dtype))
    ends = self._tokens + np.cumsum(lengths)  # token at which each sentence ends
    last = np.cumsum(counts)  # one more than the last sentence of each document
    self._write('documents', self._sentences + last - counts)
    self._write('sentences', lengths.astype(np.uint16))
    for first, after in zip((last - counts).tolist(), last.tolist()):
      self._documents += 1
      end = int(ends[after - 1])
      # A long document fills several blocks.
      while end - self._block_start >= 2 * self._block:
        # Keeps at least two tokens on either side: a single token cannot become a pair.
        begin = int(ends[first - 1]) if first else self._tokens
        least = max(self._block_start + self._block, begin + 2)
        cut = first + int(np.searchsorted(ends[first:after], least))
        if end - int(ends[cut]) < 2:
          break
        self._close_block(int(ends[cut]), self._sentences + cut + 1)
      if end - self._block_start >= self._block:
        self._close_block(end, self._sentences + after)
    self._tokens += len(tokens)
    self._sentences += len(lengths)

  def close(self) -> dict[str, Any]:
    """Finishes the files and returns the shard's entry in the manifest."""
    self._write('words', np.packbits(self._bits, bitorder='little'))
    if self._tokens > self._block_start:
      self._close_block(self._tokens, self._sentences)
    for file in self._files.values():
      file.close()
    return {
        'name': self.name,
        'documents': self._documents,
        'sentences': self._sentences,
        'tokens': self._tokens,
        'blocks': self._blocks,
        'sha256': {f: h.hexdigest() for f, h in self._hashes.items()},
    }


def token_dtype(vocab_size: int) -> np.dtype:
  """The smallest dtype that holds every id."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def cut(lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
  """Cuts lengths [S] into pieces of at most `longest`.

  Returns:
    ([N] the lengths of all pieces, in order; [S] the number of pieces of each length).
  """
  pieces = -(-lengths // longest)
  shorter = np.full(pieces.sum(), longest)
  shorter[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
  return shorter, pieces


class Records:
  """The shards of one split.

  Tokens, sentences, documents and blocks are numbered across the shards.
  """

  def __init__(self, shards: Iterable[Shard], digest: str, reopen: tuple[Any, ...] = ()):
    """`reopen`: the arguments of `open_split` that open the shards in another process."""
    self.shards, self.digest, self._reopen = tuple(shards), digest, reopen
    sizes = [[0, 0, 0, 0], *([*s.blocks[-1], len(s.blocks) - 1] for s in self.shards)]
    # [shards + 1, 4]: tokens, sentences, documents and blocks before each shard.
    self._base = np.cumsum(np.array(sizes, np.int64), axis=0)
    self.num_tokens, self.num_sentences, self.num_documents, self.num_blocks = map(
        int, self._base[-1])
    # [G + 1, 3]: (tokens, sentences, documents started) before each block of the split.
    self.blocks = np.concatenate([
        *(s.blocks[:-1] + b[:3] for s, b in zip(self.shards, self._base)),
        self._base[-1:, :3],
    ])

  def __reduce__(self):
    # Pickling a memory map would copy the whole file.
    return functools.partial(open_split, verify=False), self._reopen

  def block(self, number: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The sentences of one block.

    Returns:
      ([S] uint16 tokens in each sentence; [E] int64 indices, in the block, of sentences
      that start a document; the number of the first sentence's document).
    """
    k = int(np.searchsorted(self._base[:, 3], number, side='right')) - 1
    shard, local = self.shards[k], number - self._base[k, 3]
    (_, s0, d0), (_, s1, d1) = shard.blocks[local], shard.blocks[local + 1]
    starts = np.asarray(shard.documents[d0:d1]) - s0
    # True if the block begins inside the last document of the block before it.
    continues = not len(starts) or starts[0] > 0
    return (np.asarray(shard.sentences[s0:s1]), starts,
            int(self._base[k, 2] + d0 - continues))

  def _take(self, position: np.ndarray,
            read: Callable[[Shard, np.ndarray], np.ndarray]) -> np.ndarray:
    # Most corpora have one shard, which needs no search.
    if len(self.shards) == 1:
      return read(self.shards[0], position)
    shard = np.searchsorted(self._base[:, 0], position, side='right') - 1
    out = np.empty(position.shape, np.int32)
    for k in np.unique(shard):
      inside = shard == k
      out[inside] = read(self.shards[k], position[inside] - self._base[k, 0])
    return out

  def tokens(self, position: np.ndarray) -> np.ndarray:
    """The tokens at positions of the split: [...] int64 -> [...] int32."""
    return self._take(position, lambda s, i: s.tokens[i].astype(np.int32))

  def word_starts(self, position: np.ndarray) -> np.ndarray:
    """1 where a word starts, else 0: [...] int64 -> [...] int32."""
    return self._take(
        position,
        lambda s, i: (s.words[i >> 3] >> (i & 7).astype(np.uint8) & 1).astype(np.int32))


def map_file(path: str, dtype: np.dtype) -> np.ndarray:
  """Memory-maps a file as a read-only array [N] of `dtype`."""
  with open(path, 'rb') as file:
    if not os.fstat(file.fileno()).st_size:
      return np.zeros(0, dtype)  # mmap refuses an empty file
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  if hasattr(mmap, 'MADV_RANDOM'):
    pages.madvise(mmap.MADV_RANDOM)  # blocks are shuffled: read-ahead is useless
  return np.frombuffer(pages, dtype)


def read_manifest(directory: epath.Path) -> dict[str, Any]:
  """Reads the manifest of a folder.

  Raises:
    UserError: it is missing or malformed, or has another version.
  """
  try:
    manifest = json.loads((directory / 'manifest.json').read_text())
    version = manifest['version']
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise UserError(f'{directory} holds no complete token records ({e}): {REMEDY}') from e
  require(version == _VERSION,
          f'{directory} holds records of version {version}, this bert_jax reads version '
          f'{_VERSION}: run bert_jax.prepare again with another --output')
  missing = [name for name in _ENTRIES if name not in manifest]
  require(not missing,
          f'{directory}/manifest.json is not a manifest of token records, it has no '
          f'{", ".join(missing)}: {REMEDY}')
  return manifest


def digest(manifest: dict[str, Any]) -> str:
  """A hash of everything that determines the rows: the tokenizer and all shard files."""
  content = [manifest['tokenizer'], manifest['splits']]
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def write_manifest(directory: epath.Path, manifest: dict[str, Any]):
  """Writes manifest.json with version and digest, atomically."""
  content = {'version': _VERSION, 'digest': digest(manifest), **manifest}
  storage.write_whole(directory / 'manifest.json', json.dumps(content, indent=1) + '\n')


def _map_shard(directory: epath.Path, entry: dict[str, Any], vocab_size: int) -> Shard:
  """Maps the files of a shard; raises UserError if one is missing or has another size."""
  contents = {
      'tokens': (token_dtype(vocab_size), entry['tokens']),
      'words': (np.dtype(np.uint8), -(-entry['tokens'] // 8)),
      'sentences': (np.dtype(np.uint16), entry['sentences']),
      'documents': (np.dtype(np.int64), entry['documents']),
      'blocks': (np.dtype(np.int64), 3 * (entry['blocks'] + 1)),
  }
  arrays = {}
  for file, (dtype, length) in contents.items():
    path = os.fspath(directory / f'{entry["name"]}.{file}.bin')
    expected = length * dtype.itemsize
    try:
      size = os.path.getsize(path)
      require(size == expected,
              f'{path} has {size:,} bytes, {expected:,} were written: {REMEDY}')
      arrays[file] = map_file(path, dtype)
    except OSError as e:
      raise UserError(f'{path} cannot be read ({e.strerror or e}): {REMEDY}') from e
  # Each row lookup needs the index of the blocks, which is small: it stays in memory.
  arrays['blocks'] = np.array(arrays['blocks']).reshape(-1, 3)
  return Shard(**arrays)


def open_split(directory: epath.Path, manifest: dict[str, Any], split: str, *,
               verify: bool = True) -> Records:
  """Opens the shards of one split (train or heldout) in a local folder.

  Raises:
    UserError: a file is missing, has another size, or (with `verify`) has another digest.
  """
  entries = manifest['splits'][split]
  shards = [_map_shard(directory, entry, manifest['vocab_size']) for entry in entries]
  if verify:
    hashes = {os.fspath(directory / f'{entry["name"]}.{file}.bin'): sha256
              for entry in entries for file, sha256 in entry['sha256'].items()}

    def check(path: str):
      with open(path, 'rb') as file:
        require(hashlib.file_digest(file, 'sha256').hexdigest() == hashes[path],
                f'{path} was changed after it was prepared (its sha256 differs from the '
                f'manifest): {REMEDY}')

    # Hashing releases the GIL: threads use all cores.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      list(pool.map(check, hashes))
  return Records(shards, manifest['digest'], (directory, manifest, split))


def is_finished(output: str) -> bool:
  """True if a folder holds the records of a finished preparation."""
  return (epath.Path(output) / 'manifest.json').exists()


def replacing(output: str) -> str:
  """The folder for the new records that will replace the finished records in `output`.

  If `output` is a link, the folder is next to its target, on the same file system.

  Raises:
    UserError: `output` holds more than records, or is in a bucket.
  """
  folder = epath.Path(output)
  require(not storage.is_remote(output),
          f'--overwrite replaces folders of this machine: delete {output}, or use '
          'another --output')
  entries = [e for shards in read_manifest(folder)['splits'].values() for e in shards]
  # The folder may hold files of the user, which must not be lost.
  known = {'manifest.json', 'tokenizer', 'counts.npy', 'progress',
           *(f'{e["name"]}.{field}.bin' for e in entries for field in e['sha256'])}
  strangers = [path.name for path in folder.iterdir() if path.name not in known]
  require(not strangers,
          f'--output={output} holds {min(strangers, default="")}, which is not part of '
          'its records: nothing is replaced, use another --output')
  return f'{storage.through_link(folder)}.partial'


def print_summary(output: str):
  """Prints the contents of a prepared folder."""
  manifest = read_manifest(epath.Path(output))
  lines = [('text',
            f'{manifest["bytes"] / 1e6:,.1f} MB in {manifest["documents"]:,} documents')]
  for name, shards in manifest['splits'].items():
    total = {key: sum(shard[key] for shard in shards)
             for key in ('tokens', 'sentences', 'documents')}
    lines.append((name, ', '.join(f'{count:,} {key}' for key, count in total.items())))
  if manifest['unigram_entropy'] is not None:
    lines.append(('plateau',
                  f'{manifest["unigram_entropy"]:.3f} nat: the held-out MLM loss of a '
                  'model that knows only the token frequencies'))
  lines += [*(('note', note) for note in manifest['notes']),
            ('records', f'{output}, digest {manifest["digest"]}')]
  console.print_lines(lines)
