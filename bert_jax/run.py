"""From a config and a workdir to a trained model: checks, corpus, mesh, task, loop."""

import importlib.metadata
import json
import math

from etils import epath
import jax
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import dataset
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.data.windows import Layout
from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig
from bert_jax.model.config import count_parameters
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import host
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import checkpoint
from bert_jax.training import loop
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import report

# Fields of `model` that may change: how the same numbers are computed; what the shapes do not know.
_SAME_NUMBERS = ('dtype', 'remat', 'scan_unroll')
_SAME_SHAPES = ('dropout', 'attention_dropout', 'initializer_range')
_VERSIONS = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')


def _train_steps(config: ConfigDict, corpus: dataset.Corpus) -> int:
  if config.train_steps:
    return config.train_steps
  layout = Layout.create(config.max_len, config.data.pack, config.data.sequences)
  rows = RowSource(corpus.train, layout, config.seed, corpus.tokenizer).rows
  return math.ceil(config.train_epochs * rows / config.batch_size)


def _check_same_model(folder: epath.Path, config: ConfigDict, free: tuple[str, ...], remedy: str):
  """Raises UserError if the run in `folder` has another model, but for the fields `free`."""
  earlier = json.loads((folder / 'run.json').read_text())['config']
  for name, value in config.model.items():
    if name not in free and earlier['model'].get(name) != value:
      raise UserError(f'{folder} holds a run with model.{name}={earlier["model"].get(name)}, this '
                      f'config has {value}: {remedy}')


def _check_same_rows(workdir: epath.Path, config: ConfigDict, corpus: dataset.Corpus):
  """Raises UserError if the run in `workdir` was fed other rows than `config` asks for."""
  earlier = json.loads((workdir / 'run.json').read_text())
  fed = {'records': earlier.get('records'), 'seed': earlier['config']['seed'],
         **{f'data.{name}': earlier['config']['data'].get(name) for name in ('pack', 'sequences')}}
  asked = {'records': corpus.train.digest, 'seed': config.seed, 'data.pack': config.data.pack,
           'data.sequences': config.data.sequences}
  for name, value in asked.items():
    if fed[name] != value:
      raise UserError(f'{workdir} was trained with {name}={fed[name]}, now it is {value}: use '
                      'another --workdir')


def _check_init_from(folder: epath.Path, config: ConfigDict, corpus: dataset.Corpus):
  """Raises UserError if a model cannot start from the one in `folder`."""
  if not (folder / 'run.json').exists():
    raise UserError(f'init_from={folder} is no workdir: it has no run.json')
  theirs = tokenizer_lib.load(folder / 'tokenizer')
  if tokenizer_lib.digest(theirs) != tokenizer_lib.digest(corpus.tokenizer):
    raise UserError(f'init_from={folder} was trained with another vocabulary: set '
                    f'data.vocab={folder}/tokenizer in a new --workdir')
  _check_same_model(folder, config, _SAME_NUMBERS + _SAME_SHAPES, 'init_from needs the same model')
  theirs = json.loads((folder / 'run.json').read_text())['config']['data']
  sequences = theirs.get('sequences', 'next_sentence')
  if (sequences == 'full_sentences') != (config.data.sequences == 'full_sentences'):
    raise UserError(f'init_from={folder} was trained with data.sequences={sequences}, this config '
                    f'has {config.data.sequences}: only one of them has a head for pairs')


def _write_run(workdir: epath.Path, config: ConfigDict, corpus: dataset.Corpus):
  if jax.process_index():
    return
  versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
  partial = workdir / 'run.json.partial'
  if not (workdir / 'tokenizer').exists():  # a workdir has all that predict needs
    corpus.tokenizer.save(workdir / 'tokenizer')
  content = {'config': config.to_dict(), 'records': corpus.train.digest, 'versions': versions}
  partial.write_text(json.dumps(content, indent=2) + '\n')
  partial.replace(workdir / 'run.json')


def run(config: ConfigDict, workdir: str):
  """Trains what `config` says in `workdir`, or goes on with it.

  Raises:
    UserError: a mistake in the config, the corpus or the workdir.
  """
  config_lib.check(config)
  model_config = BertConfig(**config.model)
  masking_config = MaskingConfig(**config.masking)
  optimizer_config = optimizer_lib.OptimizerConfig(**config.optimizer)
  if config.train_steps:
    optimizer_lib.learning_rate(optimizer_config, config.train_steps)
  sharding.rules(config.sharding)
  if config.platform == 'cpu' or (config.platform == 'auto' and not host.has_accelerator()):
    host.keep_freed_memory()  # before JAX starts its threads
  mesh_lib.join_processes()
  mesh_lib.select_platform(config.platform)
  mesh = mesh_lib.make_mesh(**config.mesh)
  for _, _, batch_size in config.phases or ((0, 0, config.batch_size),):
    mesh_lib.check_fits(mesh, batch_size, optimizer_config.accumulation, model_config.num_heads)
  if '://' in workdir:
    raise UserError(f'--workdir={workdir}: the tokenised text is memory-mapped from the workdir, '
                    'which has to be a local folder')
  workdir = epath.Path(workdir)
  report.check_writable(workdir)

  corpus = dataset.open_corpus(config.data, config.model.vocab_size, workdir, jax.process_count())
  # A given or a trained vocabulary may be smaller or larger than what the config asks for.
  with config.unlocked():
    config.model.vocab_size = corpus.tokenizer.vocab_size
  if (workdir / 'run.json').exists():
    _check_same_model(workdir, config, _SAME_NUMBERS, 'use another --workdir')
    _check_same_rows(workdir, config, corpus)
  if config.init_from:
    _check_init_from(epath.Path(config.init_from), config, corpus)
  train_steps = _train_steps(config, corpus)
  checkpoints = checkpoint.Checkpoints(workdir, config.keep_checkpoints)
  if (checkpoints.latest() or 0) > train_steps:
    raise UserError(f'{workdir} holds a run of {checkpoints.latest()} steps, more than train_steps='
                    f'{train_steps}: use another --workdir')
  _write_run(workdir, config, corpus)

  phases = Phases.create(config.phases, train_steps, config.max_len, config.batch_size)
  model_config = BertConfig(**config.model)
  task = Pretraining.create(BertForPreTraining(model_config), masking_config, corpus, phases,
                            seed=config.seed, eval_batches=config.eval_batches,
                            pack=config.data.pack, sequences=config.data.sequences)
  pairs = task.pair_objective is not None
  devices = f'{mesh.size} {mesh.devices.flat[0].device_kind}'
  report.print_summary([
      ('model', f'{count_parameters(model_config, pooler=pairs, heads=True):,} parameters: '
                f'{model_config.num_layers} layers of {model_config.hidden_size}, '
                f'{model_config.dtype}'),
      ('mesh', f'{devices}: ' + ', '.join(f'{k} {v}' for k, v in mesh.shape.items())
               + f'; sharding {config.sharding}'),
      *task.describe(),
      ('steps', f'{train_steps:,}: ' + ', then '.join(
          f'{p.steps:,} of {p.batch_size} rows of {p.max_len}' for p in phases)),
      ('workdir', str(workdir))])
  loop.train(task, config, train_steps, mesh, workdir, checkpoints)
