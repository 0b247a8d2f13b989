"""Helpers for tests of corpora: open one, prepare one, read its sentences and files."""

import pathlib

from etils import epath
import numpy as np

from bert_jax.data import dataset, preparation
from tests import conftest


def open_corpus(workdir, source, vocab_size=200, **data):
  config = conftest.tiny_config(source).data
  config.update({'heldout': 0.1, **data})
  return dataset.open_corpus(config, vocab_size, epath.Path(workdir))


def prepare(output, source, workers=1, vocab_size=200, **settings):
  if 'vocab' in settings:
    vocab_size = None
  options = preparation.Settings(str(source), vocab_size=vocab_size, **settings)
  preparation.prepare(options, str(output), workers)
  return dataset.open_records(epath.Path(output))


def sentences(corpus, split):
  """The tokens of every sentence of a split, by document."""
  documents = []
  for number in range(split.num_blocks):
    lengths, starts, _ = split.block(number)
    ends = split.blocks[number, 0] + np.cumsum(lengths, dtype=np.int64)
    for i, (end, length) in enumerate(zip(ends, lengths)):
      if i in starts:
        documents.append([])
      documents[-1].append(' '.join(corpus.tokenizer.tokens(
          split.tokens(np.arange(end - length, end)))))
  return documents


def files(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in pathlib.Path(folder).rglob('*')
          if p.is_file()}


def begin(workdir):
  """Marks the workdir: a run has begun in it."""
  (pathlib.Path(workdir) / 'run.json').write_text('{}')
