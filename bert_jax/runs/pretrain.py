"""A pretraining run: corpus, vocabulary, rows."""

import math

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import dataset
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data.rows import RowSource
from bert_jax.data.windows import Layout
from bert_jax.errors import UserError
from bert_jax.interop.pretrained import Pretrained
from bert_jax.objectives import catalogue
from bert_jax.objectives import masking
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import initial
from bert_jax.runs.job import Job
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining import PretrainingData


def _train_steps(config: ConfigDict, corpus: dataset.Corpus) -> int:
  if config.train_steps:
    return config.train_steps
  layout = Layout.create(config.max_len, config.data.pack, config.data.sequences)
  rows = RowSource(corpus.train, layout, config.seed, corpus.tokenizer).rows
  return math.ceil(config.train_epochs * rows / config.batch_size)


def vocabulary(corpus: dataset.Corpus, masking_config: MaskingConfig) -> masking.Vocabulary:
  """The part of a tokeniser that masking needs."""
  tokenizer, frequencies = corpus.tokenizer, None
  special_ids = tokenizer_lib.special_ids(tokenizer)
  if masking_config.random_by_frequency:
    frequencies = masking.cumulative_frequencies(corpus.counts, special_ids)
  return masking.Vocabulary(tokenizer.vocab_size, special_ids, tokenizer.mask_id, frequencies)


def _check_best(metric: str, data: PretrainingData):
  """Raises UserError now, not at the first evaluation, if no evaluation has this score."""
  if not data.has_held_out:
    raise UserError(f'keep_best={metric!r} needs held-out text: set data.heldout')
  known = data.score_names()
  if metric not in known:
    raise UserError(f'keep_best={metric!r} is no score of the evaluation: it has '
                    f'{", ".join(known)}')


def make_job(config: ConfigDict, model: Pretrained | None, mesh: Mesh,
             workdir: epath.Path) -> Job:
  """Opens the corpus and makes the task.

  Args:
    config: checked.
    model: to start from; None = fresh, or from the run's own checkpoint.
    mesh: of the run.
    workdir: of the run.

  Raises:
    UserError: a mistake in the config or the corpus.
  """
  masking_config = MaskingConfig(**config.masking)
  teacher = initial.teacher(config)
  if config.init_from or teacher:
    initial.adopt_vocabulary(config, model or teacher, workdir)
  corpus = dataset.open_corpus(config.data, config.model.vocab_size, workdir, jax.process_count())
  # A given or a trained vocabulary may be smaller or larger than what the config asks for.
  with config.unlocked():
    config.model.vocab_size = corpus.tokenizer.vocab_size
  if model:
    initial.check_vocabulary('init_from', config.init_from, model, corpus.tokenizer,
                             workdir / 'vocabulary')
    initial.check_sizes(config, model)
  train_steps = _train_steps(config, corpus)
  phases = config_lib.phases_of(config, train_steps)
  if teacher:
    initial.check_vocabulary('teacher', config.teacher, teacher, corpus.tokenizer,
                             workdir / 'vocabulary')
  objective = catalogue.create(config.objective, config.data.sequences,
                               config_lib.bert_config(config.model), teacher and teacher.config)
  task = Pretraining(objective, masking_config, vocabulary(corpus, masking_config),
                     initial.frozen(teacher))
  data = PretrainingData.create(
      task, corpus, phases, seed=config.seed, eval_batches=config.eval_batches,
      pack=config.data.pack, sequences=config.data.sequences, feed=mesh_lib.feed(mesh))
  if config.keep_best:
    _check_best(config.keep_best, data)
  steps = f'{train_steps:,}: ' + ', then '.join(
      f'{p.steps:,} of {p.batch_size} rows of {p.max_len}' for p in phases)
  start = model or (teacher and initial.student(teacher, config_lib.bert_config(config.model)))
  return Job(task, data, train_steps, corpus.tokenizer, start, corpus.train.digest,
             ('seed', 'data.pack', 'data.sequences'), objective.parameters(), steps,
             [phase.max_len for phase in phases], {})


def finish(config: ConfigDict, workdir: epath.Path):
  """Nothing is left to do."""
