"""From a config and a workdir to a trained model: checks, corpus, mesh, task, loop."""

import importlib.metadata
import json
import math

from etils import epath
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import prepare
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig
from bert_jax.model.config import count_parameters
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import host
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import loop
from bert_jax.training import report
from bert_jax.training.optimizer import OptimizerConfig

_VERSIONS = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')


def _train_steps(config: ConfigDict, corpus: prepare.Corpus) -> int:
  if config.train_steps:
    return config.train_steps
  rows = RowSource(corpus.train, config.max_len, config.seed, corpus.tokenizer).plan(0)
  return math.ceil(config.train_epochs * len(rows.random) / config.batch_size)


def _check_same_run(workdir: epath.Path, config: ConfigDict):
  """Raises UserError if the workdir holds a run of another task or model."""
  path = workdir / 'run.json'
  if not path.exists():
    return
  earlier = json.loads(path.read_text())['config']
  if earlier['task'] != config.task:
    raise UserError(f'{workdir} holds a run with task={earlier["task"]!r}, this config has '
                    f'{config.task!r}: use another --workdir')
  # How the same numbers are computed may change; what they are may not.
  free = ('dtype', 'remat', 'scan_unroll')
  for name, value in config.model.items():
    if name not in free and earlier['model'].get(name) != value:
      raise UserError(f'{workdir} holds a run with model.{name}={earlier["model"].get(name)}, this '
                      f'config has {value}: use another --workdir')


def _write_run(workdir: epath.Path, config: ConfigDict):
  versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
  partial = workdir / 'run.json.partial'
  content = {'config': config.to_dict(), 'versions': versions}
  partial.write_text(json.dumps(content, indent=2) + '\n')
  partial.replace(workdir / 'run.json')


def run(config: ConfigDict, workdir: str):
  """Trains what `config` says in `workdir`, or goes on with it.

  Raises:
    UserError: a mistake in the config, the corpus or the workdir.
  """
  config_lib.check(config)
  model_config = BertConfig(**config.model)
  masking_config, _ = MaskingConfig(**config.masking), OptimizerConfig(**config.optimizer)
  sharding.rules(config.sharding)
  if config.platform == 'cpu' or (config.platform == 'auto' and not host.has_accelerator()):
    host.keep_freed_memory()  # before JAX starts its threads
  mesh_lib.select_platform(config.platform)
  mesh = mesh_lib.make_mesh(**config.mesh)
  for _, _, batch_size in config.phases or ((0, 0, config.batch_size),):
    mesh_lib.check_fits(mesh, batch_size, config.optimizer.accumulation, model_config.num_heads)
  workdir = epath.Path(workdir)
  report.check_writable(workdir)

  corpus = prepare.open_corpus(config.data, config.model.vocab_size, workdir)
  # A given or a trained vocabulary may be smaller or larger than what the config asks for.
  with config.unlocked():
    config.model.vocab_size = corpus.tokenizer.vocab_size
  _check_same_run(workdir, config)
  _write_run(workdir, config)

  train_steps = _train_steps(config, corpus)
  phases = Phases.create(config.phases, train_steps, config.max_len, config.batch_size)
  model_config = BertConfig(**config.model)
  task = Pretraining.create(BertForPreTraining(model_config), masking_config, corpus, phases,
                            seed=config.seed, eval_batches=config.eval_batches)
  devices = f'{mesh.size} {mesh.devices.flat[0].device_kind}'
  report.print_summary([
      ('model', f'{count_parameters(model_config, heads=True):,} parameters: '
                f'{model_config.num_layers} layers of {model_config.hidden_size}, '
                f'{model_config.dtype}'),
      ('mesh', f'{devices}: ' + ', '.join(f'{k} {v}' for k, v in mesh.shape.items())
               + f'; sharding {config.sharding}'),
      *task.describe(),
      ('steps', f'{train_steps:,}: ' + ', then '.join(
          f'{p.steps:,} of {p.batch_size} rows of {p.max_len}' for p in phases)),
      ('workdir', str(workdir))])
  loop.train(task, config, train_steps, mesh, workdir)
