"""From a config and a workdir to a trained model: checks, corpus, mesh, task, loop."""

from collections.abc import Iterator
import importlib.metadata
import json
import math
import shlex
import sys

from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import config as config_lib
from bert_jax.data import dataset
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.data.windows import Layout
from bert_jax.errors import UserError
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.config import count_parameters
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import host
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import checkpoint
from bert_jax.training import initial
from bert_jax.training import loop
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import report

# Fields of `model` that may change within a run: how the same numbers are computed.
_SAME_NUMBERS = ('dtype', 'remat', 'scan_unroll')
_VERSIONS = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')


def _activations(config: ConfigDict) -> float:
  """Rows x positions x width x layers of the largest step; infinite where sizes are not set yet."""
  width, layers = config.model.hidden_size, config.model.num_layers
  phases = config.phases or ((0, config.max_len, config.batch_size),)
  return width * layers * max(n * rows for _, n, rows in phases) if width and layers else math.inf


def _train_steps(config: ConfigDict, corpus: dataset.Corpus) -> int:
  if config.train_steps:
    return config.train_steps
  layout = Layout.create(config.max_len, config.data.pack, config.data.sequences)
  rows = RowSource(corpus.train, layout, config.seed, corpus.tokenizer).rows
  return math.ceil(config.train_epochs * rows / config.batch_size)


def _check_same_model(workdir: epath.Path, config: ConfigDict):
  """Raises UserError if the run in `workdir` has another model."""
  earlier = json.loads((workdir / 'run.json').read_text())['config']['model']
  for name, value in config.model.items():
    if name not in _SAME_NUMBERS and earlier.get(name, value) != value:
      raise UserError(f'{workdir} holds a run with model.{name}={earlier[name]}, this config has '
                      f'{value}: use another --workdir')


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


def _resume(config: ConfigDict, workdir: epath.Path):
  """Fills in what the config leaves open from the run in `workdir`."""
  earlier = json.loads((workdir / 'run.json').read_text())['config']
  with config.unlocked():
    for name, value in config.model.items():
      if value is None:
        config.model[name] = earlier['model'].get(name)
    if config.init_from and not config.data.vocab:
      config.data.update({name: earlier['data'][name] for name in ('vocab', 'lowercase')})


def _start(config: ConfigDict, workdir: epath.Path) -> Pretrained | None:
  """The model to start from; fills in what the config leaves to it.

  A run with a checkpoint of its own needs none.
  """
  if (workdir / 'run.json').exists():
    _resume(config, workdir)
  started = checkpoint.has_checkpoint(workdir)
  model = initial.load(config) if config.init_from and not started else None
  if model:
    initial.adopt(config, model, workdir / 'tokenizer')
  unset = [name for name, value in config.model.items() if value is None]
  if unset:
    raise UserError(f'model.{unset[0]} is not set: this config takes it from a model, give its '
                    'folder as init_from')
  if config.model.add_tokens and not config.init_from:
    raise UserError(f'model.add_tokens={config.model.add_tokens} extends the vocabulary of another '
                    'model: give its folder as init_from')
  return model


def _write_run(workdir: epath.Path, config: ConfigDict, corpus: dataset.Corpus):
  if jax.process_index():
    return
  versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
  partial = workdir / 'run.json.partial'
  if not (workdir / 'tokenizer').exists():  # a workdir has all that predict needs
    corpus.tokenizer.save(workdir / 'tokenizer')
  command = shlex.join(['python', *sys.orig_argv[1:]])
  content = {'command': command, 'config': config.to_dict(), 'records': corpus.train.digest,
             'versions': versions}
  partial.write_text(json.dumps(content, indent=2) + '\n')
  partial.replace(workdir / 'run.json')


def _summary(config: ConfigDict, task: Pretraining, mesh: Mesh, phases: Phases,
             workdir: epath.Path) -> Iterator[tuple[str, str]]:
  """(what, value) lines that say what is about to run."""
  c = task.model.config
  pairs = task.pair_objective is not None
  yield 'model', (f'{count_parameters(c, pooler=pairs, heads=True):,} parameters: {c.num_layers} '
                  f'layers of {c.hidden_size}, {c.dtype}')
  yield 'mesh', (f'{mesh.size} {mesh.devices.flat[0].device_kind}: '
                 + ', '.join(f'{k} {v}' for k, v in mesh.shape.items())
                 + f'; sharding {config.sharding}')
  yield from task.describe()
  yield 'steps', f'{sum(p.steps for p in phases):,}: ' + ', then '.join(
      f'{p.steps:,} of {p.batch_size} rows of {p.max_len}' for p in phases)
  yield 'workdir', str(workdir)


def run(config: ConfigDict, workdir: str):
  """Trains what `config` says in `workdir`, or goes on with it.

  Raises:
    UserError: a mistake in the config, the corpus or the workdir.
  """
  if '://' in workdir:
    raise UserError(f'--workdir={workdir}: the tokenised text is memory-mapped from the workdir, '
                    'which has to be a local folder')
  workdir = epath.Path(workdir)
  config_lib.check(config)
  masking_config = MaskingConfig(**config.masking)
  optimizer_config = optimizer_lib.OptimizerConfig(**config.optimizer)
  if config.train_steps:
    optimizer_lib.learning_rate(optimizer_config, config.train_steps)
  sharding.rules(config.sharding)
  on_cpu = config.platform == 'cpu' or (config.platform == 'auto' and not host.has_accelerator())
  if on_cpu and _activations(config) <= host.MOST_ACTIVATIONS:
    host.keep_freed_memory()  # before JAX starts its threads
  mesh_lib.join_processes()
  mesh_lib.select_platform(config.platform)
  mesh = mesh_lib.make_mesh(**config.mesh)
  report.check_writable(workdir)
  model = _start(config, workdir)
  model_config = config_lib.bert_config(config.model)
  config_lib.check_positions(config)
  for _, _, batch_size in config.phases or ((0, 0, config.batch_size),):
    mesh_lib.check_fits(mesh, batch_size, optimizer_config.accumulation, model_config.num_heads)

  corpus = dataset.open_corpus(config.data, config.model.vocab_size, workdir, jax.process_count())
  # A given or a trained vocabulary may be smaller or larger than what the config asks for.
  with config.unlocked():
    config.model.vocab_size = corpus.tokenizer.vocab_size
  if (workdir / 'run.json').exists():
    _check_same_model(workdir, config)
    _check_same_rows(workdir, config, corpus)
  if model:
    initial.check(config, model, corpus.tokenizer, workdir / 'vocabulary')
  train_steps = _train_steps(config, corpus)
  checkpoints = checkpoint.Checkpoints(workdir, config.keep_checkpoints)
  if (checkpoints.latest() or 0) > train_steps:
    raise UserError(f'{workdir} holds a run of {checkpoints.latest()} steps, more than train_steps='
                    f'{train_steps}: use another --workdir')
  _write_run(workdir, config, corpus)

  phases = Phases.create(config.phases, train_steps, config.max_len, config.batch_size)
  model_config = config_lib.bert_config(config.model)
  task = Pretraining.create(BertForPreTraining(model_config), masking_config, corpus, phases,
                            seed=config.seed, eval_batches=config.eval_batches,
                            pack=config.data.pack, sequences=config.data.sequences)
  report.print_summary(_summary(config, task, mesh, phases, workdir))
  changes = [initial.from_model(model, config.init_from)] if model else []
  if config.model.embedding_init and checkpoints.latest() is None:
    changes.append(initial.from_word_vectors(config.model.embedding_init, corpus.tokenizer))
  loop.train(task, config, train_steps, mesh, workdir, checkpoints, changes)
