"""The fields of a pretraining run, with their rules."""

from functools import partial

from ml_collections import ConfigDict

from bert_jax.config_fields import HARMLESS, SCHEDULE, Field, Table, at_least, group, one_of
from bert_jax.data import corpus, dataset
from bert_jax.data.pairs import NEGATIVES, SEQUENCES
from bert_jax.data.phases import Phase
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import require
from bert_jax.fields import run_fields
from bert_jax.objectives import objectives
from bert_jax.objectives.masking import MaskingConfig

# ---- When a field has no effect ------------------------------------------------------------------


def said_by_phases(config: ConfigDict, name: str) -> str:
  """The number and the length of rows have no effect where phases say others."""
  differs = any(getattr(Phase(*phase), name) != config[name] for phase in config.phases)
  return (f"phases={tuple(config.phases)} say it for every step: change these, or give "
          "--config.phases='()' too") if differs else ''


def nothing_held_out(config: ConfigDict, job) -> str:
  """What is said of evaluations has no effect where no text is held out."""
  return '' if job.data.has_held_out else (
      'no text is held out: give data.heldout, or records that have some')


def given_vocabulary(config: ConfigDict) -> str:
  """How to train a vocabulary has no effect where the records, a file or a model give one."""
  records = next(filter(dataset.is_prepared, dataset.sources(config.data.source)), '')
  if records:
    return f'the records in data.source={records} have their vocabulary: prepare others'
  if config.data.vocab:
    return (f'no vocabulary is trained, data.vocab={config.data.vocab} is given: leave one of '
            'them out')
  name = 'init_from' if config.init_from else 'teacher'
  return config[name] and f'the text is read with the vocabulary of {name}={config[name]}'


def given_lowercase(config: ConfigDict) -> str:
  """data.lowercase has no effect on a vocabulary that says itself what it does with capitals."""
  if not config.data.vocab or dataset.is_prepared(config.data.source):
    return given_vocabulary(config)
  kind = tokenizer_reader.load(config.data.vocab, config.data.lowercase).kind
  return '' if kind == 'wordpiece' else (
      f'data.vocab={config.data.vocab} is a {kind} model, which says itself what it does with '
      'capitals')


def prepared(config: ConfigDict) -> str:
  """How to read text has no effect on records, whose text is read already."""
  return (f'data.source={config.data.source} is a folder of token records: give the flag to '
          'bert_jax.prepare') if dataset.is_prepared(config.data.source) else ''


def format_of_source(config: ConfigDict) -> str:
  """The format has no effect on a source that has only one."""
  source = config.data.source
  has_one = source == 'builtin' or (
      source.startswith('tfds:') and config.data.format != 'wikitext')
  return f'data.source={source} has a format of its own: leave it out' if has_one else ''


def no_columns(config: ConfigDict) -> str:
  """The name of a column has no effect on plain text."""
  texts = [x for x in dataset.sources(config.data.source) if not dataset.is_prepared(x)]
  return '' if any(corpus.has_columns(text, config.data.format) for text in texts) else (
      f'data.source={config.data.source} is plain text: only JSON lines (data.format=jsonl) and '
      'tfds have columns')


def split_already(config: ConfigDict) -> str:
  """The language has no effect on text that is split into sentences, unless it splits words."""
  data = config.data
  if data.language.startswith('zh'):
    return ''
  if data.lines_are_sentences:
    return f'data.lines_are_sentences={data.lines_are_sentences} says where sentences end'
  return 'data.format=wikitext says where sentences end' if data.format == 'wikitext' else ''


def no_false_sentences(config: ConfigDict) -> str:
  """The kind of false next sentences has no effect where rows have none."""
  return '' if config.data.sequences == 'next_sentence' else (
      f'data.sequences={config.data.sequences} asks of no sentence from elsewhere')


def of_another_unit(config: ConfigDict, unit: str) -> str:
  """What is said of spans has no effect on n-grams, and the reverse."""
  return '' if config.masking.unit == unit else (
      f'it is for masking.unit={unit}, the unit is {config.masking.unit}')


def beyond_rows(config: ConfigDict, name: str) -> str:
  """The length of the longest unit has no effect beyond the length of rows."""
  longest = max(phase.max_len for phase in run_fields.phases_of(config))
  return '' if config.masking[name] <= longest else (
      f'rows have at most {longest} tokens: give at most that')


def nothing_random(config: ConfigDict) -> str:
  """How to draw random tokens has no effect where none replaces another."""
  return '' if config.masking.replace_random else (
      'masking.replace_random=0 puts in no random token')


# ---- The fields ----------------------------------------------------------------------------------


def share(name: str, value: float):
  """Checks a share of the text that is not all of it."""
  require(0 <= value < 1, f'{name}={value} must lie in [0, 1)')


FIELDS: Table = {
    **run_fields.FIELDS,
    'train_steps': Field(1_000_000, at_least(0), SCHEDULE),
    # Rows over all devices.
    'batch_size': Field(256, at_least(1), SCHEDULE, (partial(said_by_phases, name='batch_size'),)),
    # Tokens in a row, special ones included.
    'max_len': Field(512, at_least(1), SCHEDULE, (partial(said_by_phases, name='max_len'),)),
    'phases': Field(((900_000, 128, 256), (100_000, 512, 256)), on_resume=SCHEDULE),
    # Steps between evaluations on held-out data; always one at the end.
    'eval_every': Field(10_000, at_least(1), HARMLESS, unused_by_data=(nothing_held_out,)),
    # Most batches of an evaluation; 0 = every held-out row.
    'eval_batches': Field(100, at_least(0), HARMLESS, unused_by_data=(nothing_held_out,)),
    # Steps between checkpoints; always one at the end.
    'checkpoint_every': Field(5_000, at_least(1), HARMLESS),
    # A score of the evaluations; best/ keeps the checkpoint with the best one, and predict uses it.
    # '' = none.
    'keep_best': Field('', on_resume=HARMLESS, unused_by_data=(nothing_held_out,)),
    # mlm_nsp, mlm_sop, mlm, replaced_tokens, replaced_tokens_gdes, distillation; '' = the one of
    # data.sequences, or ELECTRA's.
    'objective': Field(''),
    'teacher': Field(''),  # of distillation: a model, as init_from
    # builtin, a glob of text files, tfds:NAME, a folder of `prepare`, or several of these with
    # their shares of the rows: 'wiki/*.gz=0.7,books/*.gz=0.3'; 'a=0.7:0.3,b=0.3:0.7' change over
    # the run.
    'data.source': Field('builtin', on_resume=HARMLESS),
    # Or sentence_order (ALBERT), full_sentences (RoBERTa).
    'data.sequences': Field('next_sentence', one_of(SEQUENCES)),
    # False next sentences: from any other_document, of similar_style (marks, capitals, digits), or
    # from the same_document where it has one about as long.
    'data.negatives': Field(NEGATIVES[0], one_of(NEGATIVES), unused=(no_false_sentences,)),
    'data.pack': Field(True),  # up to 8 pairs in a row, isolated from each other; False = one
    # vocab.txt or a SentencePiece .model; '' = train one from the corpus.
    'data.vocab': Field('', on_resume=HARMLESS),
    # How text becomes tokens; folders of `prepare` know this already. Another value makes other
    # records, whose digest is compared.
    # text (a blank line between documents), jsonl, wikitext; auto = by name.
    'data.format': Field('auto', on_resume=HARMLESS, unused=(prepared, format_of_source)),
    # Of JSON objects or a tfds data set.
    'data.text_column': Field('text', on_resume=HARMLESS, unused=(prepared, no_columns)),
    # For splitting into sentences (ISO 639); words too in zh.
    'data.language': Field('en', on_resume=HARMLESS, unused=(prepared, split_already)),
    # True = the text is split already.
    'data.lines_are_sentences': Field(False, on_resume=HARMLESS, unused=(prepared,)),
    # To train: wordpiece, sentencepiece, bpe (of bytes).
    'data.tokenizer': Field('wordpiece', on_resume=HARMLESS, unused=(given_vocabulary,)),
    # Lower-case the text and strip its accents (WordPiece alone strips).
    'data.lowercase': Field(True, on_resume=HARMLESS, unused=(given_lowercase,)),
    # Only the first N words of the source, split at white space; 0 = all.
    'data.words': Field(0, at_least(0), HARMLESS, (prepared,)),
    # Fraction of the documents for evaluation (10,000 at most).
    'data.heldout': Field(0.02, share, HARMLESS, (prepared,)),
    **group('masking', MaskingConfig(), {
        'span_p': Field(None, unused=(partial(of_another_unit, unit='span'),)),
        'span_max': Field(None, unused=(partial(of_another_unit, unit='span'),
                                        partial(beyond_rows, name='span_max'))),
        'ngram_max': Field(None, unused=(partial(of_another_unit, unit='ngram'),
                                         partial(beyond_rows, name='ngram_max'))),
        'random_by_frequency': Field(None, unused=(nothing_random,))}),
}
# Rules of the group `model` that `run_fields.MODEL` lacks.
MODEL = {'vocab_size': Field(None, unused=(given_vocabulary,))}


def check(config: ConfigDict):
  """Raises UserError for fields that do not fit each other."""
  MaskingConfig(**config.masking)
  require(not (config.train_epochs and config.phases),
          'phases are shares of the steps: give train_steps or train_minutes with them, not '
          'train_epochs')
  name = objectives.name_of(config.objective, config.data.sequences,
                           config.model.architecture or 'bert')
  require((name == 'distillation') == bool(config.teacher),
          f'objective={config.objective!r} and teacher={config.teacher!r}: distillation needs the '
          'folder of a teacher, other objectives have none')
