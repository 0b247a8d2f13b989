"""The corpus of a run: token records, or text that the run prepares first."""

from collections.abc import Sequence
import dataclasses
import os
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict
import numpy as np

from bert_jax import config_fields
from bert_jax.data import mixture, preparation, records
from bert_jax.data.corpus import Settings
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.runtime import storage


class Corpus(NamedTuple):
  """A tokenized corpus."""

  tokenizer: tokenizer_base.Tokenizer
  train: records.Records
  heldout: records.Records
  counts: np.ndarray  # [V] int64, how often each entry occurs in `train`
  unigram_entropy: float | None  # nats, of held-out tokens by the frequencies in `counts`
  notes: tuple[str, ...]  # notes of the preparation for the user


def open_records(directory: epath.Path) -> Corpus:
  """Opens a local folder that `prepare` made.

  Raises:
    UserError: a file is missing, damaged or changed.
  """
  manifest = records.read_manifest(directory)
  tokenizer = tokenizer_reader.load(directory / 'tokenizer')
  require(tokenizer_base.digest(tokenizer) == manifest['tokenizer'],
          f'{directory}/tokenizer is not the tokenizer that made these records, or an '
          'older bert_jax read a part of it: run bert_jax.prepare again into an empty '
          'folder, or train in another --workdir')
  train, heldout = (records.open_split(directory, manifest, split)
                    for split in ('train', 'heldout'))
  path = directory / 'counts.npy'
  try:
    counts = np.load(os.fspath(path))
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read ({e}): {records.REMEDY}') from e
  require(counts.shape == (manifest['vocab_size'],),
          f'{path} does not belong to these records: {records.REMEDY}')
  return Corpus(tokenizer, train, heldout, counts, manifest['unigram_entropy'],
                tuple(manifest['notes']))


def is_prepared(source: str) -> bool:
  """True if `data.source` is a folder of token records, or a mixture of such folders."""
  corpora = mixture.parse(source)
  if corpora:
    return all(is_prepared(corpus.source) for corpus in corpora)
  if source == 'builtin' or source.startswith('tfds:'):
    return False
  storage.check('data.source', source)
  return (epath.Path(source) / 'manifest.json').exists()


def sources(source: str) -> tuple[str, ...]:
  """The single corpora that `data.source` names."""
  return tuple(corpus.source for corpus in mixture.parse(source)) or (source,)


def open_corpus(data: ConfigDict, vocab_size: int, workdir: epath.Path,
                processes: int = 1) -> Corpus:
  """Opens `data.source`: token records, text, or a mixture.

  Args:
    data: the config group `data`.
    vocab_size: the size of the vocabulary that is trained without `data.vocab`.
    workdir: the folder of the run, for the records that it prepares from text.
    processes: the number of processes of the run; only a single one can prepare text.

  Raises:
    UserError: the corpus or vocabulary is not usable, or the workdir holds another one.
  """
  corpora = mixture.parse(data.source)
  if corpora:
    return _open_mixture(corpora, data, vocab_size, workdir, processes)
  # Prepared records serve all runs. Text is prepared in the workdir, for this run alone.
  if is_prepared(data.source):
    where = data.source
    directory = epath.Path(where)
    # Records are memory-mapped, which needs a local folder.
    if storage.is_remote(where):
      directory = storage.download(directory)
  else:
    _require_one_process(data.source, processes)
    where = directory = workdir / 'corpus'
    settings = _settings(data, None if data.vocab else vocab_size)
    if not (directory / 'manifest.json').exists():
      preparation.prepare(settings, os.fspath(directory))
    # A resumed run must not read other data than before.
    changed = preparation.changed_setting(directory, settings)
    if changed:
      name, before = changed
      group = 'model' if name == 'vocab_size' else 'data'
      raise UserError(f'{workdir} was made with {group}.{name}={before!r}, now it is '
                      f'{getattr(settings, name)!r}: use another --workdir')
  corpus = open_records(directory)
  if data.vocab:
    given = tokenizer_reader.load(data.vocab, data.lowercase)
    require(tokenizer_base.digest(given) == tokenizer_base.digest(corpus.tokenizer),
            f'data.vocab={data.vocab} is not the vocabulary that made the records in '
            f'{where}: leave data.vocab out, or prepare the text again with it')
  return corpus


def _require_one_process(source: str, processes: int):
  require(processes == 1,
          f'data.source={source!r} is text, and {processes} processes train on it: make '
          'token records with bert_jax.prepare first, and give their folder')


def _settings(data: ConfigDict, vocab_size: int | None) -> Settings:
  fields = {f.name for f in dataclasses.fields(Settings)} & set(data.keys())
  return Settings(**{name: data[name] for name in fields}, vocab_size=vocab_size)


def _open_mixture(corpora: Sequence[mixture.WeightedCorpus], data: ConfigDict,
                  vocab_size: int, workdir: epath.Path, processes: int) -> Corpus:
  """Opens the corpora of a mixture, which share a vocabulary.

  Without `data.vocab`, texts use the vocabulary of the first prepared records. If there
  are none, one vocabulary is trained on all texts.
  """
  groups = [config_fields.changed(data, {'source': corpus.source}) for corpus in corpora]
  texts = [group for group in groups if not is_prepared(group.source)]
  vocab = data.vocab
  if texts and not vocab:
    record_sources = [group.source for group in groups if is_prepared(group.source)]
    vocab = (f'{record_sources[0]}/tokenizer' if record_sources
             else os.fspath(workdir / 'vocabulary'))
    # CONFIG is saved last, so a folder with it has a complete vocabulary.
    if not record_sources and not (epath.Path(vocab) / tokenizer_base.CONFIG).exists():
      _require_one_process(data.source, processes)
      preparation.train_vocabulary([_settings(text, vocab_size) for text in texts],
                                   epath.Path(vocab))
  groups = [config_fields.changed(group, {'vocab': vocab}) if group in texts else group
            for group in groups]
  opened = [open_corpus(group, vocab_size, workdir / 'corpora' / str(i), processes)
            for i, group in enumerate(groups)]
  first = opened[0]
  for group, corpus in zip(groups, opened):
    require(
        tokenizer_base.digest(corpus.tokenizer) == tokenizer_base.digest(first.tokenizer),
        f'the records in {group.source} have another vocabulary than the records in '
        f'{groups[0].source}: prepare one of them again with --vocab')
  weights = tuple((weighted.start, weighted.end) for weighted in corpora)
  train = mixture.MixedRecords(tuple(corpus.train for corpus in opened), weights)
  held_out = [(corpus.heldout, w) for corpus, w in zip(opened, weights)
              if corpus.heldout.num_tokens]
  # Weights each corpus by its mean share of the run; the sum is the number of tokens.
  counts = sum(np.mean(w) * train.num_tokens * corpus.counts / max(corpus.counts.sum(), 1)
               for w, corpus in zip(weights, opened)).astype(np.int64)
  heldout_counts = sum(
      (np.bincount(held.tokens(np.arange(held.num_tokens)), minlength=len(counts))
       for held, _ in held_out), np.zeros_like(counts))
  heldout = mixture.MixedRecords(
      tuple(held for held, _ in held_out), tuple(w for _, w in held_out))
  return Corpus(
      first.tokenizer, train, heldout, counts,
      preparation.cross_entropy(heldout_counts, counts),
      tuple(f'{group.source}: {note}'
            for group, c in zip(groups, opened) for note in c.notes))
