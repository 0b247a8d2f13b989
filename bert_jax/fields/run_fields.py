"""The fields of every run and their rules."""

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

# Exactly one of these fields gives the length of a run.
LENGTHS = ('train_steps', 'train_epochs', 'train_minutes')


def after_the_last_step(config: ConfigDict, job) -> str:
  """Steps to trace have no effect if the run ends before them."""
  steps = config.profile_steps
  return (f'the run has {job.train_steps} steps'
          if steps and steps[0] > job.train_steps else '')


def without_segments(config: ConfigDict) -> str:
  """The number of segments has no effect on an architecture without segments."""
  name = config.model.architecture
  if name not in architectures.ALL or architectures.ALL[name].config.has_segments:
    return ''
  return f'model.architecture={name} has no segments'


def without_convolution(config: ConfigDict) -> str:
  """The activation of DeBERTa's convolution has no effect without a convolution."""
  is_off = config.model.get('conv_kernel_size', 1) == 0
  return 'model.conv_kernel_size=0 leaves out the convolution' if is_off else ''


def nothing_begins_at_random(config: ConfigDict, job) -> str:
  """The initializer range has no effect if every array comes from another model."""
  whole = job.start and not config.get('reinit_layers') and lora.starts_whole(
      job.task, job.start.params)
  return (f'every array comes from {config.init_from or config.teacher}, and none starts '
          'from random values: leave it out') if whole else ''


def without_lora(config: ConfigDict) -> str:
  """Fields of LoRA have no effect in a run that trains all parameters."""
  return '' if config.lora.rank else 'lora.rank=0 trains all parameters'


def without_tp(config: ConfigDict) -> str:
  """mesh.model has no effect without tp: its devices would all do the same work."""
  repeats = config.mesh.model != 1 and 'tp' not in config.sharding
  return (f'sharding={config.sharding} splits nothing over mesh.model, so its devices would '
          'all do the same work: give sharding=tp or fsdp_tp') if repeats else ''


def frozen_by_lora(config: ConfigDict) -> str:
  """frozen_layers=0 has no effect with LoRA, which freezes the embeddings too."""
  return (f'lora.rank={config.lora.rank} freezes the embeddings already'
          if config.lora.rank and config.optimizer.frozen_layers == 0 else '')


FIELDS: Table = {
    # pretrain, sequence_classification, token_classification, question_answering, ...
    'task': Field(''),
    # The random seed of the parameters, the rows, the masks and the dropout.
    'seed': Field(0, at_least(0)),
    # Optimizer steps; 0 = set by train_epochs or train_minutes.
    'train_steps': Field(0, at_least(0), SCHEDULE),
    # Passes over the data; 0 = another field gives the length.
    'train_epochs': Field(0.0, at_least(0), SCHEDULE),
    # Minutes for the steps, without compilation, evaluations and checkpoints; 0 = another
    # field gives the length. The run times some steps and then fixes train_steps. Phases
    # are shares of the steps.
    'train_minutes': Field(0.0, at_least(0), SCHEDULE),
    # Optional phases of (steps, max_len, batch_size). They scale to train_steps. On the
    # command line, max_len or batch_size replaces a value that all phases share.
    'phases': Field((), on_resume=SCHEDULE),
    # Steps between lines of metrics.jsonl.
    'log_every': Field(100, at_least(1), HARMLESS),
    # Needed to resume a run with another schedule (steps, phases, rows, optimizer).
    'allow_schedule_change': Field(False, on_resume=HARMLESS),
    # Number of the newest checkpoints to keep.
    'keep_checkpoints': Field(3, at_least(1), HARMLESS),
    # Also keep the checkpoint of every Nth step; N is a multiple of checkpoint_every; 0 =
    # none.
    'keep_every': Field(0, at_least(0), HARMLESS),
    # (first, last) step to trace into tensorboard/, for its profile page.
    'profile_steps': Field((), on_resume=HARMLESS, unused_by_data=(after_the_last_step,)),
    # Where metrics go in addition to metrics.jsonl: tensorboard, wandb (pip install
    # wandb).
    'trackers': Field(('tensorboard',), on_resume=HARMLESS),
    # True = write a digest of the rows of every step to metrics.jsonl.
    'log_batch_digest': Field(False, on_resume=HARMLESS),
    # Start from the parameters and the vocabulary of this model: a workdir, a checkpoint,
    # a Hugging Face folder or hub name. A checkpoint of this run takes precedence.
    'init_from': Field('', on_resume=HARMLESS),
    # A file of words, one per line, to add to the vocabulary of init_from.
    'add_tokens': Field(''),
    # A word2vec text file with initial vectors for the token table.
    'embedding_init': Field(''),
    # auto, cpu, gpu, tpu; a named platform without a device stops the run.
    'platform': Field('auto', on_resume=HARMLESS),
    # Groups of devices that each hold all parameters and read their share of the rows.
    'mesh.replica': Field(1, on_resume=HARMLESS),
    # Devices of a group that share the rows, and with fsdp the parameters; -1 = all others.
    'mesh.data': Field(-1, on_resume=HARMLESS),
    # Devices that share each layer, with tp.
    'mesh.model': Field(1, on_resume=HARMLESS, unused=(without_tp,)),
    # How to shard parameters: dp, fsdp, tp, fsdp_tp (tp with mesh.model=1 is dp).
    'sharding': Field('tp', one_of(sharding.PRESETS), HARMLESS),
    # Processes that build rows; 0 = a thread of the main process.
    'data.loader_workers': Field(0, at_least(0), HARMLESS),
    **group('optimizer', OptimizerConfig(), on_resume=SCHEDULE,
            rules={'accumulation': Field(1, on_resume=HARMLESS),
                   'frozen_layers': Field(-1, on_resume=SCHEDULE, unused=(frozen_by_lora,))}),
    **group('lora', LoraConfig(), dict.fromkeys(
        ('alpha', 'targets'), Field(None, unused=(without_lora,)))),
}


# The rules of the group `model`. Fields that only change the rounding are harmless.
_ROUNDING = Field(None, on_resume=HARMLESS)
MODEL = {
    'dtype': _ROUNDING,
    'attention': _ROUNDING,
    'remat': _ROUNDING,
    'scan_unroll': _ROUNDING,
    'type_vocab_size': Field(None, unused=(without_segments,)),
    'conv_act': Field(None, unused=(without_convolution,)),
    'initializer_range': Field(None, unused_by_data=(nothing_begins_at_random,))
}


def phases_of(config: ConfigDict, train_steps: int = 0) -> Phases:
  """The phases of a run; while its steps are unknown, the config's phases or one step."""
  planned = sum(phase[0] for phase in config.phases)
  return Phases.create(config.phases, train_steps or config.train_steps or planned or 1,
                       config.max_len, config.batch_size)


def check_kept(config: ConfigDict):
  """Raises UserError if keep_every keeps steps at which no checkpoint is saved."""
  every = config.checkpoint_every  # 0 = every epoch: its steps are not yet known
  require(not every or config.keep_every % every == 0,
          f'keep_every={config.keep_every} is not a multiple of checkpoint_every={every}: '
          f'only checkpoints that are saved can be kept. Give keep_every={every}, or '
          'another multiple')


def check(config: ConfigDict):
  """Raises UserError for fields that contradict each other."""
  lengths = [f'{name}={config[name]}' for name in LENGTHS if config[name]]
  require(len(lengths) == 1,
          f'{", ".join(lengths) or "the run has no length"}: give one of '
          f'{", ".join(LENGTHS)} and set the others to 0')
  for phase in phases_of(config):
    require(phase.max_len >= 8, f'max_len={phase.max_len} is too short for '
                                '[CLS] A [SEP] B [SEP]: give at least 8')
  check_kept(config)
  # The constructors check the fields of their groups.
  OptimizerConfig(**config.optimizer)
  LoraConfig(**config.lora)
  for name in ('embedding_init', 'reinit_layers'):
    require(not (config.lora.rank and config.get(name)),
            f'{name}={config.get(name)} changes parameters that '
            f'lora.rank={config.lora.rank} freezes: give one of them')
  name = config.optimizer.name
  require(not config.lora.rank or name not in ('muon', 'normuon'),
          f'optimizer.name={name} is for the matrices of the layers, which lora.rank='
          f'{config.lora.rank} freezes: use adamw')
