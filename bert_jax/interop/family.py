"""A family of models as transformers has it: its names of classes, tensors and fields.

Most members of the family differ in names only. BERT's names are the canonical ones; a family has a
table of its own names of tensors and of fields of config.json. A family with tensors of its own
has rules for them.
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

Names = tuple[tuple[str, str], ...]  # (our prefix, theirs); the first that fits counts

# The groups, and the prefix of their tensors' names.
GROUPS = {'pooler': 'pooler.', 'mlm': 'cls.predictions.', 'nsp': 'cls.seq_relationship.',
          'rtd': 'discriminator_predictions.', 'classifier': 'classifier.',
          'qa_outputs': 'qa_outputs.'}

# {field of config.json: field of BertConfig}.
SIZES = {
    'vocab_size': 'vocab_size', 'hidden_size': 'hidden_size', 'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads', 'intermediate_size': 'intermediate_size',
    'max_position_embeddings': 'max_positions'}
FIELDS = SIZES | {
    'type_vocab_size': 'type_vocab_size', 'hidden_dropout_prob': 'dropout',
    'attention_probs_dropout_prob': 'attention_dropout',
    'initializer_range': 'initializer_range', 'layer_norm_eps': 'layer_norm_eps',
    'hidden_act': 'activation'}
PUBLISHED = {'position_embedding_type': 'absolute', 'is_decoder': False,
              'add_cross_attention': False, 'tie_word_embeddings': True}

# Prefixes of the tensors that are not the encoder's.
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
  title: str  # prefix of its classes
  # {class for pretraining, without the title: its groups besides the encoder}.
  pretraining: Mapping[str, tuple[str, ...]]
  layer: str = 'encoder.layer.{}.'  # prefix of a layer's tensors
  in_layer: Names = ()  # names within a layer
  names: Names = ()  # all other names
  of_class: Mapping[str, Names] = dataclasses.field(default_factory=dict)  # of one class only
  # {field of config.json: field of our config}.
  fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: FIELDS)
  # Fields of config.json that can have but one value, also where they are missing.
  published: Mapping[str, Any] = dataclasses.field(default_factory=lambda: PUBLISHED)
  # config.json -> rows of the position table before that of the first token.
  unused_positions: Callable[[Mapping[str, Any]], int] = lambda config: 0
  # Fields of config.json that follow from the tokenizer.
  settings: Callable[[Tokenizer], dict[str, Any]] = lambda t: {'pad_token_id': t.pad_id}
  heads: tuple[str, ...] = ()  # prefixes of further tensors that are not the encoder's
  ignored: tuple[str, ...] = ()  # prefixes of tensors that are not read
  prefix: str = ''  # of the encoder's tensors; '' = the name
  tensors: Callable[[Any], rules.Rules] = rules.bert  # config -> the rules of its tensors
  # A config -> what transformers has no counterpart for, with its field; '' = nothing.
  lacks: Callable[[Any], str] = lambda config: ''
  # config.json of a newer version -> the names in `fields`.
  read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config

  @functools.cached_property
  def architectures(self) -> dict[str, tuple[tuple[str, ...], str]]:
    """All classes: {name: (groups besides the encoder, task of the classifier)}."""
    shared = ('pooler',) if architectures.ALL[self.name].config.pooler_is_shared else ()
    classes = {'Model': ((), '')}
    for name, groups in self.pretraining.items():
      classes[name] = groups, ''
    for task, kind in task_list.ALL.items():
      if kind.transformers:
        classes[kind.transformers] = tuple(dict.fromkeys(shared + kind.parameter_groups)), task
    return {self.title + name: description for name, description in classes.items()}

  def class_of(self, groups: Collection[str], task: str) -> str:
    """Returns the class with these groups and this task; raises UserError if there is none."""
    for name, (needed, task_of_class) in self.architectures.items():
      if task_of_class == task and set(groups) - {'pooler'} == set(needed) - {'pooler'}:
        return name
    raise UserError(f'no {self.title} class of transformers has the heads {", ".join(groups)} '
                    'together: --to=bert_jax keeps them')

  def canonical(self, name: str, architecture: str = '') -> str:
    """BERT's name of a tensor of a class, without the encoder's prefix."""
    name = name.removeprefix(f'{self.prefix or self.name}.')
    for old, new in (('gamma', 'weight'), ('beta', 'bias')):
      name = re.sub(rf'LayerNorm\.{old}$', f'LayerNorm.{new}', name)
    match = re.match(re.escape(self.layer).replace(r'\{\}', r'(\d+)'), name)
    if match:
      return f'encoder.layer.{match[1]}.' + _renamed(name[match.end():], _inverse(self.in_layer))
    return _renamed(name, _inverse((*self.of_class.get(architecture, ()), *self.names)))

  def original(self, name: str, architecture: str) -> str:
    """The inverse of `canonical`, with the prefix."""
    match = re.match(r'encoder\.layer\.(\d+)\.', name)
    if match:
      theirs = self.layer.format(match[1]) + _renamed(name[match.end():], self.in_layer)
    else:
      theirs = _renamed(name, (*self.of_class.get(architecture, ()), *self.names))
    # A pooler of another name is a part of the head.
    is_head = name.startswith((*_HEADS, *self.heads)) or (
        name.startswith('pooler.') and not theirs.startswith('pooler.'))
    bare = is_head or architecture == f'{self.title}Model'
    return theirs if bare else f'{self.prefix or self.name}.{theirs}'


def ends(t: Tokenizer) -> dict[str, Any]:
  """Ids of special tokens in config.json, as RoBERTa has them."""
  return {'pad_token_id': t.pad_id, 'bos_token_id': t.cls_id, 'eos_token_id': t.sep_id}
