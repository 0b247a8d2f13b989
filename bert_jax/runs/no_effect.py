"""Fields of the command line that have no effect in a run: each is refused, with its reason.

A default without effect is fine: a config file serves many runs. `RULES` and `RULES_WITH_DATA` are
the tables of such fields; a new field that not every run uses gets a row there.
"""

from collections.abc import Callable, Collection
import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import corpus, dataset
from bert_jax.data.phases import Phase
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.labelled import glue
from bert_jax.model import architectures
from bert_jax.runs import initial
from bert_jax.training.job import Job

_PRETRAINING, _FINETUNING = 'pretraining', 'fine-tuning'


class Rule(NamedTuple):
  """When fields have no effect."""

  fields: tuple[str, ...]
  reason: Callable[..., str | bool]  # of the config (and the job); false = they have an effect
  runs: tuple[str, ...] = (_PRETRAINING, _FINETUNING)


def _by_vocabulary(c: ConfigDict) -> str:
  records = next(filter(dataset.is_prepared, dataset.sources(c.data.source)), '')
  if records:
    return f'the records in data.source={records} have their vocabulary: prepare others'
  if c.data.vocab:
    return f'no vocabulary is trained, data.vocab={c.data.vocab} is given: leave one of them out'
  name = 'init_from' if c.init_from else 'teacher'
  return c[name] and f'the text is read with the vocabulary of {name}={c[name]}'


def _by_lowercase(c: ConfigDict) -> str:
  if not c.data.vocab or dataset.is_prepared(c.data.source):
    return _by_vocabulary(c)
  kind = tokenizer_reader.load(c.data.vocab, c.data.lowercase).kind
  return kind != 'wordpiece' and (
      f'data.vocab={c.data.vocab} is a {kind} model, which says itself what it does with capitals')


def _by_text_column(c: ConfigDict) -> str:
  texts = (x for x in dataset.sources(c.data.source) if not dataset.is_prepared(x))
  return not any(corpus.has_columns(text, c.data.format) for text in texts) and (
      f'data.source={c.data.source} is plain text: only JSON lines (data.format=jsonl) and tfds '
      'have columns')


def _by_pair(c: ConfigDict) -> str:
  paired = c.data.text_pair_column or (
      c.data.format.startswith('glue') and glue.find(c.data.format).text_pair)
  return paired and 'of a pair of texts the longer one is cut: it is for single texts'


def _by_unit(unit: str) -> Callable[[ConfigDict], str]:
  return lambda c: c.masking.unit != unit and (
      f'it is for masking.unit={unit}, the unit is {c.masking.unit}')


def _by_row(field: str) -> Callable[[ConfigDict], str]:
  def reason(c: ConfigDict) -> str:
    longest = max(phase.max_len for phase in config_lib.phases_of(c))
    return c.masking[field] > longest and f'rows have at most {longest} tokens: give at most that'
  return reason


def _by_phases(name: str) -> Callable[[ConfigDict], str]:
  place = Phase._fields.index(name)
  return lambda c: any(phase[place] != c[name] for phase in c.phases) and (
      f"phases={tuple(c.phases)} say it for every step: change these, or give "
      "--config.phases='()' too")


def _by_lists(c: ConfigDict, job: Job) -> str | bool:
  splits = (job.data.train, *job.data.evals)
  return c.task == 'reranking' and not c.data.test and not any(
      group.has_columns for split in splits for group in split.examples) and (
          'each line has the lists positives and negatives, which have no columns and no grades')


def _by_examples(c: ConfigDict, job: Job) -> str | bool:
  count = job.data.train.batches.features.count
  least = job.data.feed.of * c.optimizer.accumulation  # a batch is divided by it
  most = -(-count // least) * least
  return c.batch_size > most and (
      f'data.train={c.data.train} has {count} examples: give at most {most}')


RULES = (
    *(Rule((name,), _by_phases(name)) for name in ('batch_size', 'max_len')),
    Rule(('model.vocab_size', 'data.tokenizer'), _by_vocabulary, (_PRETRAINING,)),
    Rule(('model.vocab_size',), lambda c: 'the vocabulary is that of init_from: leave it out',
         (_FINETUNING,)),
    Rule(('data.lowercase',), _by_lowercase),
    Rule(('data.heldout', 'data.words', 'data.lines_are_sentences', 'data.language', 'data.format',
          'data.text_column'), lambda c: dataset.is_prepared(c.data.source) and (
              f'data.source={c.data.source} is a folder of token records: give the flag to '
              'bert_jax.prepare'), (_PRETRAINING,)),
    Rule(('data.language',), lambda c: (
        c.data.lines_are_sentences and not c.data.language.startswith('zh')
        and f'data.lines_are_sentences={c.data.lines_are_sentences} says where sentences end')),
    Rule(('data.language',), lambda c: (
        c.data.format == 'wikitext' and not c.data.language.startswith('zh')
        and 'data.format=wikitext says where sentences end')),
    Rule(('data.format',), lambda c: (
        (c.data.source == 'builtin'
         or (c.data.source.startswith('tfds:') and c.data.format != 'wikitext'))
        and f'data.source={c.data.source} has a format of its own: leave it out'),
         (_PRETRAINING,)),
    Rule(('data.text_column',), _by_text_column, (_PRETRAINING,)),
    Rule(('data.negatives',), lambda c: c.data.sequences != 'next_sentence' and (
        f'data.sequences={c.data.sequences} asks of no sentence from elsewhere'), (_PRETRAINING,)),
    Rule(('lora.alpha', 'lora.targets'), lambda c: not c.lora.rank and (
        'lora.rank=0 trains all parameters')),
    Rule(('masking.span_p', 'masking.span_max'), _by_unit('span')),
    Rule(('masking.ngram_max',), _by_unit('ngram')),
    *(Rule((f'masking.{name}',), _by_row(name))
      for name in ('span_max', 'ngram_max')),
    Rule(('masking.random_by_frequency',), lambda c: not c.masking.replace_random and (
        'masking.replace_random=0 puts in no random token')),
    Rule(('model.type_vocab_size',), lambda c: (
        c.model.architecture in architectures.ALL
        and not architectures.ALL[c.model.architecture].config.has_segments
        and f'model.architecture={c.model.architecture} has no segments')),
    Rule(('eval_every', 'keep_best', 'data.n_best', 'data.eval_columns', 'data.eval_fields'),
         lambda c: not c.data.eval and 'nothing is evaluated: give data.eval', (_FINETUNING,)),
    Rule(('data.problem', 'data.labels', 'data.skip_labels', 'data.text_column',
          'data.text_pair_column', 'data.label_column', 'data.choices_column'), lambda c: (
              (c.data.format.startswith('glue') or c.data.format in ('swag', 'commonsenseqa'))
              and f'data.format={c.data.format} names the columns and the labels itself: leave it '
              'out'), (_FINETUNING,)),
    Rule(('data.labels', 'data.skip_labels'), lambda c: (
        c.data.get('problem') == 'regression'
        and 'data.problem=regression has no labels: leave it out')),
    Rule(('data.long',), _by_pair),
    # [CLS] question [SEP] window [SEP], with a question of one token.
    Rule(('data.doc_stride',), lambda c: c.data.doc_stride > c.max_len - 4 and (
        f'a window of max_len={c.max_len} holds at most {c.max_len - 4} tokens of the text: give '
        'at most that')),
)
RULES_WITH_DATA = (  # their reasons take the job too
    Rule(('eval_every', 'eval_batches', 'keep_best'), lambda c, job: (
        not job.data.has_held_out
        and 'no text is held out: give data.heldout, or records that have some')),
    Rule(('profile_steps',), lambda c, job: (
        c.profile_steps and c.profile_steps[0] > job.train_steps
        and f'the run has {job.train_steps} steps')),
    Rule(('data.text_pair_column', 'data.label_column'), _by_lists, (_FINETUNING,)),
    Rule(('batch_size',), _by_examples, (_FINETUNING,)),
    Rule(('model.initializer_range',), lambda c, job: (
        job.start and not c.get('reinit_layers') and initial.starts_whole(job.task, job.start)
        and f'every array comes from {c.init_from or c.teacher}, and none begins at random: leave '
            'it out')),
    Rule(('data.null_threshold',), lambda c, job: (
        job.data.task.null_threshold is None
        and f'every question of data.train={c.data.train} has an answer')),
)


def check(config: ConfigDict, given: Collection[str], job: Job | None = None):
  """Raises UserError for a field on the command line that has no effect; `given` names them.

  With a job it applies the rules that depend on the data, without one the others.
  """
  architecture = config.model.architecture
  if architecture in architectures.ALL and not job:
    fields = {f.name for f in dataclasses.fields(architectures.ALL[architecture].config)}
    for name in given:
      if name.startswith('model.') and name.partition('.')[2] not in fields:
        raise UserError(f'--config.{name} has no effect here: model.architecture={architecture} '
                        'has no such field')
  run = _PRETRAINING if config.task == 'pretrain' else _FINETUNING
  for name in given:
    for rule in RULES_WITH_DATA if job else RULES:
      if name not in rule.fields or run not in rule.runs:
        continue
      try:
        reason = rule.reason(config, job) if job else rule.reason(config)
      except UserError:  # a file that cannot be read: its reader says so
        continue
      if reason:
        raise UserError(f'--config.{name} has no effect here: {reason}')

