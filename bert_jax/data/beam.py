"""`prepare` as an Apache Beam pipeline, for corpora that are too large for one machine.

  pip wheel --no-deps --wheel-dir=dist .
  python -m bert_jax.prepare --input='gs://corpus/*.jsonl.gz' \\
      --output=gs://records/mine --vocab=vocab.txt \\
      --beam='--runner=DataflowRunner --project=mine --region=europe-west4
      --temp_location=gs://records/temp
      --extra_package=dist/bert_jax-VERSION-py3-none-any.whl'

Each input file becomes a shard of training text and a shard of held-out text, by the same
functions as in `prepare`. The vocabulary must exist: train it with `prepare` on a part of
the text. Needs `pip install apache-beam`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import tempfile
from typing import Any

from etils import epath

from bert_jax.data import corpus, encode, preparation, survey
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import Failed, UserError, require, require_choice
from bert_jax.runtime import storage

_SPLITS = ('train', 'heldout')


def _write_shards(numbered: tuple[int, str], *, settings: corpus.Settings,
                  output: str) -> dict[str, dict[str, Any]]:
  """Writes the training shard and the held-out shard of one file.

  Args:
    numbered: (number, name) of the file.
    settings: of the whole corpus.
    output: the folder for the shards.

  Returns:
    {split: the result of `preparation.write_shard`}.
  """
  number, file = numbered
  data_format = corpus.format_of(file, settings.format)
  tokenizer = tokenizer_reader.load(epath.Path(output) / 'tokenizer')
  encoder = encode.Encoder(tokenizer, settings)
  # Documents are held out by their hash alone, because no machine sees all of them.
  below = int(settings.heldout * survey.HASHES)
  shards = {}
  with tempfile.TemporaryDirectory() as folder:
    local = epath.Path(folder)
    for split in _SPLITS:
      documents = (d for d in corpus.read_file(file, data_format, settings.text_column)
                   if (survey.text_hash(d.encode()) < below) == (split == 'heldout'))
      encoded = map(encoder.documents, encode.batches(documents))
      shards[split] = preparation.write_shard(local, f'{split}-{number:05}',
                                              tokenizer.vocab_size, encoded)
    storage.upload(local, epath.Path(output))
  return shards


def _finish(files: Sequence[dict[str, dict[str, Any]]], *, settings: corpus.Settings,
            output: str):
  """Writes the counts and the manifest of all shards."""
  # Beam returns the files in any order. Sorted shards make the digest reproducible.
  splits = {
      split: sorted((file[split] for file in files), key=lambda x: x['entry']['name'])
      for split in _SPLITS
  }
  shards = [*splits['train'], *splits['heldout']]
  tokenizer = tokenizer_reader.load(epath.Path(output) / 'tokenizer')
  documents = sum(shard['read'] for shard in shards)
  preparation.check_documents(settings.source, documents, documents)
  preparation.check_tokens(settings.source, preparation.token_counts(
      splits['train'], tokenizer.vocab_size))
  folder = epath.Path(output)
  preparation.finish(
      folder, dataclasses.asdict(settings), tokenizer,
      documents=documents,
      size=sum(shard['size'] for shard in shards), splits=splits,
      notes=['held-out sentences may also occur in the training text: Beam does not '
             'check'])


def run(settings: corpus.Settings, output: str, options: Sequence[str] = ()):
  """Runs the pipeline with Beam's `options` and writes the manifest.

  Args:
    settings: the text, in files, and its existing vocabulary.
    output: an empty or new folder that every worker can write.
    options: such as '--runner=DataflowRunner'.

  Raises:
    UserError: Beam is missing, or a mistake in the settings, the text or the output.
    Failed: the pipeline failed.
  """
  try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
  except ImportError as e:
    raise UserError(f'--beam needs a package that is not installed ({e}): pip install '
                    'apache-beam') from e
  require_choice('data.format', settings.format, corpus.FORMATS)
  require(settings.source != 'builtin' and not settings.source.startswith('tfds:'),
          f'--input={settings.source} is not a file: Beam reads files')
  require(settings.vocab,
          'Beam needs --vocab: train one with bert_jax.prepare on a part of the text')
  require(not settings.words,
          f'--words={settings.words} has no effect with Beam, which reads the files in '
          'any order')
  storage.check('--output', output)
  folder = epath.Path(output)
  require(not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
          f'{output} is not empty: use another folder')
  files = list(enumerate(corpus.find_files(settings.source)))
  if settings.format == 'auto':
    corpus.check_plain([file for _, file in files], corpus.GIVE_FORMAT)
  # The workers cannot read this machine's files: they load the copy in the output.
  tokenizer_reader.load(settings.vocab, settings.lowercase).save(folder / 'tokenizer')
  try:
    with beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
      _ = (pipeline | beam.Create(files) | beam.Reshuffle()
           | beam.Map(functools.partial(_write_shards, settings=settings, output=output))
           | beam.combiners.ToList()
           | beam.Map(functools.partial(_finish, settings=settings, output=output)))
  except Exception as e:  # each runner raises its own exceptions
    mistake = UserError if isinstance(e, UserError) else Failed
    raise mistake(f'the Beam pipeline failed, delete {output} before you run it again: '
                  f'{e}') from e
