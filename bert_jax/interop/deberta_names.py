"""The tensors of DeBERTa, and their names in transformers."""

from collections.abc import Mapping
from typing import Any

from bert_jax.interop import rules
from bert_jax.interop.family import FIELDS, Family
from bert_jax.model.deberta import DebertaConfig


def _convolution(leaf: str, tensor: str, config: DebertaConfig) -> rules.Rule:
  """The kernel of a convolution: a tensor [out, in, taps], a leaf [taps * in, out]."""
  return rules.Rule([leaf], [tensor], read=lambda x: [x.T.reshape(-1, len(x))],
                    write=lambda x: [x.reshape(-1, config.hidden_size, x.shape[-1]).T])


def _rules(config: DebertaConfig) -> rules.Rules:
  """Returns the rules; with a convolution, the first layer is not in the stack."""
  layer, rest = rules.bert_layer(config), range(config.num_layers)
  if not config.share_att_key:
    for name, term in (('key', 'c2p'), ('query', 'p2c')):
      if term in config.pos_att_type:
        layer += rules.linear(f'attention/pos_{name}', f'attention.self.pos_{name}_proj')
  encoder = [
      rules.per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight',
                      config),
      *rules.norm('bert/embeddings/norm', 'embeddings.LayerNorm'),
      rules.copy('bert/relative/table', 'encoder.rel_embeddings.weight')]
  if config.norm_rel_ebd == 'layer_norm':
    encoder += rules.norm('bert/relative/norm', 'encoder.LayerNorm')
  # The convolution runs parallel to the first layer, so this layer is its own module.
  if config.conv_kernel_size:
    rest = rest[1:]
    encoder += [
        *rules.in_layer(layer, 'bert/first', 'encoder.layer.0'),
        _convolution('bert/convolution/taps/kernel', 'encoder.conv.conv.weight', config),
        rules.copy('bert/convolution/taps/bias', 'encoder.conv.conv.bias'),
        *rules.norm('bert/convolution/norm', 'encoder.conv.LayerNorm')]
  encoder += rules.in_layer(layer, 'bert/layers', layers=rest, stacked=True)
  return rules.bert(config) | {'encoder': encoder}


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Adds the defaults of transformers for fields that are missing in config.json."""
  terms = config.get('pos_att_type') or ''
  return {'relative_attention': False,
          'position_biased_input': True,
          'share_att_key': False,
          'position_buckets': -1,
          'norm_rel_ebd': 'none',
          **config,
          # transformers accepts a list, or a string with '|'.
          'pos_att_type': '|'.join(map(str, terms)) if isinstance(terms, list) else terms}


DEBERTA = Family(
    'deberta-v2', 'DebertaV2', {'ForMaskedLM': ('mlm',)}, prefix='deberta',
    in_layer=tuple((f'attention.self.{name}.', f'attention.self.{name}_proj.')
                   for name in ('query', 'key', 'value')),
    # The published checkpoints name the head differently than transformers' class does.
    # The first entry keeps BERT's names, which the class reads and writes.
    names=(('cls.predictions.', 'cls.predictions.'),
           ('cls.predictions.transform.dense.', 'lm_predictions.lm_head.dense.'),
           ('cls.predictions.transform.LayerNorm.', 'lm_predictions.lm_head.LayerNorm.'),
           ('cls.predictions.', 'lm_predictions.lm_head.')),
    fields={name: ours for name, ours in FIELDS.items() if ours != 'type_vocab_size'} | {
        name: name for name in (
            'position_buckets', 'max_relative_positions', 'pos_att_type', 'share_att_key',
            'norm_rel_ebd', 'conv_kernel_size', 'conv_act')},
    published={'relative_attention': True,
               'position_biased_input': False,
               'type_vocab_size': 0,
               'conv_groups': 1,
               'pooler_dropout': 0,
               'pooler_hidden_act': 'gelu',
               'tie_word_embeddings': True},
    heads=('pooler.',),
    ignored=('mask_predictions.', 'embeddings.position_embeddings.'),
    read=_read, tensors=_rules)
