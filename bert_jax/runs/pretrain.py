"""Builds the job of a pretraining run from a corpus, an objective and masking."""

import math
from typing import Any

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data import dataset, mixture
from bert_jax.data.pairs import RowLayout
from bert_jax.data.rows import RowSource
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import UserError, require
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures
from bert_jax.objectives import masking, objectives
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import initial, model_fields
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from bert_jax.training.job import Job


def _train_steps(config: FrozenConfigDict, corpus: dataset.Corpus) -> int:
  if config.train_steps:
    return config.train_steps
  # The parts of a mixture end at different steps.
  require(not isinstance(corpus.train, mixture.MixedRecords),
          f'train_epochs={config.train_epochs}: the mixture data.source='
          f'{config.data.source} has no epochs: give train_steps')
  data = config.data
  layout = RowLayout.create(config.max_len, data.pack, data.sequences, data.negatives)
  rows = RowSource(corpus.train, layout, config.seed, corpus.tokenizer).rows
  return math.ceil(config.train_epochs * rows / config.batch_size)


def vocabulary(corpus: dataset.Corpus,
               masking_config: MaskingConfig) -> masking.Vocabulary:
  """The properties of a vocabulary that masking needs."""
  tokenizer, frequencies = corpus.tokenizer, None
  special_ids = tokenizer_base.special_ids(tokenizer)
  if masking_config.random_by_frequency:
    frequencies = masking.cumulative_frequencies(corpus.counts, special_ids)
  return masking.Vocabulary(tokenizer.vocab_size, special_ids, tokenizer.mask_id,
                            frequencies)


def _open_corpus(config: FrozenConfigDict, model: Pretrained | None,
                 teacher: Pretrained | None, workdir: epath.Path
                 ) -> tuple[dataset.Corpus, dict[str, Any], list[str]]:
  """Opens the corpus with the vocabulary of the run.

  Returns the corpus, the fields that model and corpus determine, and notes for the user.
  """
  fields = {}
  if config.init_from or teacher:
    fields = model_fields.vocabulary_if_unset(config, model or teacher, workdir)
  asked, config = config.model.vocab_size, config_fields.changed(config, fields)
  corpus = dataset.open_corpus(config.data, asked, workdir, jax.process_count())
  # A given vocabulary has its own size, and a small corpus yields fewer entries.
  size = fields['model.vocab_size'] = corpus.tokenizer.vocab_size
  is_trained = not config.data.vocab and not any(
      map(dataset.is_prepared, dataset.sources(config.data.source)))
  notes = [f'model.vocab_size={asked:,}: the corpus gives {size:,} entries'] * (
      is_trained and size < asked)
  of_the_run = 'data.vocab' in fields and (workdir / 'run.json').exists()
  # An id must mean the same token to every model of the run.
  for field, name, other in (('init_from', config.init_from, model),
                             ('teacher', config.teacher, teacher)):
    if other:
      model_fields.check_vocabulary(field, name, other, corpus.tokenizer,
                                    workdir / 'vocabulary', of_the_run)
  return corpus, fields, notes


def _check_keep_best(keep_best: str, data: PretrainingData):
  require(not keep_best or data.has_held_out,
          f'keep_best={keep_best!r} needs held-out text: set data.heldout')
  # The names need a trace of the evaluation step, so compute them only for this check.
  if keep_best and keep_best not in data.score_names():
    raise UserError(f'keep_best={keep_best!r} is not a score of the evaluation: '
                    f'it has {", ".join(data.score_names())}')


def make_job(config: FrozenConfigDict, model: Pretrained | None, mesh: Mesh,
             workdir: epath.Path) -> Job:
  """Opens the corpus and builds the task; `Job.fields` has the corpus's vocabulary size.

  `model` is the initial model; None = fresh parameters, or the run's own checkpoint.
  Raises UserError for a mistake in the config or the corpus.
  """
  masking_config = MaskingConfig(**config.masking)
  teacher = initial.load_teacher(config)
  corpus, fields, notes = _open_corpus(config, model, teacher, workdir)
  config = config_fields.changed(config, fields)
  if model:
    model_fields.check_same_sizes(config, model)

  model_config = architectures.make_config(config.model)
  objective = objectives.create(config.objective, config.data.sequences, model_config,
                               teacher and teacher.config)
  task = Pretraining(objective, masking_config, vocabulary(corpus, masking_config),
                     initial.teacher_params(teacher))
  train_steps = _train_steps(config, corpus)
  phases = config_lib.phases_of(config, train_steps)
  data = PretrainingData.create(
      task, corpus, phases, config.data, seed=config.seed,
      eval_batches=config.eval_batches, feed=mesh_lib.feed(mesh))
  _check_keep_best(config.keep_best, data)
  epochs = sum(
      p.steps * p.batch_size / source.rows for p, source in zip(phases, data.train_rows))
  steps = f'{train_steps:,}: ' + ', then '.join(
      f'{p.steps:,} of {p.batch_size} rows of {p.max_len}' for p in phases)
  return Job(
      task=task, data=data, train_steps=train_steps, tokenizer=corpus.tokenizer,
      start=model or (teacher and initial.student(teacher, model_config)),
      data_digest=corpus.train.digest,
      num_parameters=objective.num_parameters(), steps_line=f'{steps}; {epochs:.3g} epochs',
      lengths=[phase.max_len for phase in phases], fields=fields, notes=notes)
