"""`prepare` as an Apache Beam pipeline, for corpora that one machine takes too long for.

  pip wheel --no-deps --wheel-dir=dist .
  python -m bert_jax.prepare --input='gs://corpus/*.jsonl.gz' --output=gs://records/mine \\
      --vocab=vocab.txt --beam='--runner=DataflowRunner --project=mine --region=europe-west4
      --temp_location=gs://records/temp --extra_package=dist/bert_jax-0.1.0-py3-none-any.whl'

Every input file becomes a shard of training text and one of held-out text, by the functions that
`prepare` runs itself. The vocabulary is given: one machine trains it on a part of the text. Needs
`pip install apache-beam`.
"""

from collections.abc import Sequence
import dataclasses
import tempfile
from typing import Any

from etils import epath
import numpy as np

from bert_jax.data import corpus
from bert_jax.data import encode
from bert_jax.data import preparation
from bert_jax.data import records
from bert_jax.data import survey as survey_lib
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from bert_jax.runtime import storage

_ALL = 1 << 64


@dataclasses.dataclass(frozen=True)
class FileToShards:
  """One input file to a shard of training text and one of held-out text, written to `output`."""

  settings: preparation.Settings
  output: str

  def __call__(self, numbered: tuple[int, str]) -> dict[str, Any]:
    """(number, file) -> the shards' entries in the manifest and what was counted."""
    number, file = numbered
    s = self.settings
    data_format = corpus.format_of(file, s.format)
    tokenizer = tokenizer_lib.load(epath.Path(self.output) / 'tokenizer')
    encoder = encode.Encoder(tokenizer, s.rules)
    # Documents are held out by their hash alone: no machine sees all of them.
    below = int(s.heldout * _ALL)
    found = {'documents': 0, 'bytes': 0}
    with tempfile.TemporaryDirectory() as folder:
      for split, held in (('train', False), ('heldout', True)):
        documents = (d for d in corpus.read_file(file, data_format, s.text_column)
                     if (survey_lib.text_hash(d.encode()) < below) == held)
        encoded = map(encoder.documents, encode.batches(documents))
        local = epath.Path(folder) / split
        local.mkdir()
        written = preparation.write_shard(local, f'{split}-{number:05}', tokenizer.vocab_size,
                                          encoded)
        found['bytes'] += written['size']
        found['documents'] += written['read']
        found[split] = written['entry']
        found[f'{split}_counts'] = written['counts']
        storage.upload(local, epath.Path(self.output))
    return found


def finish(settings: preparation.Settings, output: str, shards: Sequence[dict[str, Any]]):
  """Writes counts and manifest over all shards."""
  folder = epath.Path(output)
  tokenizer = tokenizer_lib.load(folder / 'tokenizer')
  shards = sorted(shards, key=lambda shard: shard['train']['name'])
  counts, heldout = (sum(shard[f'{split}_counts'] for shard in shards)
                     for split in ('train', 'heldout'))
  with (folder / 'counts.npy').open('wb') as file:
    np.save(file, counts)
  records.write_manifest(folder, {
      'settings': dataclasses.asdict(settings), 'tokenizer': tokenizer_lib.digest(tokenizer),
      'vocab_size': tokenizer.vocab_size, 'documents': sum(s['documents'] for s in shards),
      'bytes': sum(s['bytes'] for s in shards),
      'unigram_entropy': preparation.cross_entropy(heldout, counts) if heldout.sum() else None,
      'notes': ['held-out sentences were not looked for in the training text'],
      'splits': {split: [s[split] for s in shards] for split in ('train', 'heldout')}})


def run(settings: preparation.Settings, output: str, options: Sequence[str] = ()):
  """Runs the pipeline and writes the manifest.

  Args:
    settings: what and how; `vocab` is given.
    output: an empty folder, one that all workers can write to.
    options: Beam's own.

  Raises:
    UserError: no vocabulary, or an output that is not empty.
  """
  try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
  except ImportError as e:
    raise UserError(f'--beam needs a package that is not installed ({e}): pip install '
                    'apache-beam') from e
  if not settings.vocab:
    raise UserError('Beam needs --vocab: train one with bert_jax.prepare on a part of the text')
  folder = epath.Path(output)
  if folder.exists() and any(folder.iterdir()):
    raise UserError(f'{output} is not empty: use another folder')
  files = list(enumerate(corpus.find_files(settings.source)))
  # The workers have neither this machine's files nor its folder.
  tokenizer_lib.load(settings.vocab, settings.lowercase).save(folder / 'tokenizer')
  with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
    _ = (pipeline | beam.Create(files) | beam.Reshuffle()
         | beam.Map(FileToShards(settings, output))
         | beam.combiners.ToList()
         | beam.Map(lambda shards: finish(settings, output, shards)))
