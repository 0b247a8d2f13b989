"""The corpus of a run: token records, or text that the run prepares first."""

from collections.abc import Sequence
import dataclasses
import json
import os
import shutil
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict
import numpy as np

from bert_jax import config_fields
from bert_jax.data import earlier_records, mixture, preparation, records
from bert_jax.data.corpus import Settings, open_source
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import Failed, UserError, require
from bert_jax.runtime import storage

# The most training tokens in which a new run searches for held-out sentences: 20 seconds.
_COUNTED = 500_000_000


class Corpus(NamedTuple):
  """A tokenized corpus."""

  tokenizer: tokenizer_base.Tokenizer
  train: records.Records
  heldout: records.Records
  counts: np.ndarray  # [V] int64, how often each entry occurs in `train`
  # nats per held-out token, see `preparation.cross_entropy`; None = nothing is held out
  unigram_entropy: float | None
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
          'older bert_jax ignored some of its settings: run bert_jax.prepare again into '
          'an empty folder, or train in another --workdir')
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
    UserError: the corpus or vocabulary is not usable, or differs from the workdir's.
  """
  # Without run.json, no step was trained on the workdir's records: they can be replaced.
  began = (workdir / 'run.json').exists()
  corpora = mixture.parse(data.source)
  if corpora:
    return _open_mixture(corpora, data, vocab_size, workdir, processes, began)
  return _open_single(data, vocab_size, workdir, processes, began)


def _open_single(data: ConfigDict, vocab_size: int, workdir: epath.Path, processes: int,
                 began: bool) -> Corpus:
  """Opens token records or text; see `open_corpus`. `began`: the workdir has a run."""
  # Prepared records serve all runs. Text is prepared in the workdir, for this run alone.
  prepared = is_prepared(data.source)
  if prepared:
    where = data.source
    directory = epath.Path(where)
    # Records are memory-mapped, which needs a local folder.
    if storage.is_remote(where):
      directory = storage.download(directory)
  else:
    _require_one_process(data.source, processes)
    where = directory = workdir / 'corpus'
    settings = _settings(data, None if data.vocab else vocab_size)
    _prepare_once(settings, workdir, began)
  corpus = open_records(directory)
  if data.vocab:
    given = tokenizer_reader.load(data.vocab, data.lowercase)
    remedy = ('leave data.vocab out, or prepare the text again with it' if prepared else
              'give that vocabulary, or use another --workdir')
    require(tokenizer_base.digest(given) == tokenizer_base.digest(corpus.tokenizer),
            f'data.vocab={data.vocab} is not the vocabulary that made the records in '
            f'{where}: {remedy}')
  return corpus


def _prepare_once(settings: Settings, workdir: epath.Path, began: bool):
  """Prepares text in workdir/corpus, unless its records are already there.

  Raises UserError if those records have other settings, or if the run has begun and the
  text has changed.
  """
  directory = workdir / 'corpus'
  if (directory / 'manifest.json').exists():
    before = records.read_manifest(directory)['settings']
    # The vocabulary may be a file in the workdir, which may move. So its path is ignored
    # here, and the caller compares its digest.
    both = settings.vocab and before.get('vocab')
    asked = dataclasses.replace(settings, vocab=before['vocab']) if both else settings
    # A resumed run must not read other data than before.
    changed = earlier_records.changed_setting(directory, asked)
    if changed:
      name, value = changed
      group = 'model' if name == 'vocab_size' else 'data'
      raise UserError(f'{workdir} was made with {group}.{name}={value!r}, now it is '
                      f'{getattr(settings, name)!r}: use another --workdir')
    inputs = before.get('inputs')  # Beam stores none
    if began and inputs:
      _require_same_text(settings, inputs, directory)
    elif inputs and inputs != _inputs(settings, directory):
      _discard(directory)
  if not (directory / 'manifest.json').exists():
    preparation.prepare(settings, os.fspath(directory))


def _inputs(settings: Settings, directory: epath.Path) -> list[str]:
  return list(open_source(settings, directory / 'progress').inputs)


def _require_same_text(settings: Settings, before: Sequence[str], directory: epath.Path):
  """Raises UserError if a file was added, or its size has changed, since the run began.

  A copy of a text on another machine has other file times, so times are not compared. The
  records hold the text, so a run can resume without the files.
  """
  try:
    now = _inputs(settings, directory)
  except (UserError, Failed, OSError):
    return
  # An input is 'NAME SIZE TIME'; see `corpus.Source`.
  known = {file.rsplit(' ', 1)[0] for file in before}
  for file in now:
    name_and_size = file.rsplit(' ', 1)[0]
    require(name_and_size in known,
            f'{name_and_size.rsplit(" ", 1)[0]} is not the text with which this run '
            'began: put that text back, or use another --workdir')


def _discard(folder: epath.Path):
  """Deletes a folder of a run that never began."""
  if folder.exists():
    # Renames it first: a killed process must not leave half a folder under this name.
    old = storage.replaced(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def _require_one_process(source: str, processes: int):
  require(processes == 1,
          f'data.source={source!r} is text, and {processes} processes train on it: make '
          'token records with bert_jax.prepare first, and give their folder')


def _settings(data: ConfigDict, vocab_size: int | None) -> Settings:
  fields = {f.name for f in dataclasses.fields(Settings)} & set(data.keys())
  return Settings(**{name: data[name] for name in fields}, vocab_size=vocab_size)


def _train_once(texts: Sequence[Settings], workdir: epath.Path, began: bool):
  """Trains workdir/vocabulary on the texts of a mixture, unless it exists.

  Raises UserError if the run began with a vocabulary of another size.
  """
  folder, size = workdir / 'vocabulary', texts[0].vocab_size
  made_of = folder / 'made_of.json'  # older versions wrote none
  # CONFIG is saved last, so a folder with it has a complete vocabulary.
  complete = (folder / tokenizer_base.CONFIG).exists()
  before = storage.read_json_if_any(made_of).get('texts') if complete else None
  if began and complete:
    # `_prepare_once` compares the other settings of each text.
    earlier = before[0]['vocab_size'] if before else size
    require(earlier == size, f'{workdir} was made with model.vocab_size={earlier}, now it '
            f'is {size}: use another --workdir')
    return
  now = [dataclasses.asdict(text) | {'inputs': _inputs(text, folder)} for text in texts]
  if not began:
    if now == before:
      return
    # Records made with the old vocabulary are useless.
    for old in (folder, workdir / 'corpora'):
      _discard(old)
  preparation.train_vocabulary(texts, folder)
  storage.write_whole(made_of, json.dumps({'texts': now}, indent=1) + '\n')


def _open_mixture(corpora: Sequence[mixture.WeightedCorpus], data: ConfigDict,
                  vocab_size: int, workdir: epath.Path, processes: int,
                  began: bool) -> Corpus:
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
    if not record_sources:
      _require_one_process(data.source, processes)
      _train_once([_settings(text, vocab_size) for text in texts], workdir, began)
  # `check_vocabulary` compares the run's own copy of a model's vocabulary with records.
  is_own = data.vocab == os.fspath(workdir / 'tokenizer')
  groups = [config_fields.changed(group, {
      'vocab': vocab if group in texts else '' if is_own else data.vocab}) for group in groups]
  opened = [
      _open_single(group, vocab_size, workdir / 'corpora' / str(i), processes, began)
      for i, group in enumerate(groups)]
  for group, corpus in zip(groups, opened):
    require(
        tokenizer_base.digest(corpus.tokenizer) == tokenizer_base.digest(opened[0].tokenizer),
        f'the records in {group.source} have another vocabulary than the records in '
        f'{groups[0].source}: prepare one of them again with --vocab')
  # Equal vocabularies may have embedding tables of different lengths: takes the longest.
  tokenizer = max((corpus.tokenizer for corpus in opened), key=lambda x: x.vocab_size)
  opened = [corpus._replace(counts=np.pad(
      corpus.counts, (0, tokenizer.vocab_size - len(corpus.counts)))) for corpus in opened]
  weights = tuple((weighted.start, weighted.end) for weighted in corpora)
  train = mixture.MixedRecords(tuple(corpus.train for corpus in opened), weights)
  held_out = [(corpus.heldout, w) for corpus, w in zip(opened, weights)
              if corpus.heldout.num_tokens]
  # Scales each corpus to its mean share of the run; the counts sum to `num_tokens`.
  counts = sum(np.mean(w) * train.num_tokens * corpus.counts / max(corpus.counts.sum(), 1)
               for w, corpus in zip(weights, opened)).astype(np.int64)
  heldout_counts = sum(
      (np.bincount(held.tokens(np.arange(held.num_tokens)), minlength=len(counts))
       for held, _ in held_out), np.zeros_like(counts))
  heldout = mixture.MixedRecords(
      tuple(held for held, _ in held_out), tuple(w for _, w in held_out))
  notes = [f'{group.source}: {note}'
           for group, c in zip(groups, opened) for note in c.notes]
  # A resumed run does not search again, because the search reads all of the text.
  if not began and train.num_tokens > _COUNTED:
    notes.append('held-out sentences may also occur in the training text of another part: '
                 f'a text of more than {_COUNTED:,} tokens is not searched')
  elif not began and (seen := mixture.count_seen(heldout, train))[0]:
    notes.append('{:,} of {:,} held-out sentences occur in the training text of another '
                 'part: a part leaves out only its own held-out sentences'.format(*seen))
  return Corpus(tokenizer, train, heldout, counts,
                preparation.cross_entropy(heldout_counts, counts), tuple(notes))
