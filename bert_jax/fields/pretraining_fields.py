"""The fields of a pretraining run and their rules."""

from functools import partial

from ml_collections import ConfigDict

from bert_jax.config_fields import (
  HARMLESS,
  SCHEDULE,
  Field,
  Table,
  at_least,
  group,
  one_of,
)
from bert_jax.data import corpus, dataset
from bert_jax.data.pairs import NEGATIVES, SEQUENCES
from bert_jax.data.phases import Phase
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import require
from bert_jax.fields import run_fields
from bert_jax.model import attention_kernels
from bert_jax.objectives import objectives
from bert_jax.objectives.masking import MaskingConfig

# ---- When a field has no effect --------------------------------------------------------


def set_by_phases(config: ConfigDict, name: str) -> str:
  """batch_size and max_len have no effect if the phases set other values."""
  differs = any(getattr(Phase(*phase), name) != config[name] for phase in config.phases)
  return (f"phases={tuple(config.phases)} set it for every step: change the phases, or "
          "also give --config.phases='()'") if differs else ''


def nothing_held_out(config: ConfigDict, job) -> str:
  """Fields of evaluations have no effect without held-out text."""
  return '' if job.data.has_held_out else (
      'no text is held out: give data.heldout, or records with held-out text')


def given_vocabulary(config: ConfigDict) -> str:
  """Fields of vocabulary training have no effect if the run has a vocabulary."""
  records = next(filter(dataset.is_prepared, dataset.sources(config.data.source)), '')
  if records:
    return (f'the records in data.source={records} have their own vocabulary: prepare '
            'others')
  if config.data.vocab:
    return (f'no vocabulary is trained, because data.vocab={config.data.vocab} is given: '
            'leave one of them out')
  name = 'init_from' if config.init_from else 'teacher'
  return config[name] and f'the run uses the vocabulary of {name}={config[name]}'


def given_lowercase(config: ConfigDict) -> str:
  """data.lowercase has no effect if the files of the vocabulary determine the case."""
  if not config.data.vocab or dataset.is_prepared(config.data.source):
    return given_vocabulary(config)
  given = tokenizer_reader.load(config.data.vocab, config.data.lowercase)
  return '' if given.follows(config.data.lowercase) else (
      f'data.vocab={config.data.vocab} is a {given.kind} model, which determines the case '
      'itself')


def prepared(config: ConfigDict) -> str:
  """Fields that read text have no effect on token records."""
  return (f'data.source={config.data.source} is a folder of token records: give the flag '
          'to bert_jax.prepare') if dataset.is_prepared(config.data.source) else ''


def format_of_source(config: ConfigDict) -> str:
  """The format has no effect on a source with a fixed format."""
  source = config.data.source
  texts = [x for x in dataset.sources(source) if not dataset.is_prepared(x)]
  has_one = all(x == 'builtin' or x.startswith('tfds:') and config.data.format != 'wikitext'
                for x in texts)
  return f'data.source={source} has its own format: leave it out' if has_one else ''


def no_columns(config: ConfigDict) -> str:
  """The name of a column has no effect on plain text."""
  texts = [x for x in dataset.sources(config.data.source) if not dataset.is_prepared(x)]
  return '' if any(corpus.has_columns(text, config.data.format) for text in texts) else (
      f'data.source={config.data.source} is plain text: only JSON lines '
      '(data.format=jsonl) and tfds have columns')


def split_already(config: ConfigDict) -> str:
  """The language has no effect on text whose sentences are already split."""
  data = config.data
  # Chinese also needs its words split.
  if data.language.startswith('zh'):
    return ''
  if data.lines_are_sentences:
    return f'data.lines_are_sentences={data.lines_are_sentences} says where sentences end'
  return ('data.format=wikitext says where sentences end'
          if data.format == 'wikitext' else '')


def no_false_sentences(config: ConfigDict) -> str:
  """The source of false next sentences has no effect if rows have none."""
  return '' if config.data.sequences == 'next_sentence' else (
      f'data.sequences={config.data.sequences} has no negative pairs')


def of_another_unit(config: ConfigDict, unit: str) -> str:
  """Fields of spans have no effect on n-grams, and vice versa."""
  return '' if config.masking.unit == unit else (
      f'it is for masking.unit={unit}, but the unit is {config.masking.unit}')


def beyond_rows(config: ConfigDict, name: str) -> str:
  """A maximum unit longer than every row has no effect."""
  longest = max(phase.max_len for phase in run_fields.phases_of(config))
  return '' if config.masking[name] <= longest else (
      f'rows have at most {longest} tokens: give at most that')


def nothing_causal(config: ConfigDict) -> str:
  """masking.causal_steps has no effect in a run without causal rows."""
  return '' if config.masking.causal_rows else 'masking.causal_rows=0 makes no row causal'


def nothing_random(config: ConfigDict) -> str:
  """The distribution of random tokens has no effect if masking inserts none."""
  return '' if config.masking.replace_random else (
      'masking.replace_random=0 inserts no random tokens')


# ---- The fields ------------------------------------------------------------------------


def share(name: str, value: float):
  """Checks a fraction of the text, which must leave some text for training."""
  require(0 <= value < 1, f'{name}={value} must lie in [0, 1)')


FIELDS: Table = {
    **run_fields.FIELDS,
    # Optimizer steps; 0 = set by train_epochs or train_minutes.
    'train_steps': Field(1_000_000, at_least(0), SCHEDULE),
    # Rows in a batch, over all devices.
    'batch_size': Field(256, at_least(1), SCHEDULE,
                        (partial(set_by_phases, name='batch_size'),)),
    # Tokens in a row, including special tokens.
    'max_len': Field(512, at_least(1), SCHEDULE,
                     (partial(set_by_phases, name='max_len'),)),
    # Phases of (steps, max_len, batch_size).
    'phases': Field(((900_000, 128, 256), (100_000, 512, 256)), on_resume=SCHEDULE),
    # Steps between evaluations on held-out text; the last step always has one.
    'eval_every': Field(10_000, at_least(1), HARMLESS,
                        unused_by_data=(nothing_held_out,)),
    # Maximum number of batches in an evaluation; 0 = every held-out row.
    'eval_batches': Field(100, at_least(0), HARMLESS, unused_by_data=(nothing_held_out,)),
    # Steps between checkpoints; the last step always has one.
    'checkpoint_every': Field(5_000, at_least(1), HARMLESS),
    # A score of the evaluations, '' = none. best/ keeps the checkpoint with the best
    # value, and predict uses it.
    'keep_best': Field('', on_resume=HARMLESS, unused_by_data=(nothing_held_out,)),
    # mlm_nsp, mlm_sop, mlm, replaced_tokens, replaced_tokens_gdes, distillation; '' = set
    # by data.sequences, or ELECTRA's objective for an ELECTRA model.
    'objective': Field(''),
    'teacher': Field(''),  # for distillation: a model, as init_from
    # builtin, a glob of text files, tfds:NAME, or a folder of `prepare`. A mixture of
    # these names the share of each: 'wiki/*.gz=0.7,books/*.gz=0.3'. Shares may change
    # over the run: 'a=0.7:0.3,b=0.3:0.7'.
    'data.source': Field('builtin', on_resume=HARMLESS),
    # next_sentence (BERT), sentence_order (ALBERT) or full_sentences (RoBERTa).
    'data.sequences': Field('next_sentence', one_of(SEQUENCES)),
    # Where false next sentences come from: any other_document; another document of
    # similar_style (marks, capitals, digits); or the same_document, if it has a sentence
    # of about the same length.
    'data.negatives': Field(NEGATIVES[0], one_of(NEGATIVES),
                            unused=(no_false_sentences,)),
    # True = up to 8 pairs in a row, isolated from each other; False = one pair.
    'data.pack': Field(True),
    # A vocab.txt, a tokenizer.json, a SentencePiece .model, or a folder with one of them; '' =
    # train a vocabulary on the corpus.
    'data.vocab': Field('', on_resume=HARMLESS),
    # The fields below determine how text becomes tokens. They are fixed in a folder of
    # `prepare`. A resumed run compares the digest of the records, not these fields.

    # text (a blank line between documents), jsonl, wikitext; auto = by name.
    'data.format': Field('auto', on_resume=HARMLESS, unused=(prepared, format_of_source)),
    # The field of JSON objects, or of a tfds dataset, that holds the text.
    'data.text_column': Field('text', on_resume=HARMLESS, unused=(prepared, no_columns)),
    # ISO 639 code, for splitting text into sentences; zh also splits words.
    'data.language': Field('en', on_resume=HARMLESS, unused=(prepared, split_already)),
    # True = each line of the text is a sentence.
    'data.lines_are_sentences': Field(False, on_resume=HARMLESS, unused=(prepared,)),
    # The kind of vocabulary to train: wordpiece, sentencepiece, bpe (byte-level).
    'data.tokenizer': Field('wordpiece', on_resume=HARMLESS, unused=(given_vocabulary,)),
    # Lowercase the text and, for WordPiece, strip accents.
    'data.lowercase': Field(True, on_resume=HARMLESS, unused=(given_lowercase,)),
    # Read only the first N words of the source, split at whitespace; 0 = all. In a mixture
    # N counts for each text, and records are read whole.
    'data.words': Field(0, at_least(0), HARMLESS, (prepared,)),
    # Fraction of the documents for evaluation (at most 10,000 documents).
    'data.heldout': Field(0.02, share, HARMLESS, (prepared,)),
    **group('masking', MaskingConfig(), {
        'span_p': Field(None, unused=(partial(of_another_unit, unit='span'),)),
        'span_max': Field(None, unused=(partial(of_another_unit, unit='span'),
                                        partial(beyond_rows, name='span_max'))),
        'ngram_max': Field(None, unused=(partial(of_another_unit, unit='ngram'),
                                         partial(beyond_rows, name='ngram_max'))),
        'random_by_frequency': Field(None, unused=(nothing_random,)),
        'causal_steps': Field(None, unused=(nothing_causal,))}),
}
# Rules of the group `model` that `run_fields.MODEL` lacks.
MODEL = {'vocab_size': Field(None, unused=(given_vocabulary,))}


def check(config: ConfigDict):
  """Raises UserError for fields that contradict each other."""
  MaskingConfig(**config.masking)
  # An epoch of short rows has more rows than an epoch of long rows, so passes over the
  # data cannot be divided into phases.
  require(not (config.train_epochs and config.phases),
          'phases are shares of the steps: give train_steps or train_minutes with them, '
          'not train_epochs')
  name = objectives.name_of(config.objective, config.data.sequences,
                           config.model.architecture or 'bert')
  require((name == 'distillation') == bool(config.teacher),
          f'objective={config.objective!r} and teacher={config.teacher!r}: distillation '
          'needs a teacher, and other objectives have none')
  require(name == 'mlm' or not config.masking.causal_rows,
          f'masking.causal_rows={config.masking.causal_rows} is for objective=mlm, but the '
          f'objective is {name}: its loss needs the whole text')
  kernel = attention_kernels.ALL.get(config.model.attention)
  require(kernel is None or kernel.has_causal or not config.masking.causal_rows,
          f'model.attention={config.model.attention} does not compute causal rows '
          f'(masking.causal_rows={config.masking.causal_rows}): use auto, xla or triton')
