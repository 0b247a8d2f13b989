"""From text to token records: held-out split, vocabulary, tokenising; kept in the workdir.

  corpus/builtin.txt.gz      the built-in corpus as it was when the run began
  corpus/train, corpus/heldout   token records
  tokenizer/                 the vocabulary
  corpus/manifest.json       written last: what was asked for and what came of it
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import hashlib
import itertools
import json
import pathlib
import shutil
from typing import NamedTuple

from etils import epath
import numpy as np
from tqdm import auto as tqdm

from bert_jax.data import builtin
from bert_jax.data import corpus
from bert_jax.data import records
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError

_BATCH = 2_000  # sentences encoded at a time: enough to keep the tokeniser's threads busy


class Corpus(NamedTuple):
  """A tokenised corpus."""

  tokenizer: tokenizer_lib.Tokenizer
  train: records.Records
  heldout: records.Records
  unigram_entropy: float | None  # nat; of the held-out tokens under `train`'s frequencies
  notes: tuple[str, ...]  # what was dropped on the way


def _hash(text: str) -> int:
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little')


def _progress(documents: Iterable, desc: str, total: int | None = None) -> Iterable:
  return tqdm.tqdm(documents, desc, total, unit=' documents', leave=False, disable=None)


def _document_hash(document: corpus.Document) -> int:
  return _hash('\n'.join(document))


def _heldout_limit(documents: Iterable[corpus.Document], share: float) -> tuple[int, int, int]:
  """The hash up to which a document is held out, the number of documents, and of different ones.

  Copies of a document share its hash, so they are always on the same side.
  """
  hashes = np.fromiter((_document_hash(d) for d in documents), np.uint64)
  unique = np.unique(hashes)
  # Next-sentence pairs need two documents on each side: with fewer than four nothing is held out.
  held = max(2, round(share * len(unique))) if share and len(unique) >= 4 else 0
  return int(unique[held - 1]) if held else -1, len(hashes), len(unique)


def cross_entropy(heldout_counts: np.ndarray, train_counts: np.ndarray) -> float:
  """Cross-entropy of held-out tokens under the training tokens' frequencies, in nat a token.

  It is the loss of a model that has learned nothing but how often each token occurs (add-one
  smoothed): the plateau that masked-LM training has to leave.
  """
  smoothed = (train_counts + 1) / (train_counts + 1).sum()
  return float(-(heldout_counts * np.log(smoothed)).sum() / heldout_counts.sum())


def _write_records(directory: pathlib.Path, documents: Iterable[list[str]],
                   tokenizer: tokenizer_lib.Tokenizer) -> records.Records:
  """Encodes documents (lists of sentences) into a records folder, many sentences at a time."""
  writer = records.Writer(directory, tokenizer.vocab_size)
  batch, size = [], 0

  def flush():
    ids = iter(tokenizer.encode_batch([s for document in batch for s in document]))
    for document in batch:
      writer.add(list(itertools.islice(ids, len(document))))

  for document in documents:
    batch.append(document)
    size += len(document)
    if size >= _BATCH:
      flush()
      batch, size = [], 0
  flush()
  return writer.close()


def _prepare(read: Callable[[], Iterator[corpus.Document]], data, vocab_size: int,
             directory: pathlib.Path, tokenizer_directory: pathlib.Path) -> dict:
  """Tokenises a corpus into `directory` and says what was found."""
  limit, documents, different = _heldout_limit(
      _progress(read(), 'reading the corpus'), data.heldout)
  if not documents:
    raise UserError(f'data.source={data.source!r} holds no document: it is empty or blank lines')
  if different == 1:
    raise UserError(
        f'data.source={data.source!r} holds one document: a next sentence from another document '
        'needs at least two. Put a blank line between documents')

  def sentences(document):
    return [s for p in document for s in corpus.split_sentences(p, data.format, data.language)]

  def training(desc):
    for d in _progress(read(), desc, documents):
      if _document_hash(d) > limit:
        yield sentences(d)

  if data.vocab:
    tokenizer = tokenizer_lib.load(data.vocab, data.lowercase)
  else:
    tokenizer = tokenizer_lib.train(
        data.tokenizer, lambda: (s for d in training('training the vocabulary') for s in d),
        vocab_size, data.lowercase)
  tokenizer.save(epath.Path(tokenizer_directory))

  seen = []  # hashes of every training sentence

  def training_and_remember():
    for document in training('tokenising'):
      seen.extend(map(_hash, document))
      yield document

  train = _write_records(directory / 'train', training_and_remember(), tokenizer)
  held = [sentences(d) for d in read() if _document_hash(d) <= limit] if limit >= 0 else []
  seen = set(seen)
  fresh = [[s for s in document if _hash(s) not in seen] for document in held]
  heldout = _write_records(directory / 'heldout', fresh, tokenizer)
  if not len(train.tokens):
    raise UserError(f'data.source={data.source!r} holds no text that the vocabulary can encode')

  train_counts = train.counts(tokenizer.vocab_size)
  heldout_counts = heldout.counts(tokenizer.vocab_size)
  unknown = train_counts[tokenizer.unk_id] / train_counts.sum()
  dropped = sum(map(len, held)) - sum(map(len, fresh))
  notes = []
  if dropped:
    notes.append(f'{dropped:,} held-out sentences that occur in the training text were left out')
  if documents > different:
    notes.append(f'{documents - different:,} documents are exact copies of others')
  if unknown > 0.01:
    notes.append(f'{unknown:.1%} of the tokens are [UNK]: does the vocabulary fit the text?')
  if not len(heldout.tokens):
    notes.append('nothing is held out: the corpus has too few documents')
  entropy = cross_entropy(heldout_counts, train_counts) if len(heldout.tokens) else None
  return {'unigram_entropy': entropy, 'notes': notes}


def open_corpus(data, vocab_size: int, workdir: epath.Path) -> Corpus:
  """Opens the workdir's tokenised corpus; makes it from `data.source` if it is not there.

  Args:
    data: the config group `data`.
    vocab_size: of a vocabulary to be trained.
    workdir: of the run.

  Raises:
    UserError: the corpus or vocabulary cannot be used, or the workdir holds another one.
  """
  directory = pathlib.Path(workdir) / 'corpus'
  tokenizer_directory = pathlib.Path(workdir) / 'tokenizer'
  asked = {**data.to_dict(), 'vocab_size': None if data.vocab else vocab_size}
  manifest = directory / 'manifest.json'
  if not manifest.exists():
    shutil.rmtree(directory / 'train', ignore_errors=True)  # of a run that was stopped half-way
    shutil.rmtree(directory / 'heldout', ignore_errors=True)
    if data.source == 'builtin':
      text = epath.Path(directory / 'builtin.txt.gz')
      if not text.exists():
        builtin.extract(text)
      read = corpus.open_source(str(text), 'text', data.text_column)
    else:
      read = corpus.open_source(data.source, data.format, data.text_column)
    found = _prepare(read, data, vocab_size, directory, tokenizer_directory)
    partial = directory / 'manifest.json.partial'
    partial.write_text(json.dumps({'data': asked, **found}, indent=2) + '\n')
    partial.replace(manifest)
  found = json.loads(manifest.read_text())
  for name, value in asked.items():
    if found['data'].get(name) != value:
      raise UserError(f'{workdir} was made with data.{name}={found["data"].get(name)!r}, now it is '
                      f'{value!r}: use another --workdir')
  return Corpus(tokenizer_lib.load(tokenizer_directory), records.open_records(directory / 'train'),
                records.open_records(directory / 'heldout'), found['unigram_entropy'],
                tuple(found['notes']))
