"""Builds the job of a fine-tuning run from a pretrained model, a task and examples."""

import math

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import require
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import layout
from bert_jax.interop.pretrained import Pretrained, head_groups
from bert_jax.model.parameters import count_parameters
from bert_jax.runs import initial, model_fields
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import finetuning_data, task_list
from bert_jax.tasks.finetuning_data import FineTuningData
from bert_jax.training.job import Job


def _best(config: FrozenConfigDict, data: FineTuningData) -> str:
  """The score that selects the best checkpoint; raises UserError if it is unknown."""
  known = ('loss',) * data.files.has_held_out_loss + tuple(data.files.score_names)
  require(config.keep_best in ('', 'auto', *known),
          f'keep_best={config.keep_best!r} is not a score of this task: use '
          f'{", ".join(known)}')
  best = data.files.auto_score or data.files.best_score
  return best if config.keep_best == 'auto' else config.keep_best


def make_job(config: FrozenConfigDict, model: Pretrained | None, mesh: Mesh,
             workdir: epath.Path) -> Job:
  """Reads the examples and builds the task.

  `Job.fields` has the fields that depend on the data. `model` is the initial model;
  None = the run resumes its own checkpoint. Raises UserError for a mistake in the config
  or the data.
  """
  if model:
    model_fields.check_same_sizes(config, model)
  tokenizer = model.tokenizer if model else tokenizer_reader.load(workdir / 'tokenizer')
  kind = task_list.ALL[config.task]
  for head in kind.starts_from if model else ():
    require(head in model.groups, f'init_from={config.init_from} has no head {head!r}: '
                                  f'task={config.task} starts from a masked LM')
  data = finetuning_data.read(kind.files, config, tokenizer, mesh)
  # A mistake in this file must show now, not after the training.
  if config.data.test:
    kind.files.test_examples(config.data)
  batches, bert = data.train.batches, data.task.model.config
  epoch = batches.steps_per_epoch
  train_steps = config.train_steps or math.ceil(config.train_epochs * epoch)
  # Counts the encoder only: sizes of models are published without their heads.
  encoder = layout.abstract_params(bert, {'pooler'} & head_groups(bert, config.task))
  return Job(
      task=data.task, data=data, train_steps=train_steps, tokenizer=tokenizer,
      start=model and initial.with_head_of(
          model, kind.model_task or config.task, data.files.labels),
      data_digest=batches.features.digest(),
      num_parameters=count_parameters(encoder, bert),
      steps_line=(f'{train_steps:,} of {batches.most_examples} examples, '
                  f'{train_steps / epoch:.4g} epochs of {epoch:,}'),
      lengths=[batches.length],
      fields={'eval_every': config.eval_every or epoch,
              'checkpoint_every': config.checkpoint_every or epoch,
              'keep_best': _best(config, data) if data.evals else ''},
      facts={'labels': list(data.files.labels), 'problem': data.files.problem,
             **data.files.facts})


def finish(config: FrozenConfigDict, workdir: epath.Path):
  """Predicts data.test, if set, into WORKDIR/predictions, with the best checkpoint."""
  if not config.data.test:
    return
  # The model is loaded onto one device.
  if jax.process_count() > 1:
    print_summary([('note', 'only a run of one process predicts data.test: run the same '
                            'command in one process')])
    return
  kind, bert = task_list.ALL[config.task], bert_lib.load(str(workdir))
  folder = epath.Path(workdir) / 'predictions'
  folder.mkdir(parents=True, exist_ok=True)
  examples = kind.files.test_examples(config.data)
  for name, content in kind.write_test(bert, config.data, examples):
    (folder / name).write_text(content)
    print_summary([('predicted', str(folder / name))])
