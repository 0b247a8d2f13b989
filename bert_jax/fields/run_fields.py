"""The fields of every run, with their rules."""

from ml_collections import ConfigDict

from bert_jax.config_fields import (
  HARMLESS,
  SCHEDULE,
  Field,
  Table,
  at_least,
  group,
  one_of,
)
from bert_jax.data.phases import Phases
from bert_jax.errors import require
from bert_jax.model import architectures
from bert_jax.parallel import sharding
from bert_jax.training import lora
from bert_jax.training.lora import LoraConfig
from bert_jax.training.optimizer import OptimizerConfig

# The fields of which one says how long a run is.
LENGTHS = ('train_steps', 'train_epochs', 'train_minutes')


def after_the_last_step(config: ConfigDict, job) -> str:
  """Steps to trace have no effect where the run ends before them."""
  steps = config.profile_steps
  return f'the run has {job.train_steps} steps' if steps and steps[0] > job.train_steps else ''


def without_segments(config: ConfigDict) -> str:
  """The number of segments has no effect on an architecture that has no segments."""
  name = config.model.architecture
  if name not in architectures.ALL or architectures.ALL[name].config.has_segments:
    return ''
  return f'model.architecture={name} has no segments'


def nothing_begins_at_random(config: ConfigDict, job) -> str:
  """The deviation of random parameters has no effect where another model gives every array."""
  whole = job.start and not config.get('reinit_layers') and lora.starts_whole(
      job.task, job.start.params)
  return (f'every array comes from {config.init_from or config.teacher}, and none begins at '
          'random: leave it out') if whole else ''


def without_lora(config: ConfigDict) -> str:
  """The factors of LoRA have no effect in a run that trains all parameters."""
  return '' if config.lora.rank else 'lora.rank=0 trains all parameters'


FIELDS: Table = {
    # pretrain, sequence_classification, token_classification, question_answering, ...
    'task': Field(''),
    'seed': Field(0, at_least(0)),  # of the parameters, the rows, the masks and the dropout
    # Updates; or give train_epochs and 0 here.
    'train_steps': Field(0, at_least(0), SCHEDULE),
    # Passes over the data; not together with train_steps.
    'train_epochs': Field(0.0, at_least(0), SCHEDULE),
    # Minutes of steps, or 0: the run measures its steps, then fixes train_steps. Compilation,
    # evaluations and checkpoints come on top. Phases give the shares of the steps.
    'train_minutes': Field(0.0, at_least(0), SCHEDULE),
    # Optional phases of (steps, max_len, batch_size). Another train_steps scales them; max_len and
    # batch_size replace the values that all phases share.
    'phases': Field((), on_resume=SCHEDULE),
    # Steps between lines of metrics.jsonl.
    'log_every': Field(100, at_least(1), HARMLESS),
    # Needed to resume a run with another schedule (steps, phases, rows, optimizer).
    'allow_schedule_change': Field(False, on_resume=HARMLESS),
    'keep_checkpoints': Field(3, at_least(1), HARMLESS),  # the newest ones that stay
    # Every N steps a checkpoint stays too; 0 = none.
    'keep_every': Field(0, at_least(0), HARMLESS),
    # (first, last) step to trace into tensorboard/, for its profile page.
    'profile_steps': Field((), on_resume=HARMLESS, unused_by_data=(after_the_last_step,)),
    # Who get the metrics too: tensorboard, wandb (pip install wandb).
    'trackers': Field(('tensorboard',), on_resume=HARMLESS),
    # True = write a digest of the rows of every step to metrics.jsonl.
    'log_batch_digest': Field(False, on_resume=HARMLESS),
    # A workdir, checkpoint, Hugging Face folder or hub name whose parameters and vocabulary to
    # start from; a checkpoint of this run wins.
    'init_from': Field('', on_resume=HARMLESS),
    # With init_from: a file of words, one a line, that its vocabulary gains.
    'add_tokens': Field(''),
    # A word2vec text file: the token table starts from its vectors.
    'embedding_init': Field(''),
    # auto, cpu, gpu, tpu; a named one without a device stops the run.
    'platform': Field('auto', on_resume=HARMLESS),
    # Devices on each axis of the mesh; -1 = the rest.
    'mesh.replica': Field(1, on_resume=HARMLESS),
    'mesh.data': Field(-1, on_resume=HARMLESS),
    'mesh.model': Field(1, on_resume=HARMLESS),
    # dp, fsdp, tp, fsdp_tp: how parameters are split (tp with mesh.model=1 is dp).
    'sharding': Field('tp', one_of(sharding.PRESETS), HARMLESS),
    # Processes that make rows; 0 = a thread of this one.
    'data.loader_workers': Field(0, at_least(0), HARMLESS),
    **group('optimizer', OptimizerConfig(), on_resume=SCHEDULE,
            rules={'accumulation': Field(1, on_resume=HARMLESS)}),
    **group('lora', LoraConfig(), {name: Field(None, unused=(without_lora,))
                                   for name in ('alpha', 'targets')}),
}


# The rules of the group `model`.
_ROUNDING = Field(None, on_resume=HARMLESS)
MODEL = {
    'dtype': _ROUNDING, 'attention': _ROUNDING, 'remat': _ROUNDING, 'scan_unroll': _ROUNDING,
    'type_vocab_size': Field(None, unused=(without_segments,)),
    'initializer_range': Field(None, unused_by_data=(nothing_begins_at_random,))}


def phases_of(config: ConfigDict, train_steps: int = 0) -> Phases:
  """The phases of a run; before its steps are known, the phases of the config or one step."""
  planned = sum(phase[0] for phase in config.phases)
  return Phases.create(config.phases, train_steps or config.train_steps or planned or 1,
                       config.max_len, config.batch_size)


def check(config: ConfigDict):
  """Raises UserError for fields that do not fit each other."""
  lengths = [f'{name}={config[name]}' for name in LENGTHS if config[name]]
  require(len(lengths) == 1, f'{", ".join(lengths) or "the run has no length"}: give one of '
                             f'{", ".join(LENGTHS)} and set the others to 0')
  for phase in phases_of(config):
    require(phase.max_len >= 8, f'max_len={phase.max_len} is too short for [CLS] A [SEP] B [SEP]: '
                                'give at least 8')
  OptimizerConfig(**config.optimizer)
  LoraConfig(**config.lora)
  for name in ('embedding_init', 'reinit_layers'):
    require(not (config.lora.rank and config.get(name)),
            f'{name}={config.get(name)} changes parameters that lora.rank={config.lora.rank} '
            'freezes: give one of them')
  require(not config.lora.rank or config.optimizer.name != 'muon',
          'optimizer.name=muon is for the matrices of the layers, which lora.rank='
          f'{config.lora.rank} freezes: use adamw')
