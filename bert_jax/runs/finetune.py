"""A fine-tuning run: a pretrained model, a task, files of examples."""

import math
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from bert_jax.inference import files
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.pretrained import head_groups
from bert_jax.labelled import glue
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.runs import initial
from bert_jax.runs.job import Job
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import multiple_choice
from bert_jax.tasks import question_answering
from bert_jax.tasks import sentence_embedding
from bert_jax.tasks import sequence_classification
from bert_jax.tasks import token_classification
from bert_jax.tasks.finetuning import FineTuning
from bert_jax.tasks.finetuning import Splits

_TASKS = {'sequence_classification': sequence_classification,
          'token_classification': token_classification,
          'question_answering': question_answering,
          'multiple_choice': multiple_choice,
          'sentence_embedding': sentence_embedding}
_FED_BY = ('seed', 'batch_size', 'max_len', 'optimizer.accumulation')


def _best(config: ConfigDict, task: FineTuning) -> str:
  """The score that the best checkpoint is chosen by."""
  known = ('loss', *task.score_names)
  if config.keep_best not in ('', 'auto', *known):
    raise UserError(f'keep_best={config.keep_best!r} is no score of this task: use '
                    f'{", ".join(known)}')
  if config.keep_best != 'auto':
    return config.keep_best
  if config.data.format.startswith('glue'):
    return glue.find(config.data.format).metric
  if config.task != 'sequence_classification':
    return config_lib.finetuning(config.task).keep_best
  return {'regression': 'spearman', 'multi_label': 'f1'}.get(task.problem, 'accuracy')


def _fill_in(config: ConfigDict, task: FineTuning):
  """Fields that are counted in epochs, in steps; the score that decides."""
  epoch = task.train.batches.steps_per_epoch
  with config.unlocked():
    config.eval_every = config.eval_every or epoch
    config.checkpoint_every = config.checkpoint_every or epoch
    config.keep_best = _best(config, task) if task.evals else ''


def make_job(config: ConfigDict, model: Pretrained | None, mesh: Mesh,
             workdir: epath.Path) -> Job:
  """Reads the examples and makes the task.

  Args:
    config: checked.
    model: to start from; None = from the run's own checkpoint.
    mesh: of the run.
    workdir: of the run.

  Raises:
    UserError: a mistake in the config or the data.
  """
  if model:
    initial.check_sizes(config, model)
  tokenizer = model.tokenizer if model else tokenizer_lib.load(workdir / 'tokenizer')
  splits = Splits(config.batch_size, tokenizer.pad_id, config.seed, sharding.batch_divisor(mesh),
                  config.optimizer.accumulation, mesh_lib.feed(mesh))
  task = _TASKS[config.task].create(config, config_lib.bert_config(config.model), tokenizer, splits)
  if config.data.test:
    files.read(config)  # a mistake in it is found now, not after the training
  epoch = task.train.batches.steps_per_epoch
  train_steps = config.train_steps or math.ceil(config.train_epochs * epoch)
  _fill_in(config, task)
  steps = (f'{train_steps:,} of {config.batch_size} examples, {train_steps / epoch:.4g} epochs of '
           f'{epoch:,}')
  kept: dict[str, Any] = {'labels': list(task.labels), 'problem': getattr(task, 'problem', ''),
                          'null_threshold': getattr(task, 'null_threshold', None)}
  parameters = task.model.config.count_parameters(
      pooler='pooler' in head_groups(task.model.config, config.task))
  start = initial.with_head_of(model, config.task, task.labels) if model else None
  return Job(task=task, data=task, train_steps=train_steps, tokenizer=tokenizer, start=start,
             records=task.train.batches.features.digest(), fed_by=_FED_BY, parameters=parameters,
             steps=steps, lengths=[task.train.batches.length], kept=kept)


def finish(config: ConfigDict, workdir: epath.Path):
  """Predicts data.test, if there is one."""
  if not config.data.test:
    return
  if jax.process_count() > 1:  # the model is loaded on one device
    print_summary([('note', 'data.test is predicted by one process: run the same command in one')])
  else:
    files.predict(config, str(workdir))
