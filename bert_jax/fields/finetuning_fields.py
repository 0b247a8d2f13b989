"""The fields of a fine-tuning run, with their rules; each task adds its own."""

from ml_collections import ConfigDict

from bert_jax.config_fields import ANOTHER_RUN, HARMLESS, Field, Table, at_least, with_values
from bert_jax.errors import require
from bert_jax.fields import run_fields
from bert_jax.labelled.unused_fields import named_by_format, not_evaluated
from bert_jax.tasks import task_list


def vocabulary_of_model(config: ConfigDict) -> str:
  """The size of the vocabulary has no effect: the model that the run starts from has one."""
  return 'the vocabulary is that of init_from: leave it out'


def more_than_all_examples(config: ConfigDict, job) -> str:
  """The size of a batch has no effect beyond all examples."""
  count = job.data.train.batches.features.count
  least = job.data.feed.of * config.optimizer.accumulation  # a batch is divided by it
  most = -(-count // least) * least
  return '' if config.batch_size <= most else (
      f'data.train={config.data.train} has {count} examples: give at most {most}')


_FIELDS = with_values(run_fields.FIELDS, {
    'train_epochs': 3.0,
    # Examples of a batch over all devices, tokens of an input, and microbatches decide which
    # examples a step sees.
    'batch_size': Field(32, at_least(1), ANOTHER_RUN, unused_by_data=(more_than_all_examples,)),
    'max_len': Field(128, at_least(1)),
    'optimizer.accumulation': Field(1),
    'log_every': 10,
    # Steps between evaluations, and between checkpoints; 0 = after every epoch.
    'eval_every': Field(0, at_least(0), HARMLESS, (not_evaluated,)),
    'checkpoint_every': Field(0, at_least(0), HARMLESS),
    # A score of the evaluations; best/ keeps the checkpoint with the best one, and predict uses it.
    # '' = none.
    'keep_best': Field('', on_resume=HARMLESS, unused=(not_evaluated,)),
    'keep_checkpoints': 1,
    # Top layers (and the pooler) that start fresh (Zhang et al. 2021).
    'reinit_layers': Field(0, at_least(0)),
    'optimizer.learning_rate': 3e-5,
    'optimizer.warmup_steps': 0,
    'optimizer.warmup_ratio': 0.1,
    'data.train': Field('', on_resume=HARMLESS),  # file, or tfds:NAME[@SPLIT]
    # Files, comma-separated, the scores of all but the first under their names.
    'data.eval': Field('', on_resume=HARMLESS),
    # File that is predicted at the end, into WORKDIR/predictions.
    'data.test': Field('', on_resume=HARMLESS),
    # Fields of this group that are other in data.eval: text_column=sentence.
    'data.eval_fields': Field((), on_resume=HARMLESS, unused=(not_evaluated,)),
    'data.format': Field('auto', on_resume=HARMLESS),  # by the file's name
    'data.text_column': Field('text', on_resume=HARMLESS, unused=(named_by_format,)),
    'data.text_pair_column': Field('', on_resume=HARMLESS, unused=(named_by_format,)),
    'data.label_column': Field('label', on_resume=HARMLESS, unused=(named_by_format,)),
})
# Rules of the group `model` that `run_fields.MODEL` lacks.
MODEL = {'vocab_size': Field(None, unused=(vocabulary_of_model,))}


def fields(task: str) -> Table:
  """The table of a task."""
  files = task_list.ALL[task].files
  return with_values(_FIELDS, {'keep_best': files.best_score, **files.config_fields})


def check(config: ConfigDict):
  """Raises UserError for fields that do not fit each other."""
  require(not config.phases, f'phases={tuple(config.phases)} are for pretraining: rows of a '
                             'fine-tuning run are as long as its examples')
  require(bool(config.data.train), 'data.train is not set: give the file to train on')
  task_list.ALL[config.task].files.check(config)
