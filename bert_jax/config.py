"""Builds the configs of runs from `fields/`, and checks them before a run.

A file in `configs/` starts from `pretraining` or `finetuning` and sets the fields of its
recipe. The command line may override any field: --config.optimizer.learning_rate=2e-4.
"""

from collections.abc import Collection
import dataclasses
import difflib
import math
from typing import Any

from flax import traverse_util
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_dict

from bert_jax import config_fields
from bert_jax.config_fields import Field, Table, one_of
from bert_jax.data.late_inputs import HIDING
from bert_jax.data.phases import MOST_STEPS, Phase
from bert_jax.errors import UserError, require, require_choice
from bert_jax.fields import finetuning_fields, pretraining_fields, run_fields
from bert_jax.fields.run_fields import LENGTHS, phases_of
from bert_jax.model import architectures, attention_kernels
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import objectives
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import host, platforms
from bert_jax.tasks import task_list
from bert_jax.training.job import Job

TASKS = ('pretrain', *task_list.ALL)

# {size: (number of layers N, width D)}: the published sizes of BERT (Devlin et al. 2019)
# and of compact models (Turc et al. 2019, https://arxiv.org/abs/1908.08962). All have
# heads of width 64 and a feed-forward width of 4 D.
SIZES = {
    'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'medium': (8, 512),
    'base': (12, 768), 'large': (24, 1024),
}

# Upper bounds of whole numbers: 31 bits, as the step counter has; 32 bits for a seed.
_LARGEST, _LARGEST_SEED = MOST_STEPS, 2**32 - 1
_SMALLEST, _LARGEST_FLOAT = 1e-37, 1e38


def model(size: str | BertConfig) -> ConfigDict:
  """The config group `model` for a name in SIZES, or for a `BertConfig`."""
  if isinstance(size, str):
    layers, width = SIZES[size]
    size = BertConfig(num_layers=layers, hidden_size=width, num_heads=width // 64,
                      intermediate_size=4 * width)
  return ConfigDict(dataclasses.asdict(size))


def unset_sizes(group: ConfigDict):
  """Unsets the sizes in the group `model`: the run takes them from `init_from`."""
  for field in ('architecture', 'vocab_size', 'hidden_size', 'num_layers', 'num_heads',
                'intermediate_size', 'max_positions', 'type_vocab_size', 'activation',
                'layer_norm_eps'):
    group[field] = config_dict.placeholder(type(group[field]))


def dtype_on(config: ConfigDict, mesh: Mesh) -> dict[str, Any]:
  """Resolves model.dtype=auto to the faster dtype on the mesh; returns {field: value}."""
  if config.model.dtype != 'auto':
    return {}
  return {'model.dtype': platforms.fast_dtype(mesh.devices.flat[0].platform)}


def special_rows(config: ConfigDict) -> str:
  """Returns a property of a run's rows that few attention kernels support; '' = none."""
  if config.task == 'pretrain':
    return attention_kernels.CAUSAL if config.masking.causal_rows else ''
  return attention_kernels.HIDDEN if config.data.get('query_expansion') in HIDING else ''


def fields(task: str, size: str | BertConfig = 'base') -> Table:
  """All fields of a task and their rules, by full name, for a model of a given size."""
  kind = pretraining_fields if task == 'pretrain' else finetuning_fields
  table = kind.FIELDS if task == 'pretrain' else kind.fields(task)
  values = architectures.make_config(model(size))
  return {**table, 'task': Field(task, one_of(TASKS)),
          **config_fields.group('model', values, {**run_fields.MODEL, **kind.MODEL})}


def _defaults(table: Table) -> ConfigDict:
  values = {name: field.default for name, field in table.items()}
  return ConfigDict(traverse_util.unflatten_dict(values, sep='.'))


def pretraining(size: str | BertConfig) -> ConfigDict:
  """The default config, as published: 1M steps of 256 rows, 90% of 128 tokens, then 512."""
  return _defaults(fields('pretrain', size)).lock()


def finetuning(task: str) -> ConfigDict:
  """The default config of a fine-tuning task (Devlin et al. 2019, appendix A.3)."""
  c = _defaults(fields(task))
  unset_sizes(c.model)
  return c.lock()


def flat(config: ConfigDict) -> dict[str, Any]:
  """The value of every field under its full name: optimizer.learning_rate."""
  return traverse_util.flatten_dict(config.to_dict(), sep='.')


def check_overrides(config: ConfigDict, arguments: list[str]):
  """Raises UserError for a --config.FIELD in `arguments` that `config` does not have."""
  fields = list(flat(config))
  for argument in arguments:
    name = argument.lstrip('-').partition('=')[0].removeprefix('no')
    if not name.startswith('config.') or (name := name.removeprefix('config.')) in fields:
      continue
    require(not any(field.startswith(name + '.') for field in fields),
            f'--config.{name} is a group: give one of its fields, --config.{name}.FIELD')
    nearest = max(fields, key=lambda field: sum(_likeness(name, field)))
    of_field, of_group = _likeness(name, nearest)
    group = name.rpartition('.')[0]
    in_group = [field for field in fields if group and field.startswith(group + '.')]
    # A wrong suggestion is worse than a list, so another group needs a closer match.
    is_near = of_field >= (0.6 if of_group >= 0.1 or not group else 0.8)
    hint = (f'did you mean --config.{nearest}?' if is_near
            else f'known are {", ".join(in_group or fields)}')
    raise UserError(f'unknown config field --config.{name}: {hint}')


def _likeness(name: str, field: str) -> tuple[float, float]:
  """How well a typed name matches a field: (last part, 0 to 1; group, 0 to 0.2).

  Words or initials match a longer name in the same group: heads for num_heads, lr for
  learning_rate. The small weight of the group lets a better last part win.
  """
  like = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
  (group, _, end), (of_group, _, of_field) = name.rpartition('.'), field.rpartition('.')
  ends, groups, words = like(end, of_field), like(group, of_group), of_field.split('_')
  is_short = (set(end.split('_')) <= set(words)
              or end == ''.join(word[0] for word in words))
  if is_short and (groups >= 0.5 or not group):
    ends = max(ends, 0.75 + 0.2 * ends)
  return ends, 0.2 * groups


def check_names(config: ConfigDict):
  """Raises UserError if a config has other fields than the configs of its task.

  The group `model` has the fields of its architecture.
  """
  require_choice('task', config.get('task'), TASKS)
  wrong = {name for name in fields(config.task).keys() ^ flat(config).keys()
           if not name.startswith('model.')}
  # --config.task on the config of another task leaves fields of that task.
  others = [name for name in wrong if name.startswith('data.')]
  require(not others,
          f'task={config.task} does not fit this config (only one of them has the field '
          f'{min(others, default="")}): give the --config of this task')
  require(not wrong,
          f'only one of this config and the configs of task={config.task} has the field '
          f'{min(wrong, default="")}: start from bert_jax.config.pretraining or finetuning')


def check_values(config: ConfigDict):
  """Raises UserError for a value that its field cannot have in any run."""
  check_names(config)
  table = fields(config.task)
  for name, value in flat(config).items():
    if isinstance(value, float):
      require(math.isfinite(value), f'{name}={value} must be a finite number')
      # Far beyond these bounds float32 rounds to 0 or infinity.
      require(not value or _SMALLEST <= abs(value) <= _LARGEST_FLOAT,
              f'{name}={value} must have a magnitude from {_SMALLEST} to '
              f'{_LARGEST_FLOAT}, the range of float32')
    if isinstance(value, int) or name in LENGTHS:
      largest = _LARGEST_SEED if name == 'seed' else _LARGEST
      require(value <= largest, f'{name}={value} must be at most {largest}')
    # The table has BERT's fields of `model`; another architecture may have more.
    if name in table:
      table[name].check(name, value)


def check(config: ConfigDict, given: Collection[str] = ()):
  """Runs all checks that need neither the devices nor the data of a run.

  Args:
    config: the config of a run.
    given: the fields of the command line.

  Raises:
    UserError: no run can have these values, alone or together, or a field in `given` has
      no effect.
  """
  check_values(config)
  run_fields.check(config)
  (pretraining_fields if config.task == 'pretrain' else finetuning_fields).check(config)
  check_effects(config, given)


def check_effects(config: ConfigDict, given: Collection[str], job: Job | None = None):
  """Raises UserError for a field of the command line that has no effect in a run.

  A config file may have fields without effect, because it serves many runs. `unused` and
  `unused_by_data` in the table of the fields say when a field has no effect.

  Args:
    config: the config of the run.
    given: the fields of the command line.
    job: the job of the run, to apply the rules that depend on the data; None = apply the
      other rules.
  """
  architecture = config.model.architecture
  own = architectures.ALL.get(architecture)
  table = fields(config.task, own.config() if own else 'base')
  # The group `model` may have fields that only another architecture uses.
  if own and not job:
    for name in given:
      require(not name.startswith('model.') or name in table,
              f'--config.{name} has no effect here: model.architecture={architecture} '
              'has no such field')
  for name in given:
    reason = _unused(table[name], config, job) if name in table else ''
    require(not reason, f'--config.{name} has no effect here: {reason}')


def _unused(field: Field, config: ConfigDict, job: Job | None) -> str:
  """The reason why a field has no effect; '' = it has an effect."""
  rules = field.unused_by_data if job else field.unused
  try:
    return next(filter(None, (
        rule(config, job) if job else rule(config) for rule in rules)), '')
  except UserError:  # an unreadable file: its reader reports it later
    return ''


def check_sizes(config: ConfigDict, mesh: Mesh):
  """Raises UserError for fields that do not fit the mesh or the sizes of the model."""
  bert = architectures.make_config(config.model)
  counts_layers = {'optimizer.layer_decay': config.optimizer.layer_decay != 1,
                   'optimizer.frozen_layers': config.optimizer.frozen_layers > 0,
                   'reinit_layers': config.get('reinit_layers', 0) > 0}
  for name, counts in counts_layers.items():
    require(not counts or bert.stacked_layers == bert.num_layers,
            f'{name} counts layers of one kind, each with its own parameters: '
            f'model.architecture={bert.architecture} has other layers')
  # ELECTRA has two stacks of layers, and these fields do not say which one they count.
  trains_generator = config.task == 'pretrain' and objectives.name_of(
      config.objective, config.data.sequences, bert.architecture
  ).startswith('replaced_tokens')
  for name, default in (('layer_decay', 1.0), ('frozen_layers', -1)):
    require(not trains_generator or config.optimizer[name] == default,
            f'optimizer.{name}={config.optimizer[name]} counts the layers of one model: '
            'this run also trains a generator')
  fresh, frozen = config.get('reinit_layers', 0), max(config.optimizer.frozen_layers, 0)
  require(fresh <= config.model.num_layers, f'reinit_layers={fresh} is above '
          f'model.num_layers={config.model.num_layers}')
  # Top layers start fresh and bottom layers are frozen: the two must not overlap.
  require(not fresh or frozen + fresh <= config.model.num_layers,
          f'reinit_layers={fresh} and optimizer.frozen_layers='
          f'{config.optimizer.frozen_layers}: a layer with fresh parameters would be '
          'frozen')
  require(config.optimizer.frozen_layers <= config.model.num_layers,
          f'optimizer.frozen_layers={config.optimizer.frozen_layers} is above '
          f'model.num_layers={config.model.num_layers}')
  for phase in phases_of(config):
    require(phase.max_len <= config.model.max_positions,
            f'max_len={phase.max_len} is above model.max_positions='
            f'{config.model.max_positions}: the model reads no longer rows')
    mesh_lib.check_fits(mesh, phase.batch_size, config.optimizer.accumulation,
                        config.model.num_heads)
    if config.task == 'pretrain':
      _check_memory(config, mesh, phase)


def _check_memory(config: ConfigDict, mesh: Mesh, phase: Phase):
  """Raises UserError for rows that exceed host memory: the kernel would kill the run."""
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  tokens = phase.batch_size * phase.max_len // jax.process_count()
  # A lower bound: four numbers of 4 bytes for each token, and on a CPU also its embedding
  # with at least 2 bytes per entry. Only one microbatch at a time has embeddings.
  need = tokens * (16 + on_cpu * 2 * config.model.hidden_size
                   // config.optimizer.accumulation)
  require(need <= host.memory(),
          f'batch_size={phase.batch_size} of max_len={phase.max_len} needs more than '
          f'{need / 2**30:,.0f} GiB here, this machine has '
          f'{host.memory() / 2**30:,.0f}: make one of them smaller')
