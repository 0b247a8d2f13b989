"""From text to token records: survey, vocabulary, tokens. See records.py for what comes of it.

While it is under way the output folder also holds progress/: what is done so far, so that the same
command goes on where it was stopped.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
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

from bert_jax.data import builtin
from bert_jax.data import corpus
from bert_jax.data import encode
from bert_jax.data import languages
from bert_jax.data import records
from bert_jax.data import survey as survey_lib
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data import vocabulary
from bert_jax.errors import UserError
from bert_jax.runtime import console
from bert_jax.runtime import host
from bert_jax.runtime import pool
from bert_jax.runtime import storage

_SHARD = 256 << 20  # bytes of text in a shard
_IN_PROCESS = 4 << 20  # bytes of text for which no worker is started


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is prepared, and how. The fields are those of the config group `data`."""

  source: str
  format: str = 'auto'
  language: str = 'en'
  text_column: str = 'text'
  lines_are_sentences: bool = False
  vocab: str = ''
  vocab_size: int | None = None  # of a vocabulary to be trained; None where one is given
  tokenizer: str = 'wordpiece'
  lowercase: bool = True
  heldout: float = 0.02

  def __post_init__(self):
    languages.check('data.language', self.language)

  @property
  def rules(self) -> encode.Rules:
    """How text becomes sentences."""
    return encode.Rules(self.format, self.language, self.lines_are_sentences)


def bar(total: int | None, desc: str) -> tqdm.tqdm:
  """A progress bar over bytes of text."""
  return tqdm.tqdm(total=total, desc=desc, unit='B', unit_scale=True, leave=False, disable=None,
                   dynamic_ncols=True)


def watched(documents: Iterable[str], desc: str, total: int | None = None) -> Iterator[str]:
  """The documents, with a progress bar."""
  with bar(total, desc) as progress:
    for document in documents:
      yield document
      progress.update(len(document.encode()))


def cross_entropy(heldout_counts: np.ndarray, train_counts: np.ndarray) -> float:
  """Cross-entropy of held-out tokens under the training tokens' frequencies, in nat a token.

  It is the loss of a model that has learned nothing but how often each token occurs (add-one
  smoothed): the plateau that masked-LM training has to leave.
  """
  smoothed = (train_counts + 1) / (train_counts + 1).sum()
  return float(-(heldout_counts * np.log(smoothed)).sum() / heldout_counts.sum())


def open_source(settings: Settings, scratch: epath.Path) -> corpus.Source:
  """The source of the settings; the built-in corpus is first written into `scratch`."""
  if settings.source != 'builtin':
    return corpus.open_source(settings.source, settings.format, settings.text_column)
  text = scratch / 'builtin.txt.gz'
  if not text.exists():
    scratch.mkdir(parents=True, exist_ok=True)
    builtin.extract(text)
  return corpus.open_source(str(text), 'text', 'text')._replace(inputs=('builtin',))


def check_documents(source: str, found: survey_lib.Survey):
  """Raises UserError for a corpus of which no next-sentence pairs can be made."""
  if not found.documents:
    raise UserError(f'data.source={source!r} holds no document: it is empty or blank lines')
  if found.different == 1:
    raise UserError(f'data.source={source!r} holds one document: a next sentence from another '
                    'document needs at least two. Put a blank line between documents')


def make_tokenizer(settings: Settings, source: corpus.Source,
                   found: survey_lib.Survey) -> tokenizer_lib.Tokenizer:
  """Loads the vocabulary of the settings, or trains one."""
  if settings.vocab:
    return tokenizer_lib.load(settings.vocab, settings.lowercase)

  def sentences():
    for document in watched(source.read(), 'training the vocabulary', found.size):
      if found.in_vocabulary_text(document):
        yield from settings.rules.sentences(document)

  return vocabulary.train(settings.tokenizer, sentences, settings.vocab_size,
                          settings.lowercase)


def write_shard(directory: epath.Path, name: str, vocab_size: int,
                encoded: Iterable[encode.Encoded]) -> dict[str, Any]:
  """Writes one shard: its entry in the manifest, and what was read, counted and seen for it.

  A function of its arguments alone: processes on one machine or on many may run it.
  """
  writer = records.ShardWriter(directory, name, vocab_size)
  counts, seen, documents, size = np.zeros(vocab_size, np.int64), set(), 0, 0
  for part in encoded:
    writer.add(part.tokens, part.words, part.lengths, part.counts)
    counts += np.bincount(part.tokens, minlength=vocab_size)
    seen.update(part.heldout)
    documents += part.documents
    size += part.size
  return {'entry': writer.close(), 'read': documents, 'size': size, 'seen': sorted(seen),
          'counts': counts}


class Preparation:
  """One corpus on its way into one folder."""

  def __init__(self, settings: Settings, output: epath.Path):
    """Raises UserError if the output folder holds something else."""
    self.settings, self.output = settings, output
    self.progress = output / 'progress'
    self.source = open_source(settings, self.progress)
    asked = {**dataclasses.asdict(settings), 'inputs': list(self.source.inputs)}
    asked['vocab'] = settings.vocab and str(epath.Path(settings.vocab).resolve())
    self._asked = json.loads(json.dumps(asked))
    self._check_output()

  def _check_output(self):
    begun = self.progress / 'settings.json'
    if begun.exists():
      earlier = json.loads(begun.read_text())
      for name, value in self._asked.items():
        if earlier.get(name) != value:
          was = ('of files that have changed since' if name == 'inputs' else
                 f'with another {name} ({earlier.get(name)}, now {value})')
          raise UserError(f'{self.output} holds an interrupted preparation {was}: remove it or use '
                          'another folder')
    elif self.output.exists() and not self.output.is_dir():
      raise UserError(f'{self.output} is a file: use another --output')
    elif self.output.exists():
      others = [p.name for p in self.output.iterdir() if p.name != 'progress']
      if others:
        raise UserError(f'{self.output} is not empty (it holds {sorted(others)[0]}): use another '
                        'folder')

  def _state(self, name: str, make: Callable[[], Any]) -> Any:
    """A JSON value that is made once and kept in progress/."""
    path = self.progress / f'{name}.json'
    if not path.exists():
      value = make()
      self.progress.mkdir(parents=True, exist_ok=True)
      partial = self.progress / f'{name}.json.partial'
      partial.write_text(json.dumps(value))
      partial.replace(path)
    return json.loads(path.read_text())

  def _survey(self) -> survey_lib.Survey:
    found = survey_lib.survey(watched(self.source.read(), 'reading'), self.settings.heldout)
    check_documents(self.settings.source, found)
    return found

  def run(self, workers: int):
    """Prepares everything; goes on with what an earlier run left.

    Raises:
      UserError: the text, the vocabulary or the output cannot be used; nothing is left behind.
      Failed: a worker died; everything up to the last whole shard is kept.
    """
    try:
      self._run(workers)
    except UserError:
      if not (self.progress / 'train-00000.json').exists():  # no work is lost
        shutil.rmtree(self.output, ignore_errors=True)  # all in it is ours
      raise

  def _run(self, workers: int):
    if not (self.progress / 'survey.json').exists():
      found = self._survey()  # before anything is written: text that cannot be read speaks here
      self._state('settings', lambda: self._asked)
      self._state('survey', lambda: found)
    found = survey_lib.Survey(*self._state('survey', self._survey))
    tokenizer_directory = self.output / 'tokenizer'
    if not (self.progress / 'vocabulary.json').exists():
      tokenizer = make_tokenizer(self.settings, self.source, found)
      tokenizer.save(tokenizer_directory)
      self._state('vocabulary', lambda: tokenizer_lib.digest(tokenizer))
    tokenizer = tokenizer_lib.load(tokenizer_directory)
    heldout_file = os.fspath(self.progress / 'heldout.jsonl')
    self._state('heldout', lambda: self._write_heldout(found, heldout_file))
    keys_file = os.fspath(self.progress / 'heldout.keys')
    self._state('heldout_keys', lambda: self._write_keys(tokenizer, heldout_file, keys_file))
    shards = self._write_training(found, tokenizer, keys_file, workers)
    self._finish(found, tokenizer, heldout_file, shards)

  def _write_heldout(self, found: survey_lib.Survey, path: str) -> int:
    documents = [self.settings.rules.sentences(document)
                 for document in (self.source.read() if found.heldout_below else ())
                 if found.is_held_out(document)]
    encode.write_heldout(path, documents)
    return len(documents)

  def _write_keys(self, tokenizer: tokenizer_lib.Tokenizer, heldout_file: str, path: str) -> int:
    """Writes a key of each held-out sentence, once for all workers."""
    sentences = list(itertools.chain.from_iterable(encode.read_heldout(heldout_file)))
    encode.write_keys(path, encode.Encoder(tokenizer, self.settings.rules).keys(sentences))
    return len(sentences)

  def _write_training(self, found: survey_lib.Survey, tokenizer: tokenizer_lib.Tokenizer,
                      keys_file: str, workers: int) -> list[dict[str, Any]]:
    """Writes the shards of the training text; returns what `write_shard` says of each."""
    shards = []
    while (self.progress / f'train-{len(shards):05}.json').exists():
      shards.append(self._load_shard(len(shards)))
    skip = sum(shard['read'] for shard in shards)

    training = (d for d in self.source.read() if not found.is_held_out(d))
    for _ in range(skip):
      next(training)
    if workers == 1 or found.size <= _IN_PROCESS:
      encoder = encode.Encoder(tokenizer, self.settings.rules, encode.read_keys(keys_file))
      parts = map(encoder.documents, encode.batches(training))
    else:
      work = functools.partial(encode.encode, tokenizer=os.fspath(self.output / 'tokenizer'),
                               rules=self.settings.rules, heldout=keys_file)
      parts = pool.ordered_map(work, encode.batches(training), workers)
    with bar(found.size, 'tokenising') as progress:
      progress.update(sum(shard['size'] for shard in shards))
      part = next(parts, None)
      while part is not None:
        size = 0

        def shard():
          nonlocal part, size
          while part is not None and size < _SHARD:
            yield part
            size += part.size
            progress.update(part.size)
            part = next(parts, None)

        name = f'train-{len(shards):05}'
        written = write_shard(self.output, name, tokenizer.vocab_size, shard())
        np.save(os.fspath(self.progress / f'{name}.npy'), written.pop('counts'))
        self._state(name, lambda: written)
        shards.append(self._load_shard(len(shards)))
    return shards

  def _load_shard(self, number: int) -> dict[str, Any]:
    name = f'train-{number:05}'
    counts = np.load(os.fspath(self.progress / f'{name}.npy'))
    return {**json.loads((self.progress / f'{name}.json').read_text()), 'counts': counts}

  def _finish(self, found: survey_lib.Survey, tokenizer: tokenizer_lib.Tokenizer,
              heldout_file: str, shards: list[dict[str, Any]]):
    """Writes the held-out shard, the counts, and at last the manifest."""
    counts = sum((shard['counts'] for shard in shards), np.zeros(tokenizer.vocab_size, np.int64))
    if not counts.sum():
      shutil.rmtree(self.progress)  # there is nothing to go on with
      raise UserError(f'data.source={self.settings.source!r} holds no text that the vocabulary can '
                      'encode')
    documents = encode.read_heldout(heldout_file)
    sentences = list(itertools.chain.from_iterable(documents))
    seen = {sentences[i] for shard in shards for i in shard['seen']}
    fresh = [[s for s in document if s not in seen] for document in documents]
    encoder = encode.Encoder(tokenizer, self.settings.rules)
    heldout = write_shard(self.output, 'heldout-00000', tokenizer.vocab_size,
                          map(encoder.sentences, (fresh[i:i + 100]
                                                  for i in range(0, len(fresh), 100))))
    np.save(os.fspath(self.output / 'counts.npy'), counts)
    records.write_manifest(self.output, {
        'settings': {**dataclasses.asdict(self.settings), 'inputs': self._asked['inputs']},
        'tokenizer': tokenizer_lib.digest(tokenizer), 'vocab_size': tokenizer.vocab_size,
        'documents': found.documents, 'bytes': found.size,
        'unigram_entropy': (cross_entropy(heldout['counts'], counts)
                            if heldout['counts'].sum() else None),
        'notes': self._notes(found, counts, heldout['counts'], len(seen), tokenizer.unk_id),
        'splits': {'train': [shard['entry'] for shard in shards],
                   'heldout': [heldout['entry']]}})
    shutil.rmtree(self.progress)

  def _notes(self, found: survey_lib.Survey, counts: np.ndarray, heldout_counts: np.ndarray,
             seen: int, unk_id: int) -> list[str]:
    notes = []
    if seen:
      notes.append(f'{seen:,} held-out sentences that occur in the training text were left out')
    if found.documents > found.different:
      notes.append(f'{found.documents - found.different:,} documents are exact copies of others')
    unknown = counts[unk_id] / counts.sum()
    if unknown > 0.01:
      notes.append(f'{unknown:.1%} of the tokens are [UNK]: does the vocabulary fit the text?')
    if not heldout_counts.sum():
      notes.append('nothing is held out: the corpus has too few documents')
    return notes


@pool.without_main_module()
def prepare(settings: Settings, output: str, workers: int = 0):
  """Prepares a corpus into a folder, local or gs://.

  Args:
    settings: what and how.
    output: empty, or of the same preparation interrupted.
    workers: processes; 0 = one for each core.

  Raises:
    UserError: a mistake in the settings, the text or the output.
    Failed: a worker died; the same call goes on.
  """
  if settings.vocab:  # a mistake in it is told before the text is read
    tokenizer_lib.load(settings.vocab, settings.lowercase)
  workers = workers or host.cores()
  folder = epath.Path(output)
  if (folder / 'manifest.json').exists():
    other = _others(folder, settings)
    if other:
      raise UserError(f'{output} is not empty: it holds records made with another {other[0]}; use '
                      'another folder')
    return  # it is done
  if not storage.is_remote(output):
    Preparation(settings, folder).run(workers)
    return
  local = storage.local_folder(output)
  if not (local / 'manifest.json').exists() or _others(local, settings):  # else it was uploading
    if folder.exists() and any(folder.iterdir()):
      raise UserError(f'{output} is not empty: use another folder')
    Preparation(settings, local).run(workers)
  storage.upload(local, folder)
  shutil.rmtree(local)


def _others(folder: epath.Path, settings: Settings) -> list[str]:
  """The settings that finished records were made with other values of."""
  earlier = records.read_manifest(folder)['settings']
  return [n for n, v in dataclasses.asdict(settings).items() if earlier.get(n) != v]


def check_inputs(settings: Settings, output: str):
  """Raises UserError if finished records are of files that have changed since."""
  folder = epath.Path(output)
  if not (folder / 'manifest.json').exists() or _others(folder, settings):
    return
  was = records.read_manifest(folder)['settings'].get('inputs')
  if was is not None and was != list(open_source(settings, folder / 'progress').inputs):
    raise UserError(f'{output} holds records of files that have changed since: use another folder')


def print_summary(output: str):
  """Prints what a prepared folder holds."""
  manifest = records.read_manifest(epath.Path(output))
  lines = [('text', f'{manifest["bytes"] / 1e6:,.1f} MB in {manifest["documents"]:,} documents')]
  for name, shards in manifest['splits'].items():
    total = {key: sum(shard[key] for shard in shards)
             for key in ('tokens', 'sentences', 'documents')}
    lines.append((name, ', '.join(f'{count:,} {key}' for key, count in total.items())))
  if manifest['unigram_entropy'] is not None:
    lines.append(('plateau', f'{manifest["unigram_entropy"]:.3f} nat: the held-out MLM loss of a '
                             'model that knows the token frequencies only'))
  lines += [('note', note) for note in manifest['notes']]
  lines += [('records', f'{output}, digest {manifest["digest"]}')]
  console.print_lines(lines)
