"""Makes token records (see records.py) from text: survey, vocabulary, tokens.

An unfinished output folder also has progress/ with the results of the finished steps. The
same command resumes after these steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
from typing import Any

from etils import epath
import numpy as np
from tqdm import auto as tqdm

from bert_jax.data import corpus, earlier_records, encode, records
from bert_jax.data.corpus import Settings
from bert_jax.data.survey import Survey, survey_of
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError, require
from bert_jax.runtime import host, pool, storage

_SHARD = 256 << 20  # bytes of text in a shard
_IN_PROCESS = 4 << 20  # bytes; with less text, workers cost more time than they save
_Map = Callable[[Callable[[Any], encode.Encoded], Iterable[Any]],
                Iterable[encode.Encoded]]
_AT_ONCE = 3  # batches in flight for each worker


def _progress_bar(total: int | None, desc: str) -> tqdm.tqdm:
  # disable=None: no bar in a log file.
  return tqdm.tqdm(total=total, desc=desc, unit='B', unit_scale=True, leave=False,
                   disable=None, dynamic_ncols=True)


def with_progress(documents: Iterable[str], desc: str,
                  total: int | None = None) -> Iterator[str]:
  """Yields the documents and shows a progress bar."""
  with _progress_bar(total, desc) as progress:
    for document in documents:
      yield document
      progress.update(len(document.encode()))


def cross_entropy(heldout_counts: np.ndarray, train_counts: np.ndarray) -> float | None:
  """The loss of a unigram model on held-out tokens, in nats per token.

  The model knows only the token frequencies of the training text, with add-one smoothing.
  Masked LM training has to get below this plateau. Counts are [V] int64. Returns None
  without held-out tokens.
  """
  if not heldout_counts.sum():
    return None
  smoothed = (train_counts + 1) / (train_counts + 1).sum()
  return float(-(heldout_counts * np.log(smoothed)).sum() / heldout_counts.sum())


def check_documents(source: str, documents: int, different: int):
  """Raises UserError for a corpus with fewer than two different documents."""
  require(documents,
          f'data.source={source!r} holds no document: it is empty or blank lines')
  require(different > 1,
          f'data.source={source!r} holds one document: at least two are needed. Put a blank '
          'line between documents')


def check_tokens(source: str, counts: Sequence[int]):
  """Raises UserError for a corpus without tokens; `counts` counts each entry."""
  require(any(counts),
          f'data.source={source!r} holds no text that the vocabulary can encode')


def make_tokenizer(settings: Settings, source: corpus.Source,
                   survey: Survey) -> tokenizer_base.Tokenizer:
  """Loads the vocabulary of the settings, or trains one."""
  if settings.vocab:
    return tokenizer_reader.load(settings.vocab, settings.lowercase)

  def sentences():
    for document in with_progress(source.read(), 'training the vocabulary', survey.size):
      if survey.in_vocabulary_text(document):
        yield from settings.sentences(document)

  return training.train(settings.tokenizer, sentences, settings.vocab_size,
                        settings.lowercase)


def train_vocabulary(texts: Sequence[Settings], folder: epath.Path):
  """Trains one vocabulary on texts that differ in `source`, and saves it in `folder`."""
  sources = [corpus.open_source(text, folder / 'progress') for text in texts]
  # A lambda, because the survey and the training each read the texts from the start.
  together = corpus.Source((), lambda: itertools.chain.from_iterable(
      source.read() for source in sources))
  survey = survey_of(with_progress(together.read(), 'reading'), texts[0].heldout)
  make_tokenizer(texts[0], together, survey).save(folder)
  shutil.rmtree(folder / 'progress', ignore_errors=True)


def write_shard(directory: epath.Path, name: str, vocab_size: int,
                encoded: Iterable[encode.Encoded]) -> dict[str, Any]:
  """Writes one shard; any process or machine can run it.

  Returns:
    A JSON object: 'entry' for the manifest, the number of documents 'read', their 'size'
    in bytes, the held-out sentences 'seen' in them, and the 'counts' of their tokens.
  """
  writer = records.ShardWriter(directory, name, vocab_size)
  counts = np.zeros(vocab_size, np.int64)
  seen, documents, size = set(), 0, 0
  for part in encoded:
    writer.add(part.tokens, part.words, part.lengths, part.counts)
    counts += np.bincount(part.tokens, minlength=vocab_size)
    seen.update(part.heldout)
    documents += part.documents
    size += part.size
  return {
      'entry': writer.close(),
      'read': documents,
      'size': size,
      'seen': sorted(seen),
      'counts': counts.tolist(),
  }


def token_counts(shards: Iterable[dict[str, Any]], vocab_size: int) -> np.ndarray:
  """[V] int64: how often each entry occurs in the results of `write_shard`."""
  return sum((np.array(shard['counts']) for shard in shards),
             np.zeros(vocab_size, np.int64))


def finish(folder: epath.Path, settings: dict[str, Any],
           tokenizer: tokenizer_base.Tokenizer, *, documents: int, size: int,
           notes: list[str], splits: dict[str, list[dict[str, Any]]]):
  """Writes counts.npy and the manifest.

  Args:
    folder: has the shards and the tokenizer.
    settings: of the corpus.
    tokenizer: the tokenizer of the shards.
    documents: the number of documents in both splits.
    size: bytes of text.
    notes: messages for the user.
    splits: the results of `write_shard` for 'train' and 'heldout'.
  """
  train, heldout = (token_counts(splits[split], tokenizer.vocab_size)
                    for split in ('train', 'heldout'))
  with (folder / 'counts.npy').open('wb') as file:
    np.save(file, train)
  # The manifest comes last, because records with a manifest count as complete.
  records.write_manifest(folder, {
      'settings': settings,
      'tokenizer': tokenizer_base.digest(tokenizer),
      'vocab_size': tokenizer.vocab_size,
      'documents': documents,
      'bytes': size,
      'unigram_entropy': cross_entropy(heldout, train),
      'notes': notes,
      'splits': {split: [shard['entry'] for shard in shards]
                 for split, shards in splits.items()},
  })


class _Preparation:
  """The preparation of one corpus in one local folder."""

  def __init__(self, settings: Settings, output: epath.Path,
               vocabulary_digest: str | None):
    """`vocabulary_digest`: the digest of the given vocabulary; None = train one."""
    self.settings, self.output = settings, output
    self.progress = output / 'progress'
    self.source = corpus.open_source(settings, self.progress)
    self._requested = {
        **dataclasses.asdict(settings),
        'inputs': list(self.source.inputs),
        'vocab': settings.vocab and str(epath.Path(settings.vocab).resolve()),
        'vocabulary': vocabulary_digest,
    }
    self._check_output()

  def _check_output(self):
    """Raises UserError if the output folder holds anything but this preparation."""
    output, begun = self.output, self.progress / 'settings.json'
    if begun.exists():
      earlier = earlier_records.with_defaults(storage.read_json(begun))
      for name, value in self._requested.items():
        change = ('of files that have changed since' if name == 'inputs' else
                  f'with another {name} ({earlier.get(name)}, now {value})')
        require(earlier.get(name) == value,
                f'{output} holds an interrupted preparation {change}: remove it or use '
                'another folder')
    elif output.exists():
      require(output.is_dir(), f'{output} is a file: use another --output')
      strangers = [path.name for path in output.iterdir() if path != self.progress]
      # A preparation that was killed early leaves only these two kinds of files. Anything
      # else belongs to the user.
      if self.progress.exists():
        strangers += [
            f'progress/{path.name}' for path in self.progress.iterdir()
            if path.name != 'builtin.txt.gz' and not path.name.endswith('.partial')]
      require(not strangers,
              f'{output} is not empty (it holds {min(strangers, default="")}): use '
              'another folder')
    # A read-only folder must fail here, not after an hour of reading.
    try:
      self.progress.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise UserError(f'{output} cannot be written: {e.strerror or e}') from e

  def _once(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
    """Returns `make(*args)` as JSON; progress/ keeps it for the next run."""
    path = self.progress / f'{name}.json'
    if not path.exists():
      storage.write_whole(path, json.dumps(make(*args)))
    return json.loads(path.read_text())

  def run(self, workers: int):
    """Does the steps that an earlier run did not finish; cleans up after a UserError."""
    try:
      survey = Survey(*self._once('survey', self._survey))
      in_process = workers == 1 or survey.size <= _IN_PROCESS
      warm_up = functools.partial(encode.warm_up, self.settings)
      # The workers start and warm up while this process makes the vocabulary.
      with (contextlib.nullcontext() if in_process else
            pool.processes(workers, warm_up)) as executor:
        self._once('vocabulary', self._save_tokenizer, survey)
        tokenizer = tokenizer_reader.load(self.output / 'tokenizer')
        heldout = self._once('heldout', self._heldout, survey, tokenizer)
        encoder = encode.Encoder(
            tokenizer, self.settings, heldout['keys'],
            reopen=(os.fspath(self.output / 'tokenizer'), self.settings,
                    os.fspath(self.progress / 'heldout.json')))
        ordered_map = map if in_process else functools.partial(
            pool.ordered_map, executor, at_once=_AT_ONCE * workers)
        shards = self._write_training(survey, encoder, ordered_map)
        self._finish(survey, encoder, heldout['documents'], shards, ordered_map)
    except UserError:
      # Before the first shard, little work is lost.
      if not (self.progress / 'shard-00000.json').exists():
        self._remove()
      raise

  def _remove(self):
    """Deletes what this preparation wrote. Files that a user has added stay."""
    for folder in (self.progress, self.output / 'tokenizer'):
      shutil.rmtree(folder, ignore_errors=True)
    for path in (*storage.matching(self.output, '*.bin'), self.output / 'counts.npy'):
      path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder is not empty
      os.rmdir(self.output)

  def _survey(self) -> Survey:
    survey = survey_of(with_progress(self.source.read(), 'reading'),
                       self.settings.heldout)
    check_documents(self.settings.source, survey.documents, survey.different)
    # Stores the settings only now, so that an unreadable input leaves none behind.
    self._once('settings', dict, self._requested)
    return survey

  def _save_tokenizer(self, survey: Survey) -> str:
    tokenizer = make_tokenizer(self.settings, self.source, survey)
    tokenizer.save(self.output / 'tokenizer')
    return tokenizer_base.digest(tokenizer)

  def _heldout(self, survey: Survey,
               tokenizer: tokenizer_base.Tokenizer) -> dict[str, Any]:
    """The held-out documents as lists of sentences, and a key for each sentence."""
    documents = [self.settings.sentences(document)
                 for document in (self.source.read() if survey.heldout_below else ())
                 if survey.is_held_out(document)]
    sentences = list(itertools.chain.from_iterable(documents))
    keys = encode.Encoder(tokenizer, self.settings).keys(sentences)
    return {'documents': documents, 'keys': keys}

  def _write_training(self, survey: Survey, encoder: encode.Encoder,
                      ordered_map: _Map) -> list[dict[str, Any]]:
    """Writes the shards of the training text; returns the results of `write_shard`."""
    shards = [json.loads(path.read_text())
              for path in storage.matching(self.progress, 'shard-*.json')]
    training = (d for d in self.source.read() if not survey.is_held_out(d))
    # Documents keep their order, so a count is enough to skip the finished documents.
    training = itertools.islice(training, sum(shard['read'] for shard in shards), None)
    parts = iter(ordered_map(encoder.documents, encode.batches(training)))
    with _progress_bar(survey.size, 'tokenizing') as progress:
      progress.update(sum(shard['size'] for shard in shards))

      def parts_of_shard(first: encode.Encoded) -> Iterator[encode.Encoded]:
        size = 0
        for part in itertools.chain([first], parts):
          yield part
          progress.update(part.size)
          size += part.size
          if size >= _SHARD:
            return

      # Takes the first part before it starts a shard, so that no shard is empty.
      for first in parts:
        number = f'{len(shards):05}'
        shards.append(self._once(
            f'shard-{number}', write_shard, self.output, f'train-{number}',
            encoder.tokenizer.vocab_size, parts_of_shard(first)))
    return shards

  def _finish(self, survey: Survey, encoder: encode.Encoder, documents: list[list[str]],
              shards: list[dict[str, Any]], ordered_map: _Map):
    """Writes the held-out shard, the counts and the manifest.

    Held-out sentences that occur in the training text are left out.
    """
    tokenizer = encoder.tokenizer
    counts = token_counts(shards, tokenizer.vocab_size)
    if not counts.any():
      self._remove()
    check_tokens(self.settings.source, counts)
    # The score on a sentence of the training text would measure memorization.
    sentences = list(itertools.chain.from_iterable(documents))
    seen = {sentences[i] for shard in shards for i in shard['seen']}
    # A sentence that is left out ends a document: its neighbors do not follow each other.
    fresh = [list(run) for document in documents
             for is_out, run in itertools.groupby(document, seen.__contains__) if not is_out]
    batches = (fresh[i:i + 100] for i in range(0, len(fresh), 100))
    heldout = write_shard(self.output, 'heldout-00000', tokenizer.vocab_size,
                          ordered_map(encoder.sentences, batches))
    unknown = counts[tokenizer.unk_id] / counts.sum()
    notes = [note for applies, note in (
        (seen, f'{len(seen):,} held-out sentences that occur in the training text were '
         'left out'),
        (survey.copies, f'{survey.copies:,} documents are exact copies of others'),
        (unknown > 0.01,
         f'{unknown:.1%} of the tokens are [UNK]: does the vocabulary fit the text?'),
        (self.settings.heldout and not any(heldout['counts']),
         'nothing is held out: the corpus has too few documents'),
    ) if applies]
    finish(self.output,
           dataclasses.asdict(self.settings) | {'inputs': self._requested['inputs']},
           tokenizer, documents=survey.documents, size=survey.size, notes=notes,
           splits={'train': shards, 'heldout': [heldout]})
    shutil.rmtree(self.progress)


@pool.without_main_module()
def prepare(settings: Settings, output: str, workers: int = 0):
  """Writes the token records of a corpus into a folder, local or gs://.

  Args:
    settings: the text and the vocabulary.
    output: an empty folder, or one with the same preparation, interrupted or complete.
    workers: the number of worker processes; 0 = one for each core.

  Raises:
    UserError: a mistake in the settings, the text or the output.
    Failed: a worker died; the same call resumes.
  """
  # These checks come first, because reading the text may take hours.
  if not settings.vocab:
    training.check(settings.tokenizer, settings.vocab_size)
  digest = None if not settings.vocab else tokenizer_base.digest(
      tokenizer_reader.load(settings.vocab, settings.lowercase))
  storage.check('--output', output)
  folder, is_remote = epath.Path(output), storage.is_remote(output)
  if (folder / 'manifest.json').exists():
    difference = earlier_records.difference(folder, settings, digest)
    require(not difference, f'{output} is not empty: it holds records {difference}; use '
                            'another folder')
    return  # the records are complete
  # Not the folder in which `storage.download` keeps records for training.
  local = storage.local_folder(f'{output}#prepare') if is_remote else folder
  # Complete local records of an interrupted upload only need the upload.
  is_made = (local / 'manifest.json').exists()
  if not is_made or earlier_records.difference(local, settings, digest):
    require(not is_remote or not folder.exists() or not any(folder.iterdir()),
            f'{output} is not empty: use another folder')
    if is_made:
      shutil.rmtree(local)
    _Preparation(settings, local, digest).run(workers or host.cores())
  if is_remote:
    storage.upload(local, folder)
    shutil.rmtree(local)
