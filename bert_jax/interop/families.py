"""The families of models that we read and write: transformers' names for their parts.

Most members of the family differ in names only. BERT's names are the canonical ones; a family has a
table of its own names of tensors and of fields of config.json.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
import re
from typing import Any

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.model import architectures, mpnet
from bert_jax.tasks import task_list

Names = tuple[tuple[str, str], ...]  # (our prefix, theirs); the first that fits counts

# {field of config.json: field of BertConfig}.
_SIZES = {
    'vocab_size': 'vocab_size', 'hidden_size': 'hidden_size', 'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads', 'intermediate_size': 'intermediate_size',
    'max_position_embeddings': 'max_positions'}
_FIELDS = _SIZES | {
    'type_vocab_size': 'type_vocab_size', 'hidden_dropout_prob': 'dropout',
    'attention_probs_dropout_prob': 'attention_dropout',
    'initializer_range': 'initializer_range', 'layer_norm_eps': 'layer_norm_eps',
    'hidden_act': 'activation'}
_PUBLISHED = {'position_embedding_type': 'absolute', 'is_decoder': False,
              'add_cross_attention': False, 'tie_word_embeddings': True}


# Prefixes of the tensors that are not the encoder's.
_HEADS = tuple(start for group, start in layout.GROUPS.items() if group != 'pooler')


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
  fields: Mapping[str, str] = dataclasses.field(default_factory=lambda: _FIELDS)
  # Fields of config.json that can have but one value, also where they are missing.
  published: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _PUBLISHED)
  # config.json -> rows of the position table before that of the first token.
  unused_positions: Callable[[Mapping[str, Any]], int] = lambda config: 0
  # Fields of config.json that follow from the tokenizer.
  settings: Callable[[Tokenizer], dict[str, Any]] = lambda t: {'pad_token_id': t.pad_id}
  heads: tuple[str, ...] = ()  # prefixes of further tensors that are not the encoder's
  ignored: tuple[str, ...] = ()  # prefixes of tensors that are not read
  prefix: str = ''  # of the encoder's tensors; '' = the name
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
        classes[kind.transformers] = tuple(dict.fromkeys(shared + kind.parts)), task
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


BERT = Family(
    'bert', 'Bert',
    {'ForPreTraining': ('pooler', 'mlm', 'nsp'), 'ForMaskedLM': ('mlm',),
     'ForNextSentencePrediction': ('pooler', 'nsp')})


def _unused(config: Mapping[str, Any]) -> int:
  """fairseq counts positions from the padding's id on (Liu et al. 2019, arXiv:1907.11692)."""
  padding = config.get('pad_token_id', 1)
  if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
    raise UserError(f'config.json has pad_token_id={padding!r}: a RoBERTa needs the number')
  return padding + 1


def _unused_mpnet(config: Mapping[str, Any]) -> int:
  padding = config.get('pad_token_id', 1)
  if padding != 1:
    raise UserError(f"pad_token_id={padding!r}: transformers' MPNet counts positions from id 1 on, "
                    'so the padding needs this id (data.tokenizer=bpe gives it)')
  return 2


def _ends(t: Tokenizer) -> dict[str, Any]:
  return {'pad_token_id': t.pad_id, 'bos_token_id': t.cls_id, 'eos_token_id': t.sep_id}


# BERT's pooler and classifier under other names: the pooler is a part of the head.
_WHOLE_CLASSIFIER = (('pooler.dense.', 'classifier.dense.'),
                     ('classifier.', 'classifier.out_proj.'))

ROBERTA = Family(
    'roberta', 'Roberta', {'ForMaskedLM': ('mlm',)},
    names=(('cls.predictions.transform.LayerNorm.', 'lm_head.layer_norm.'),
           ('cls.predictions.transform.dense.', 'lm_head.dense.'),
           ('cls.predictions.', 'lm_head.')),
    of_class={'RobertaForSequenceClassification': _WHOLE_CLASSIFIER},
    unused_positions=_unused, settings=_ends)

XLM_ROBERTA, CAMEMBERT = (
    dataclasses.replace(ROBERTA, name=name, title=title, prefix='roberta',
                        of_class={f'{title}ForSequenceClassification': _WHOLE_CLASSIFIER})
    for name, title in (('xlm-roberta', 'XLMRoberta'), ('camembert', 'Camembert')))

MPNET = dataclasses.replace(
    ROBERTA, name='mpnet', title='MPNet',
    in_layer=(('attention.self.query.', 'attention.attn.q.'),
              ('attention.self.key.', 'attention.attn.k.'),
              ('attention.self.value.', 'attention.attn.v.'),
              ('attention.output.dense.', 'attention.attn.o.'),
              ('attention.output.LayerNorm.', 'attention.LayerNorm.')),
    of_class={'MPNetForSequenceClassification': _WHOLE_CLASSIFIER},
    fields={name: ours for name, ours in _FIELDS.items() if name != 'type_vocab_size'},
    published={'relative_attention_num_buckets': mpnet.BUCKETS, 'tie_word_embeddings': True},
    unused_positions=_unused_mpnet)

ALBERT = Family(
    'albert', 'Albert',
    {'ForPreTraining': ('pooler', 'mlm', 'nsp'), 'ForMaskedLM': ('mlm',)},
    layer='encoder.albert_layer_groups.{}.albert_layers.0.',
    in_layer=(('attention.output.dense.', 'attention.dense.'),
              ('attention.output.LayerNorm.', 'attention.LayerNorm.'),
              ('attention.self.', 'attention.'),
              ('intermediate.dense.', 'ffn.'), ('output.dense.', 'ffn_output.'),
              ('output.LayerNorm.', 'full_layer_layer_norm.')),
    names=(('embeddings.projection.', 'encoder.embedding_hidden_mapping_in.'),
           ('pooler.dense.', 'pooler.'), ('cls.seq_relationship.', 'sop_classifier.classifier.'),
           ('cls.predictions.transform.dense.', 'predictions.dense.'),
           ('cls.predictions.transform.LayerNorm.', 'predictions.LayerNorm.'),
           ('cls.predictions.', 'predictions.')),
    fields=_FIELDS | {'embedding_size': 'embedding_size', 'num_hidden_groups': 'groups'},
    published=_PUBLISHED | {'inner_group_num': 1}, settings=_ends)

ELECTRA = Family(
    'electra', 'Electra', {'ForPreTraining': ('rtd',), 'ForMaskedLM': ('mlm',)},
    names=(('embeddings.projection.', 'embeddings_project.'),
           ('cls.predictions.transform.', 'generator_predictions.'),
           ('cls.predictions.bias', 'generator_lm_head.bias'),
           ('cls.predictions.decoder.', 'generator_lm_head.')),
    of_class={'ElectraForSequenceClassification': _WHOLE_CLASSIFIER,
              'ElectraForMultipleChoice': (('pooler.dense.', 'sequence_summary.summary.'),)},
    fields=_FIELDS | {'embedding_size': 'embedding_size', 'generator_size': 'generator_size'})

DISTILBERT = Family(
    'distilbert', 'DistilBert', {'ForMaskedLM': ('mlm',)},
    layer='transformer.layer.{}.',
    in_layer=(('attention.self.query.', 'attention.q_lin.'),
              ('attention.self.key.', 'attention.k_lin.'),
              ('attention.self.value.', 'attention.v_lin.'),
              ('attention.output.dense.', 'attention.out_lin.'),
              ('attention.output.LayerNorm.', 'sa_layer_norm.'),
              ('intermediate.dense.', 'ffn.lin1.'), ('output.dense.', 'ffn.lin2.'),
              ('output.LayerNorm.', 'output_layer_norm.')),
    names=(('pooler.dense.', 'pre_classifier.'),
           ('cls.predictions.transform.dense.', 'vocab_transform.'),
           ('cls.predictions.transform.LayerNorm.', 'vocab_layer_norm.'),
           ('cls.predictions.bias', 'vocab_projector.bias'),
           ('cls.predictions.decoder.', 'vocab_projector.')),
    fields={'vocab_size': 'vocab_size', 'dim': 'hidden_size', 'n_layers': 'num_layers',
            'n_heads': 'num_heads', 'hidden_dim': 'intermediate_size',
            'max_position_embeddings': 'max_positions', 'dropout': 'dropout',
            'attention_dropout': 'attention_dropout', 'initializer_range': 'initializer_range',
            'activation': 'activation'},
    published={'tie_word_embeddings': True})


def _read_modern(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Reads config.json of transformers 5, which has every layer's kind and the angles by kind."""
  fields, kinds = dict(config), config.get('layer_types')
  angles = config.get('rope_parameters') or {}
  try:
    for ours, kind in (('global', 'full_attention'), ('local', 'sliding_attention')):
      of_kind = angles.get(kind) or {}
      if of_kind.get('rope_type', 'default') != 'default':
        raise UserError(f'config.json has rope_type={of_kind["rope_type"]!r}: only the default is '
                        'known')
      if 'rope_theta' in of_kind:
        fields[f'{ours}_rope_theta'] = of_kind['rope_theta']
    if kinds and not isinstance(kinds, list):
      raise TypeError('layer_types is no list')
    if kinds:
      every = kinds.index('full_attention', 1) if 'full_attention' in kinds[1:] else len(kinds)
      expected = ['sliding_attention' if i % every else 'full_attention' for i in range(len(kinds))]
      if kinds != expected:
        raise UserError('config.json has layer_types without a period: every n-th layer has to be '
                        'full_attention, from the first on')
      fields['global_attn_every_n_layers'] = every
  except (AttributeError, TypeError) as e:
    raise UserError(f'config.json has malformed layer_types or rope_parameters: {e}') from e
  return fields


MODERN = Family(
    'modernbert', 'ModernBert',
    {'ForMaskedLM': ('pooler', 'mlm')}, prefix='model', layer='layers.{}.',
    names=(('embeddings.word_embeddings.', 'embeddings.tok_embeddings.'), ('pooler.', 'head.'),
           ('cls.predictions.bias', 'decoder.bias'), ('cls.predictions.decoder.', 'decoder.')),
    of_class={'ModernBertForQuestionAnswering': (('qa_outputs.', 'classifier.'),)},
    fields=_SIZES | {
        'initializer_range': 'initializer_range', 'norm_eps': 'layer_norm_eps',
        'hidden_activation': 'activation', 'attention_dropout': 'attention_dropout',
        'embedding_dropout': 'dropout', 'global_attn_every_n_layers': 'global_every',
        'local_attention': 'local_window', 'global_rope_theta': 'global_theta',
        'local_rope_theta': 'local_theta', 'classifier_pooling': 'classifier_pooling'},
    published={'norm_bias': False, 'attention_bias': False, 'mlp_bias': False, 'decoder_bias': True,
               'classifier_bias': False, 'classifier_activation': 'gelu',
               'tie_word_embeddings': True},
    read=_read_modern,
    settings=lambda t: {**_ends(t), 'cls_token_id': t.cls_id, 'sep_token_id': t.sep_id})


def _read_deberta(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Fills in what config.json leaves out, as transformers does."""
  terms = config.get('pos_att_type') or ''
  return {'relative_attention': False, 'position_biased_input': True, 'share_att_key': False,
          'position_buckets': -1, 'norm_rel_ebd': 'none', **config,
          'pos_att_type': '|'.join(map(str, terms)) if isinstance(terms, list) else terms}


DEBERTA = Family(
    'deberta-v2', 'DebertaV2', {'ForMaskedLM': ('mlm',)}, prefix='deberta',
    in_layer=tuple((f'attention.self.{name}.', f'attention.self.{name}_proj.')
                   for name in ('query', 'key', 'value')),
    # The published checkpoints have other names for the head than the class writes by default.
    names=(('cls.predictions.', 'cls.predictions.'),
           ('cls.predictions.transform.dense.', 'lm_predictions.lm_head.dense.'),
           ('cls.predictions.transform.LayerNorm.', 'lm_predictions.lm_head.LayerNorm.'),
           ('cls.predictions.', 'lm_predictions.lm_head.')),
    fields={name: ours for name, ours in _FIELDS.items() if ours != 'type_vocab_size'} | {
        name: name for name in ('position_buckets', 'max_relative_positions', 'pos_att_type',
                                'share_att_key', 'norm_rel_ebd', 'conv_kernel_size', 'conv_act')},
    published={'relative_attention': True, 'position_biased_input': False, 'type_vocab_size': 0,
               'conv_groups': 1, 'pooler_dropout': 0, 'pooler_hidden_act': 'gelu',
               'tie_word_embeddings': True},
    heads=('pooler.',), ignored=('mask_predictions.', 'embeddings.position_embeddings.'),
    read=_read_deberta)

ALL = {family.name: family for family in (
    BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, MPNET, ALBERT, ELECTRA, DISTILBERT, DEBERTA, MODERN)}
