"""The fields of a fine-tuning run and their rules; each task adds its own fields."""

from ml_collections import ConfigDict

from bert_jax.config_fields import (
  ANOTHER_RUN,
  HARMLESS,
  Field,
  Table,
  at_least,
  with_values,
)
from bert_jax.errors import require
from bert_jax.fields import run_fields
from bert_jax.labelled.unused_fields import named_by_format, not_evaluated
from bert_jax.tasks import task_list


def vocabulary_of_model(config: ConfigDict) -> str:
  """The vocabulary size has no effect: `init_from` determines it."""
  return 'init_from determines the vocabulary: leave it out'


def more_than_all_examples(config: ConfigDict, job) -> str:
  """A batch size above the number of examples has no effect."""
  count = job.data.train.features.count
  # A batch is a multiple of this number, so the maximum is rounded up to a multiple.
  least = job.data.feed.of * config.optimizer.accumulation
  most = -(-count // least) * least
  return '' if config.batch_size <= most else (
      f'data.train={config.data.train} has {count} examples: give at most {most}')


_FIELDS = with_values(run_fields.FIELDS, {
    'train_epochs': 3.0,
    # Examples in a batch, over all devices. A resumed run may not change it: it decides
    # which examples a step sees.
    'batch_size': Field(32, at_least(1), ANOTHER_RUN,
                        unused_by_data=(more_than_all_examples,)),
    'max_len': Field(128, at_least(1)),  # tokens in an input, special tokens included
    'optimizer.accumulation': Field(1),
    'log_every': 10,
    # Steps between evaluations; 0 = after every epoch.
    'eval_every': Field(0, at_least(0), HARMLESS, (not_evaluated,)),
    # Steps between checkpoints; 0 = after every epoch.
    'checkpoint_every': Field(0, at_least(0), HARMLESS),
    # A score of the evaluations, '' = none, auto = the usual score of the problem.
    # best/ keeps the checkpoint with the best value, and predict uses it.
    'keep_best': Field('', on_resume=HARMLESS, unused=(not_evaluated,)),
    'keep_checkpoints': 1,
    # Number of top layers that start fresh, with the pooler (Zhang et al. 2021).
    'reinit_layers': Field(0, at_least(0)),
    'optimizer.learning_rate': 3e-5,
    'optimizer.warmup_steps': 0,
    'optimizer.warmup_ratio': 0.1,
    # A file; for tasks that read tables (classification, embeddings, reranking) also
    # tfds:NAME[@SPLIT].
    'data.train': Field('', on_resume=HARMLESS),
    # Files, comma-separated. The score names of all files but the first end in _ and the
    # file name.
    'data.eval': Field('', on_resume=HARMLESS),
    # A file of examples to answer at the end, into WORKDIR/predictions.
    'data.test': Field('', on_resume=HARMLESS),
    # Overrides the format, problem or columns of data.train for the files of data.eval,
    # such as text_column=sentence.
    'data.eval_fields': Field((), on_resume=HARMLESS, unused=(not_evaluated,)),
    # csv, tsv, jsonl, or a format of the task: glue/TASK, conll, swag, commonsenseqa. auto
    # = by the name of the file; tagging reads other names as CoNLL.
    'data.format': Field('auto', on_resume=HARMLESS),
    # The column of the text.
    'data.text_column': Field('text', on_resume=HARMLESS, unused=(named_by_format,)),
    # The column of the second text; '' = an input is one text.
    'data.text_pair_column': Field('', on_resume=HARMLESS, unused=(named_by_format,)),
    # The column of the label.
    'data.label_column': Field('label', on_resume=HARMLESS, unused=(named_by_format,)),
})
# Rules of the group `model` that `run_fields.MODEL` lacks.
MODEL = {'vocab_size': Field(None, unused=(vocabulary_of_model,))}


def fields(task: str) -> Table:
  """The table of the fields of a task."""
  files = task_list.ALL[task].files
  return with_values(_FIELDS, {'keep_best': files.best_score, **files.config_fields})


def check(config: ConfigDict):
  """Raises UserError for fields that contradict each other."""
  require(not config.phases,
          f'phases={tuple(config.phases)} are for pretraining: in fine-tuning the '
          'examples determine the length of rows')
  require(bool(config.data.train), 'data.train is not set: give the file to train on')
  task_list.ALL[config.task].files.check(config)
