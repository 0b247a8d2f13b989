"""Tokenizes a corpus: python -m bert_jax.prepare --input='*.txt.gz' --output=DIR"""

import re
from typing import Any

from absl import flags

from bert_jax import errors
from bert_jax.commands import command, overwrite_flag

_INPUT = flags.DEFINE_string(
    'input', None, 'A quoted glob of files, tfds:NAME or builtin.')
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for the records, local or gs://. It must be new or empty, or '
    'hold records of the same command, interrupted or complete.')
_VOCAB = flags.DEFINE_string(
    'vocab', '', 'A vocab.txt, tokenizer.json, vocab.json with merges.txt, or SentencePiece '
    '.model, or a folder with one of them.')
_VOCAB_SIZE = flags.DEFINE_integer(
    'vocab_size', None, 'Train a vocabulary of this size (30,522 without --vocab).')
_FORMAT = flags.DEFINE_string(
    'format', 'auto', 'text (a blank line between documents), jsonl or wikitext; auto = '
    'jsonl if the file name says so, otherwise text.')
_TEXT_COLUMN = flags.DEFINE_string(
    'text_column', 'text', 'Field of JSON objects or of a tfds data set with the text.')
_LANGUAGE = flags.DEFINE_string(
    'language', 'en', 'For splitting into sentences (ISO 639); zh also splits into '
    'words.')
_LINES = flags.DEFINE_bool(
    'lines_are_sentences', False, 'Each line of the text is already one sentence.')
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', 'wordpiece', 'What to train: wordpiece, sentencepiece or bpe.')
_LOWERCASE = flags.DEFINE_bool(
    'lowercase', True, 'Lower-case the text; WordPiece also strips its accents.')
_HELDOUT = flags.DEFINE_float(
    'heldout', 0.02, 'Share of the documents held out for evaluation: at most 10,000 '
    'documents, without this limit under --beam.')
_WORDS = flags.DEFINE_integer(
    'words', 0, 'Prepare only the first N words; 0 = all.', lower_bound=0)
_WORKERS = flags.DEFINE_integer(
    'workers', 0, 'Processes; 0 = one for each core.', lower_bound=0)
_CHECK = flags.DEFINE_bool('check', False, 'Only report on the text; write nothing.')
_BEAM = flags.DEFINE_string(
    'beam', None, 'Run as an Apache Beam pipeline with these options, such as '
    "'--runner=DataflowRunner --project=...'.")


# `data/` names config fields in its messages. This command has flags for them instead.
_FIELDS = re.compile(r'(?<![\w/.])(?:data|model)\.(\w+)')


def _flag(field: re.Match) -> str:
  """The flag for a config field in a message."""
  name = {'source': 'input'}.get(field[1], field[1])
  return f'--{name}' if name in flags.FLAGS else field[0]


def _check_effects():
  """Raises UserError for a given flag that has no effect with the other flags."""
  from bert_jax.data import corpus
  from bert_jax.data.tokenizers import reader
  vocabulary = _VOCAB.value and reader.load(_VOCAB.value, _LOWERCASE.value)
  is_text = not corpus.has_columns(_INPUT.value, _FORMAT.value)
  is_zh = _LANGUAGE.value.startswith('zh')
  has_own_format = _INPUT.value == 'builtin' or (
      _INPUT.value.startswith('tfds:') and _FORMAT.value != 'wikitext')
  for name, obstacle, why in (
      ('tokenizer', _VOCAB.value, f'--vocab={_VOCAB.value}: no vocabulary is trained'),
      ('lowercase', vocabulary and not vocabulary.follows(_LOWERCASE.value),
       f'--vocab={_VOCAB.value} already decides about capitals'),
      ('output', _CHECK.value, '--check writes nothing'),
      ('overwrite', _CHECK.value, '--check writes nothing'),
      ('workers', _CHECK.value, '--check runs in one process'),
      ('workers', _BEAM.value is not None, '--beam names the workers'),
      ('beam', _CHECK.value, '--check runs here'),
      ('language', _LINES.value and not is_zh,
       '--lines_are_sentences: no line is split'),
      ('language', _FORMAT.value == 'wikitext' and not is_zh,
       '--format=wikitext says where sentences end'),
      ('format', has_own_format, f'--input={_INPUT.value} has its own format'),
      ('text_column', is_text,
       f'--input={_INPUT.value} is plain text and has no columns')):
    errors.require(not (flags.FLAGS[name].present and obstacle),
                   f'--{name} has no effect here: {why}')


def _run():
  # Tokenizers and NumPy import slowly: --help and mistakes in flags do not wait for them.
  from bert_jax.data import corpus_check, preparation, records
  from bert_jax.runtime import storage
  overwrite = not _CHECK.value and overwrite_flag.get('--output', _OUTPUT.value)
  vocab_size = 30_522 if _VOCAB_SIZE.value is None else _VOCAB_SIZE.value
  settings = preparation.Settings(
      source=_INPUT.value,
      format=_FORMAT.value,
      language=_LANGUAGE.value,
      text_column=_TEXT_COLUMN.value,
      lines_are_sentences=_LINES.value,
      vocab=_VOCAB.value,
      vocab_size=None if _VOCAB.value else vocab_size,
      tokenizer=_TOKENIZER.value,
      lowercase=_LOWERCASE.value,
      heldout=_HELDOUT.value,
      words=_WORDS.value)
  _check_effects()
  if _CHECK.value:
    corpus_check.print_report(settings)
    return
  with storage.exclusive('--output', _OUTPUT.value, _INPUT.value, _VOCAB.value):
    _prepare(settings, overwrite)
    records.print_summary(_OUTPUT.value)


def _prepare(settings: Any, overwrite: bool):
  """Makes the records, and replaces finished ones if `overwrite`."""
  from etils import epath

  from bert_jax.data import beam, preparation, records
  from bert_jax.runtime import storage
  storage.check('--output', _OUTPUT.value)
  output, is_finished = _OUTPUT.value, records.is_finished(_OUTPUT.value)
  # New records are made next to the old ones: an error or a kill loses nothing.
  if is_finished and overwrite:
    output = records.replacing(output)
  try:
    if _BEAM.value is not None:
      beam.run(settings, output, _BEAM.value.split())
    else:
      preparation.prepare(settings, output, _WORKERS.value)
  except errors.UserError as e:
    if is_finished and not overwrite and str(e).endswith('use another folder'):
      raise errors.UserError(f'{e}, or --overwrite to replace the records') from e
    raise
  if output != _OUTPUT.value:
    storage.replace_folder(epath.Path(output), epath.Path(_OUTPUT.value))


def _main(argv: list[str]):
  errors.require(_INPUT.value and (_OUTPUT.value or _CHECK.value),
                 "give both --input='corpus/*.txt' (or tfds:NAME, or builtin) and "
                 '--output=DIR, or --input and --check')
  errors.require(not _VOCAB.value or _VOCAB_SIZE.value is None,
                 'give --vocab=FILE or --vocab_size=N, not both')
  errors.require(0 <= _HELDOUT.value < 1,
                 f'--heldout={_HELDOUT.value} must lie in [0, 1)')
  try:
    _run()
  except errors.UserError as e:
    raise errors.UserError(_FIELDS.sub(_flag, str(e))) from e


if __name__ == '__main__':
  command.run_command(_main)
