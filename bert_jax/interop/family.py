"""A model family of transformers: its names of classes, tensors and config fields.

Most families differ from BERT only in names. BERT's names are the canonical ones. Each
family has tables that map BERT's names of tensors and of config.json fields to its own
names. A family with other tensors than BERT also has rules for these tensors.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
import re
from typing import Any

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import rules
from bert_jax.model import architectures
from bert_jax.tasks import task_list

Names = tuple[tuple[str, str], ...]  # (our prefix, their prefix); the first match counts

# The groups of tensors besides the encoder, and the prefixes of their names.
GROUPS = {'pooler': 'pooler.', 'mlm': 'cls.predictions.', 'nsp': 'cls.seq_relationship.',
          'rtd': 'discriminator_predictions.', 'classifier': 'classifier.',
          'qa_outputs': 'qa_outputs.'}

# {field of config.json: field of BertConfig}.
SIZES = {
    'vocab_size': 'vocab_size',
    'hidden_size': 'hidden_size',
    'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads',
    'intermediate_size': 'intermediate_size',
    'max_position_embeddings': 'max_positions'}
FIELDS = SIZES | {
    'type_vocab_size': 'type_vocab_size', 'hidden_dropout_prob': 'dropout',
    'attention_probs_dropout_prob': 'attention_dropout',
    'initializer_range': 'initializer_range', 'layer_norm_eps': 'layer_norm_eps',
    'hidden_act': 'activation'}
PUBLISHED = {'position_embedding_type': 'absolute', 'is_decoder': False,
              'add_cross_attention': False, 'tie_word_embeddings': True}

# The prefixes of tensors outside the encoder.
_HEADS = tuple(start for group, start in GROUPS.items() if group != 'pooler')


def _renamed(name: str, table: Names) -> str:
  for start, other in table:
    if name.startswith(start):
      return other + name.removeprefix(start)
  return name


def _inverse(table: Names) -> Names:
  return tuple((theirs, ours) for ours, theirs in table)


@dataclasses.dataclass(frozen=True)
class Family:
  """A `model_type` of transformers."""

  name: str  # the model_type, and `architecture` in our config
  title: str  # the prefix of its classes
  # {pretraining class without the title: its groups besides the encoder}.
  pretraining: Mapping[str, tuple[str, ...]]
  layer: str = 'encoder.layer.{}.'  # the prefix of the tensors of a layer
  in_layer: Names = ()  # the names within a layer
  names: Names = ()  # all other names
  # The names that only one class has.
  of_class: Mapping[str, Names] = dataclasses.field(default_factory=dict)
  # {field of config.json: field of our config}.
  fields: Mapping[str, str] = dataclasses.field(default_factory=FIELDS.copy)
  # The fields of config.json with only one supported value, which is also the default.
  published: Mapping[str, Any] = dataclasses.field(default_factory=PUBLISHED.copy)
  # config.json -> the rows of the position table before the row of the first token.
  unused_positions: Callable[[Mapping[str, Any]], int] = lambda config: 0
  # Tokenizer -> the fields of config.json that depend on it.
  settings: Callable[[Tokenizer], dict[str, Any]] = lambda t: {'pad_token_id': t.pad_id}
  heads: tuple[str, ...] = ()  # the prefixes of further tensors outside the encoder
  ignored: tuple[str, ...] = ()  # the prefixes of tensors that are not read
  prefix: str = ''  # the prefix of the encoder's tensors; '' = the name
  tensors: Callable[[Any], rules.Rules] = rules.bert  # config -> the rules of its tensors
  # Config -> the feature that transformers lacks, and its field; '' = none.
  lacks: Callable[[Any], str] = lambda config: ''
  # The fields of a newer config.json -> the same fields by the names in `fields`.
  read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

  @functools.cached_property
  def architectures(self) -> dict[str, tuple[tuple[str, ...], str]]:
    """All classes: {name: (groups besides the encoder, task of the head)}."""
    # A shared pooler belongs to every class with a head.
    shared = ('pooler',) if architectures.ALL[self.name].config.pooler_is_shared else ()
    pretraining = {name: (groups, '') for name, groups in self.pretraining.items()}
    of_tasks = {
        kind.transformers: (tuple(dict.fromkeys(shared + kind.parameter_groups)), task)
        for task, kind in task_list.ALL.items() if kind.transformers}
    classes = {'Model': ((), '')} | pretraining | of_tasks
    return {self.title + name: description for name, description in classes.items()}

  def class_of(self, groups: Collection[str], task: str) -> str:
    """Returns the class with these groups and this task; raises UserError without one."""
    # The pooler does not count: classes of transformers have one that they may not use.
    for name, (needed, task_of_class) in self.architectures.items():
      if task_of_class == task and set(groups) - {'pooler'} == set(needed) - {'pooler'}:
        return name
    raise UserError(f'no {self.title} class of transformers has the heads '
                    f'{", ".join(groups)} together: --to=bert_jax keeps them')

  def canonical(self, name: str, architecture: str = '') -> str:
    """Returns BERT's name for a tensor of a class, without the prefix of the encoder."""
    name = name.removeprefix(f'{self.prefix or self.name}.')
    # The first checkpoints on the hub have TensorFlow's names.
    for old, new in (('gamma', 'weight'), ('beta', 'bias')):
      name = re.sub(rf'LayerNorm\.{old}$', f'LayerNorm.{new}', name)
    pattern = re.escape(self.layer).replace(r'\{\}', r'(\d+)')
    if match := re.match(pattern, name):
      return (f'encoder.layer.{match[1]}.'
              + _renamed(name[match.end():], _inverse(self.in_layer)))
    return _renamed(name, _inverse((*self.of_class.get(architecture, ()), *self.names)))

  def original(self, name: str, architecture: str) -> str:
    """The inverse of `canonical`, with the prefix."""
    if match := re.match(r'encoder\.layer\.(\d+)\.', name):
      theirs = self.layer.format(match[1]) + _renamed(name[match.end():], self.in_layer)
    else:
      theirs = _renamed(name, (*self.of_class.get(architecture, ()), *self.names))
    # A pooler with another name is a part of the head, which has no prefix.
    is_head = name.startswith((*_HEADS, *self.heads)) or (
        name.startswith('pooler.') and not theirs.startswith('pooler.'))
    bare = is_head or architecture == f'{self.title}Model'
    return theirs if bare else f'{self.prefix or self.name}.{theirs}'


def ends(t: Tokenizer) -> dict[str, Any]:
  """Returns the ids of special tokens in RoBERTa's config.json."""
  return {'pad_token_id': t.pad_id, 'bos_token_id': t.cls_id, 'eos_token_id': t.sep_id}
