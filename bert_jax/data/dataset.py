"""The corpus of a run: token records that `prepare` made, or text that is prepared on the spot."""

import dataclasses
import os
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import preparation, records
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data.corpus import Settings
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage


class Corpus(NamedTuple):
  """A tokenised corpus."""

  tokenizer: tokenizer_lib.Tokenizer
  train: records.Records
  heldout: records.Records
  counts: np.ndarray  # [V] int64, how often each entry occurs in `train`
  unigram_entropy: float | None  # nat; of the held-out tokens under the frequencies of `counts`
  notes: tuple[str, ...]  # remarks of the preparation


def open_records(directory: epath.Path) -> Corpus:
  """Opens a local folder that `prepare` made; raises UserError if a file is not as it was."""
  manifest = records.read_manifest(directory)
  tokenizer = tokenizer_lib.load(directory / 'tokenizer')
  require(tokenizer_lib.digest(tokenizer) == manifest['tokenizer'],
          f'{directory}/tokenizer is not the tokeniser that made these records: run '
          'bert_jax.prepare again into an empty folder')
  train, heldout = (records.open_split(directory, manifest, split)
                    for split in ('train', 'heldout'))
  return Corpus(tokenizer, train, heldout, np.load(os.fspath(directory / 'counts.npy')),
                manifest['unigram_entropy'], tuple(manifest['notes']))


def is_prepared(source: str) -> bool:
  """True if `data.source` is a folder of token records."""
  return source != 'builtin' and not source.startswith('tfds:') and (
      epath.Path(source) / 'manifest.json').exists()


def open_corpus(data: ConfigDict, vocab_size: int, workdir: epath.Path,
                processes: int = 1) -> Corpus:
  """Opens `data.source`: token records, or text, which is prepared in the workdir first.

  Args:
    data: the config group `data`.
    vocab_size: of a vocabulary to train.
    processes: that train together; only a single one may prepare text.

  Raises:
    UserError: the corpus or vocabulary cannot be used, or the workdir holds another one.
  """
  if is_prepared(data.source):
    source = epath.Path(data.source)
    corpus = open_records(storage.download(source) if storage.is_remote(data.source) else source)
    if data.vocab:
      given = tokenizer_lib.load(data.vocab, data.lowercase)
      require(tokenizer_lib.digest(given) == tokenizer_lib.digest(corpus.tokenizer),
              f'data.vocab={data.vocab} is not the vocabulary that made the records in '
              f'{data.source}: leave data.vocab out, or prepare the text again with it')
    return corpus
  require(processes == 1,
          f'data.source={data.source!r} is text, and {processes} processes train on it: make token '
          'records with bert_jax.prepare first, and give their folder')
  directory = workdir / 'corpus'
  fields = {f.name for f in dataclasses.fields(Settings)} & set(data.keys())
  settings = Settings(**{name: data[name] for name in fields},
                      vocab_size=None if data.vocab else vocab_size)
  if not (directory / 'manifest.json').exists():
    preparation.prepare(settings, os.fspath(directory))
  name = preparation.changed_setting(directory, settings)
  if name:
    was = records.read_manifest(directory)['settings'].get(name)
    raise UserError(f'{workdir} was made with data.{name}={was!r}, now it is '
                    f'{getattr(settings, name)!r}: use another --workdir')
  return open_records(directory)
