"""The fields of a config with their defaults, and the checks before a run.

A file in `configs/` starts from `pretraining` or `finetuning` and changes the fields of its claim.
Any field can be given on the command line: --config.optimizer.learning_rate=2e-4.
"""

from collections.abc import Sequence
import dataclasses
import difflib
import math
from typing import Any

from flax import traverse_util
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_dict

from bert_jax import errors
from bert_jax.data.pairs import NEGATIVES, SEQUENCES
from bert_jax.data.phases import MOST_STEPS, Phase, Phases
from bert_jax.errors import UserError
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import catalogue
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runtime import host
from bert_jax.tasks import task_list
from bert_jax.training.lora import LoraConfig
from bert_jax.training.optimizer import OptimizerConfig

TASKS = ('pretrain', *task_list.ALL)

# The published sizes: BERT's own (Devlin et al. 2019) and the compact ones of Turc et al. 2019
# (https://arxiv.org/abs/1908.08962): (N, D). All have heads of width 64 and a feed-forward of 4 D.
SIZES = {
    'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'medium': (8, 512),
    'base': (12, 768), 'large': (24, 1024),
}

# The fields of which one says how long a run is.
LENGTHS = ('train_steps', 'train_epochs', 'train_minutes')
# Bounds on whole numbers: the others have 31 bits, as the step has; a seed has 32.
_LARGEST, _LARGEST_SEED = MOST_STEPS, 2**32 - 1
_SMALLEST, _LARGEST_FLOAT = 1e-37, 1e38


def model(size: str | BertConfig) -> ConfigDict:
  """The group `model` of a size: the fields of a `BertConfig`."""
  if isinstance(size, str):
    layers, width = SIZES[size]
    size = BertConfig(num_layers=layers, hidden_size=width, num_heads=width // 64,
                      intermediate_size=4 * width)
  return ConfigDict(dataclasses.asdict(size))


def sizes_of_init_from(group: ConfigDict):
  """Unsets the sizes in the group `model`: the run takes them from `init_from`."""
  for field in ('architecture', 'vocab_size', 'hidden_size', 'num_layers', 'num_heads',
                'intermediate_size', 'max_positions', 'type_vocab_size', 'activation',
                'layer_norm_eps'):
    group[field] = config_dict.placeholder(type(group[field]))


def set_dtype(config: ConfigDict, mesh: Mesh):
  """Replaces model.dtype='auto' by the faster type on the devices of a mesh."""
  if config.model.dtype == 'auto':
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    config.model.dtype = 'float32' if on_cpu else 'bfloat16'


def bert_config(group: ConfigDict) -> BertConfig:
  """The model that the group `model` describes."""
  return architectures.make_config(group)


def _run(task: str) -> ConfigDict:
  """The fields of all tasks."""
  c = ConfigDict()
  c.task = task  # pretrain, sequence_classification, token_classification, question_answering, ...
  c.seed = 0  # of the parameters, the rows, the masks and the dropout
  c.train_steps = 0  # updates; or give train_epochs and 0 here
  c.train_epochs = 0.0  # passes over the data; not together with train_steps
  # Minutes of steps, or 0: the run measures its steps, then fixes train_steps. Compilation,
  # evaluations and checkpoints come on top. Phases give the shares of the steps.
  c.train_minutes = 0.0
  c.batch_size = 32  # rows (pretraining) or examples (fine-tuning) over all devices
  c.max_len = 512  # tokens in a row (pretraining) or an input (fine-tuning), special ones included
  # Optional phases of (steps, max_len, batch_size). Another train_steps scales them; max_len and
  # batch_size replace what all of them share.
  c.phases = ()
  c.log_every = 100  # steps between lines of metrics.jsonl
  c.eval_every = 10_000  # steps between evaluations on held-out data; always one at the end
  c.checkpoint_every = 5_000  # steps between checkpoints; always one at the end
  # Needed if a run goes on with another schedule (steps, phases, rows, optimizer).
  c.allow_schedule_change = False
  c.keep_checkpoints = 3  # the newest ones that stay
  c.keep_every = 0  # checkpoints at multiples of so many steps stay too; 0 = none
  # A score of the evaluations; best/ keeps the checkpoint with the best one, and predict uses it.
  # '' = none.
  c.keep_best = ''
  c.profile_steps = ()  # (first, last) step to trace into tensorboard/, for its profile page
  c.trackers = ('tensorboard',)  # who get the metrics too: tensorboard, wandb (pip install wandb)
  c.log_batch_digest = False  # True = write a digest of the rows of every step to metrics.jsonl
  # A workdir, checkpoint, Hugging Face folder or hub name whose parameters and vocabulary to start
  # from; a checkpoint of this run wins.
  c.init_from = ''
  c.add_tokens = ''  # with init_from: a file of words, one a line, that its vocabulary gains
  c.embedding_init = ''  # a word2vec text file: the token table starts from its vectors
  c.platform = 'auto'  # auto, cpu, gpu, tpu; a named one without a device stops the run
  c.mesh = ConfigDict({'replica': 1, 'data': -1, 'model': 1})  # devices on each axis; -1 = the rest
  c.sharding = 'tp'  # dp, fsdp, tp, fsdp_tp: how parameters are split (tp with mesh.model=1 is dp)
  c.data = ConfigDict({'loader_workers': 0})  # processes that make rows; 0 = a thread of this one
  c.optimizer = ConfigDict(dataclasses.asdict(OptimizerConfig()))
  c.lora = ConfigDict(dataclasses.asdict(LoraConfig()))
  return c


def pretraining(size: str | BertConfig) -> ConfigDict:
  """The paper's recipe: 256 rows, 1M steps, rows of 128 tokens for 90% of them, then 512."""
  c = _run('pretrain')
  c.train_steps = 1_000_000
  c.batch_size = 256
  c.phases = ((900_000, 128, 256), (100_000, 512, 256))
  c.eval_batches = 100  # most batches of an evaluation; 0 = every held-out row
  # mlm_nsp, mlm_sop, mlm, replaced_tokens, replaced_tokens_gdes, distillation; '' = the one of
  # data.sequences, or ELECTRA's.
  c.objective = ''
  c.teacher = ''  # of distillation: a model, as init_from
  c.model = model(size)
  # builtin, a glob of text files, tfds:NAME, a folder of `prepare`, or several of these with their
  # shares of the rows: 'wiki/*.gz=0.7,books/*.gz=0.3'; 'a=0.7:0.3,b=0.3:0.7' change over the run.
  c.data.source = 'builtin'
  c.data.sequences = 'next_sentence'  # or sentence_order (ALBERT), full_sentences (RoBERTa)
  # False next sentences: from any other_document, of similar_style (marks, capitals, digits), or
  # from the same_document where it has one about as long.
  c.data.negatives = NEGATIVES[0]
  c.data.pack = True  # up to 8 pairs in a row, isolated from each other; False = one
  c.data.vocab = ''  # vocab.txt or a SentencePiece .model; '' = train one from the corpus
  # How text becomes tokens; folders of `prepare` know this already.
  c.data.format = 'auto'  # text (a blank line between documents), jsonl, wikitext; auto = by name
  c.data.text_column = 'text'  # of JSON objects or a tfds data set
  c.data.language = 'en'  # for splitting into sentences (ISO 639); words too in zh
  c.data.lines_are_sentences = False  # True = the text is split already
  c.data.tokenizer = 'wordpiece'  # to train: wordpiece, sentencepiece, bpe (of bytes)
  c.data.lowercase = True  # lower-case the text and strip its accents (WordPiece alone strips)
  c.data.words = 0  # only the first so many words of the source, split at white space; 0 = all
  c.data.heldout = 0.02  # fraction of the documents for evaluation (10,000 at most)
  c.masking = ConfigDict(dataclasses.asdict(MaskingConfig()))
  return c.lock()


def finetuning(task: str) -> ConfigDict:
  """The paper's recipe: lr 5e-5, 3e-5 or 2e-5, batches of 16 or 32, 2 to 4 epochs (its A.3)."""
  c = _run(task)
  c.train_epochs = 3.0
  c.max_len = 128
  c.log_every = 10
  c.eval_every = c.checkpoint_every = 0  # 0 = after every epoch
  c.keep_checkpoints = 1
  c.model = model('base')
  sizes_of_init_from(c.model)
  c.model.scan_unroll = 12  # faster steps for a few seconds more of compilation
  c.reinit_layers = 0  # top layers (and the pooler) that start fresh (Zhang et al. 2021)
  c.optimizer.learning_rate = 3e-5
  c.optimizer.warmup_steps, c.optimizer.warmup_ratio = 0, 0.1
  # Factor on the rate from each layer to the one below; 1 = the same rate for all layers (Clark
  # et al. 2020: 0.8 for base, 0.9 for large).
  c.optimizer.layer_decay = 1.0
  c.optimizer.frozen_layers = -1  # -1 = none, 0 = the embeddings, n = these and the first n layers
  d = c.data
  d.train = ''  # file, or tfds:NAME[@SPLIT]
  d.eval = ''  # files, comma-separated, the scores of all but the first under their names
  d.test = ''  # file that is predicted at the end, into WORKDIR/predictions
  d.eval_fields = ()  # fields of this group that are other in data.eval: text_column=sentence
  d.format = 'auto'  # by the file's name
  d.text_column, d.text_pair_column, d.label_column = 'text', '', 'label'
  c.keep_best = task_list.ALL[task].best_score
  task_list.ALL[task].set_fields(c)
  return c.lock()


def flat(config: ConfigDict) -> dict[str, Any]:
  """The value of every field under its full name: optimizer.learning_rate."""
  return traverse_util.flatten_dict(config.to_dict(), sep='.')


def check_overrides(config: ConfigDict, arguments: list[str]):
  """Raises UserError for a --config.FIELD of the command line that `config` does not have."""
  fields = list(flat(config))
  for argument in arguments:
    name = argument.lstrip('-').partition('=')[0]
    name = name.removeprefix('noconfig.').removeprefix('config.')
    if not argument.lstrip('-').startswith(('config.', 'noconfig.')) or name in fields:
      continue
    if any(field.startswith(name + '.') for field in fields):
      raise UserError(f'--config.{name} is a group: give one of its fields, --config.{name}.FIELD')
    nearest = max(fields, key=lambda field: sum(_likeness(name, field)))
    of_field, of_group = _likeness(name, nearest)
    group = name.rpartition('.')[0]
    known = [field for field in fields if group and field.startswith(group + '.')] or fields
    is_near = of_field >= (0.6 if of_group >= 0.1 or not group else 0.8)
    hint = f'did you mean --config.{nearest}?' if is_near else f'known are {", ".join(known)}'
    raise UserError(f'unknown config field --config.{name}: {hint}')


def _likeness(name: str, field: str) -> tuple[float, float]:
  """How well a name on the command line fits a field: in the last part, in the group (0 to 0.2).

  Words or initials stand for a longer name of the same group: heads for num_heads, lr for
  learning_rate. A field of another group is meant only if its last part fits better.
  """
  like = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
  (group, _, end), (of_group, _, of_field) = name.rpartition('.'), field.rpartition('.')
  ends, groups, words = like(end, of_field), like(group, of_group), of_field.split('_')
  is_short = set(end.split('_')) <= set(words) or end == ''.join(word[0] for word in words)
  if is_short and (groups >= 0.5 or not group):
    ends = max(ends, 0.75 + 0.2 * ends)
  return ends, 0.2 * groups


def check(config: ConfigDict):
  """Raises UserError for a value that no run can have."""
  errors.require_choice('task', config.task, TASKS)
  own = pretraining('base') if config.task == 'pretrain' else finetuning(config.task)
  others = set(own.data) ^ set(config.data)
  if others:
    raise UserError(f'task={config.task} does not fit this config (data.{min(others)} is for '
                    'another task): give the --config of this task')
  for name, value in flat(config).items():
    if isinstance(value, float):
      errors.require(math.isfinite(value), f'{name}={value} must be a finite number')
      errors.require(not value or _SMALLEST <= abs(value) <= _LARGEST_FLOAT, f'{name}={value} must '
                     f'have a size from {_SMALLEST} to {_LARGEST_FLOAT}, as float32 has it')
    if isinstance(value, int) or name in LENGTHS:
      largest = _LARGEST_SEED if name == 'seed' else _LARGEST
      errors.require(value <= largest, f'{name}={value} must be at most {largest}')
  _check_at_least(1, config, ('batch_size', 'max_len', 'log_every', 'keep_checkpoints'))
  _check_at_least(0, config, (*LENGTHS, 'seed', 'eval_every', 'checkpoint_every', 'keep_every'))
  lengths = [f'{name}={config[name]}' for name in LENGTHS if config[name]]
  errors.require(len(lengths) == 1,
                 f'{", ".join(lengths) or "the run has no length"}: give one of '
                 f'{", ".join(LENGTHS)} and set the others to 0')
  for phase in phases_of(config):
    errors.require(phase.max_len >= 8, f'max_len={phase.max_len} is too short for [CLS] A [SEP] B '
                                       '[SEP]: give at least 8')
  _check_at_least(0, config.data, ('loader_workers',), group='data.')
  _check_lora(config)
  (_check_pretraining if config.task == 'pretrain' else _check_finetuning)(config)


def _check_lora(config: ConfigDict):
  LoraConfig(**config.lora)
  for name in ('embedding_init', 'reinit_layers'):
    errors.require(not (config.lora.rank and config.get(name)),
                   f'{name}={config.get(name)} changes parameters that lora.rank='
                   f'{config.lora.rank} freezes: give one of them')
  errors.require(not config.lora.rank or config.optimizer.name != 'muon',
                 'optimizer.name=muon is for the matrices of the layers, which lora.rank='
                 f'{config.lora.rank} freezes: use adamw')


def _check_at_least(least: int, fields: ConfigDict, names: Sequence[str], group: str = ''):
  rule = f'must be at least {least}' if least else 'must not be negative'
  errors.require_each(fields, names, lambda value: value >= least, rule, group)


def _check_pretraining(config: ConfigDict):
  MaskingConfig(**config.masking)
  _check_at_least(1, config, ('eval_every', 'checkpoint_every'))
  _check_at_least(0, config, ('eval_batches',))
  _check_at_least(0, config.data, ('words',), group='data.')
  if config.train_epochs and config.phases:
    raise UserError('phases are shares of the steps: give train_steps or train_minutes with them, '
                    'not train_epochs')
  errors.require_choice('data.sequences', config.data.sequences, SEQUENCES)
  errors.require_choice('data.negatives', config.data.negatives, NEGATIVES)
  name = catalogue.name_of(config.objective, config.data.sequences,
                           config.model.architecture or 'bert')
  if (name == 'distillation') != bool(config.teacher):
    raise UserError(f'objective={config.objective!r} and teacher={config.teacher!r}: distillation '
                    'needs the folder of a teacher, other objectives have none')
  errors.require_each(config.data, ('heldout',), lambda share: 0 <= share < 1,
                      'must lie in [0, 1)', 'data.')


def _check_finetuning(config: ConfigDict):
  _check_at_least(0, config, ('reinit_layers',))
  if config.phases:
    raise UserError(f'phases={tuple(config.phases)} are for pretraining: rows of a fine-tuning run '
                    'are as long as its examples')
  if not config.data.train:
    raise UserError('data.train is not set: give the file to train on')
  task_list.ALL[config.task].check(config)


def phases_of(config: ConfigDict, train_steps: int = 0) -> Phases:
  """The phases of a run; before its length is counted in steps, those of the config or one step."""
  planned = sum(phase[0] for phase in config.phases)
  return Phases.create(config.phases, train_steps or config.train_steps or planned or 1,
                       config.max_len, config.batch_size)


def check_sizes(config: ConfigDict, mesh: Mesh):
  """Raises UserError for fields that do not fit the mesh, or the model, whose sizes are known now.
  """
  bert = bert_config(config.model)
  counts_layers = {'optimizer.layer_decay': config.optimizer.layer_decay != 1,
                   'optimizer.frozen_layers': config.optimizer.frozen_layers > 0,
                   'reinit_layers': config.get('reinit_layers', 0) > 0}
  for name, counts in counts_layers.items():
    errors.require(not counts or bert.stacked_layers == bert.num_layers,
                   f'{name} counts layers of one kind with parameters of their own: '
                   f'model.architecture={bert.architecture} has others')
  trains_generator = config.task == 'pretrain' and catalogue.name_of(
      config.objective, config.data.sequences, bert.architecture).startswith('replaced_tokens')
  for name, default in (('layer_decay', 1.0), ('frozen_layers', -1)):
    errors.require(not trains_generator or config.optimizer[name] == default,
                   f'optimizer.{name}={config.optimizer[name]} counts the layers of one model: '
                   'this run trains a generator beside it')
  fresh, frozen = config.get('reinit_layers', 0), max(config.optimizer.frozen_layers, 0)
  errors.require(fresh <= config.model.num_layers, f'reinit_layers={fresh} is above '
                 f'model.num_layers={config.model.num_layers}')
  errors.require(not fresh or frozen + fresh <= config.model.num_layers,
                 f'reinit_layers={fresh} and optimizer.frozen_layers='
                 f'{config.optimizer.frozen_layers}: a layer that starts fresh would stay as it is')
  if config.optimizer.frozen_layers > config.model.num_layers:
    raise UserError(f'optimizer.frozen_layers={config.optimizer.frozen_layers} is above '
                    f'model.num_layers={config.model.num_layers}')
  for phase in phases_of(config):
    if phase.max_len > config.model.max_positions:
      raise UserError(f'max_len={phase.max_len} is above model.max_positions='
                      f'{config.model.max_positions}: the position table has no row for it')
    mesh_lib.check_fits(mesh, phase.batch_size, config.optimizer.accumulation,
                        config.model.num_heads)
    if config.task == 'pretrain':
      _check_memory(config, mesh, phase)


def _check_memory(config: ConfigDict, mesh: Mesh, phase: Phase):
  """Raises UserError for rows beyond the memory of this machine: the kernel would kill the run."""
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  tokens = phase.batch_size * phase.max_len // jax.process_count()
  # The least there is: four numbers of 4 bytes a token, and on a CPU its embedding in 2 bytes each.
  need = tokens * (16 + on_cpu * 2 * config.model.hidden_size)
  errors.require(need <= host.memory(), f'batch_size={phase.batch_size} of max_len={phase.max_len} '
                 f'needs more than {need / 2**30:,.0f} GiB here, this machine has '
                 f'{host.memory() / 2**30:,.0f}: make one of them smaller')
