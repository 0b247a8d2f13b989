"""The fields that every config has, with their defaults, and the checks before a run.

A file in `configs/` starts from one of the functions here and changes what its claim needs.
Any field can be given on the command line: --config.optimizer.learning_rate=2e-4.
"""

import dataclasses
import difflib

from ml_collections import ConfigDict

from bert_jax.data.phases import Phases
from bert_jax.data.windows import SEQUENCES
from bert_jax.errors import UserError
from bert_jax.model.config import BertConfig
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.training.optimizer import OptimizerConfig

TASKS = ('pretrain',)

# The published sizes: BERT's own (Devlin et al. 2019) and the compact ones of Turc et al. 2019
# (https://arxiv.org/abs/1908.08962). The width of a head is 64 in all, the feed-forward 4 D wide.
SIZES = {
    'tiny': (2, 128), 'mini': (4, 256), 'small': (4, 512), 'medium': (8, 512),
    'base': (12, 768), 'large': (24, 1024),
}


def model(size: str) -> ConfigDict:
  """The group `model` of a published size: the fields of `BertConfig`, each commented there.

  And two that say how its token table begins.
  """
  layers, width = SIZES[size]
  c = ConfigDict(dataclasses.asdict(BertConfig(
      num_layers=layers, hidden_size=width, num_heads=width // 64, intermediate_size=4 * width)))
  c.add_tokens = ''  # with init_from: a file of words, one a line, that its vocabulary gains
  c.embedding_init = ''  # a word2vec text file: the token table starts from its vectors
  return c


def bert_config(group: ConfigDict) -> BertConfig:
  """The BertConfig of the group `model`."""
  return BertConfig(**{field.name: group[field.name] for field in dataclasses.fields(BertConfig)})


def pretraining(size: str) -> ConfigDict:
  """The paper's recipe: 256 rows, 1M steps, rows of 128 tokens for 90% of them, then 512."""
  c = ConfigDict()
  c.task = 'pretrain'
  c.seed = 0  # of the parameters, the rows, the masks and the dropout
  c.train_steps = 1_000_000  # updates; or give train_epochs and 0 here
  c.train_epochs = 0.0  # passes over the corpus; not together with train_steps
  c.batch_size = 256  # rows over all devices
  c.max_len = 512  # tokens in a row, special tokens included
  # Optional phases of (steps, max_len, batch_size) that sum to train_steps; () = one phase of
  # max_len and batch_size.
  c.phases = ((900_000, 128, 256), (100_000, 512, 256))
  c.log_every = 100  # steps between lines of metrics.jsonl
  c.eval_every = 10_000  # steps between evaluations on held-out rows; always one at the end
  c.eval_batches = 100  # most batches of an evaluation; 0 = every held-out row
  c.checkpoint_every = 5_000  # steps between checkpoints; always one at the end
  c.keep_checkpoints = 3  # the newest ones that stay
  c.log_batch_digest = False  # True = metrics.jsonl has a digest of the rows of every step
  # A workdir, checkpoint, Hugging Face folder or hub name whose parameters and vocabulary to start
  # from; a checkpoint of this run wins.
  c.init_from = ''
  c.platform = 'auto'  # auto, cpu, gpu, tpu: a named one that is not there stops the run
  c.mesh = ConfigDict({'replica': 1, 'data': -1, 'model': 1})  # devices on each axis; -1 = the rest
  c.sharding = 'tp'  # dp, fsdp, tp, fsdp_tp: how parameters are split (tp with mesh.model=1 is dp)
  c.model = model(size)
  c.data = ConfigDict()
  c.data.source = 'builtin'  # builtin, a glob of text files, tfds:NAME, or a folder of `prepare`
  c.data.sequences = 'next_sentence'  # or sentence_order (ALBERT), full_sentences (RoBERTa)
  c.data.pack = True  # up to 8 pairs in a row, isolated from each other; False = one
  c.data.loader_workers = 0  # processes that make rows; 0 = a thread of this one
  c.data.vocab = ''  # vocab.txt or a SentencePiece .model; '' = train one from the corpus
  # How text becomes tokens; folders of `prepare` know this already.
  c.data.format = 'auto'  # text (a blank line between documents), jsonl, wikitext; auto = by name
  c.data.text_column = 'text'  # of JSON objects or a tfds data set
  c.data.language = 'en'  # for splitting into sentences (ISO 639); words too in zh
  c.data.lines_are_sentences = False  # True = the text is split already
  c.data.tokenizer = 'wordpiece'  # what to train: wordpiece or sentencepiece
  c.data.lowercase = True  # lower-case the text and strip its accents (WordPiece)
  c.data.heldout = 0.02  # share of the documents that is kept for evaluation (10,000 at most)
  c.masking = ConfigDict(dataclasses.asdict(MaskingConfig()))
  c.optimizer = ConfigDict(dataclasses.asdict(OptimizerConfig()))
  return c.lock()


def _fields(config: ConfigDict, prefix: str = '') -> list[str]:
  found = []
  for name, value in config.items():
    group = isinstance(value, ConfigDict)
    found += _fields(value, f'{prefix}{name}.') if group else [prefix + name]
  return found


def check_overrides(config: ConfigDict, arguments: list[str]):
  """Raises UserError for a --config.FIELD of the command line that is no field of `config`."""
  fields = _fields(config)
  for argument in arguments:
    name = argument.lstrip('-').partition('=')[0]
    name = name.removeprefix('noconfig.').removeprefix('config.')
    if not argument.lstrip('-').startswith(('config.', 'noconfig.')) or name in fields:
      continue
    if any(field.startswith(name + '.') for field in fields):
      raise UserError(f'--config.{name} is a group: give one of its fields, --config.{name}.FIELD')
    # The misspelt part may be the group or the field in it: compare whole names, then last parts.
    by_end = {field.rpartition('.')[2]: field for field in fields}
    near = difflib.get_close_matches(name, fields, 1, 0.6)
    end = difflib.get_close_matches(name.rpartition('.')[2], by_end, 1, 0.6)
    nearest = near[0] if near else by_end[end[0]] if end else None
    hint = f'did you mean --config.{nearest}?' if nearest else f'known are {", ".join(fields)}'
    raise UserError(f'unknown config field --config.{name}: {hint}')


def check(config: ConfigDict):
  """Raises UserError for a value that no run can have."""
  if config.task not in TASKS:
    raise UserError(f'task={config.task!r} is unknown: use {", ".join(TASKS)}')
  for name in ('batch_size', 'max_len', 'log_every', 'eval_every', 'checkpoint_every',
               'keep_checkpoints'):
    if config[name] < 1:
      raise UserError(f'{name}={config[name]} must be at least 1')
  for name in ('train_steps', 'train_epochs', 'eval_batches', 'seed'):
    if config[name] < 0:
      raise UserError(f'{name}={config[name]} must not be negative')
  if bool(config.train_steps) == bool(config.train_epochs):
    raise UserError(f'train_steps={config.train_steps} and train_epochs={config.train_epochs}: '
                    'give one of them and set the other to 0')
  if config.train_epochs and config.phases:
    raise UserError('phases are counted in steps: give train_steps, not train_epochs, with them')
  for length in _lengths(config):
    if length < 8:
      raise UserError(f'max_len={length} is too short for [CLS] A [SEP] B [SEP]: give at least 8')
  if config.data.sequences not in SEQUENCES:
    raise UserError(f'data.sequences={config.data.sequences!r} is unknown: use '
                    f'{", ".join(SEQUENCES)}')
  if config.data.loader_workers < 0:
    raise UserError(f'data.loader_workers={config.data.loader_workers} must not be negative')
  if not 0 <= config.data.heldout < 1:
    raise UserError(f'data.heldout={config.data.heldout} must lie in [0, 1)')


def _lengths(config: ConfigDict) -> list[int]:
  phases = Phases.create(config.phases, config.train_steps or 1, config.max_len, config.batch_size)
  return [config.max_len, *(phase.max_len for phase in phases)]


def check_positions(config: ConfigDict):
  """Raises UserError for rows that the model, whose sizes are known by now, cannot hold."""
  for length in _lengths(config):
    if length > config.model.max_positions:
      raise UserError(f'max_len={length} is above model.max_positions='
                      f'{config.model.max_positions}: the position table has no row for it')
