"""The tensors of ModernBERT, and their names in transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.interop import rules
from bert_jax.interop.family import SIZES, Family, ends
from bert_jax.model.modern import ModernConfig, group_names


def _joined(leaves: Sequence[str], tensor: str) -> rules.Rule:
  """Several kernels that one tensor concatenates along its first axis."""
  return rules.Rule(leaves, [tensor],
                    read=lambda x: [part.T for part in np.split(x, len(leaves))],
                    write=lambda *parts: [np.concatenate([part.T for part in parts])])


def _rules(config: ModernConfig) -> rules.Rules:
  """Returns the rules: a first layer without an attention norm, groups, and last layers."""
  layer = [
      rules.qkv('attention/qkv_kernel', ['attn.Wqkv.weight'], config),
      rules.transpose('attention/out_kernel', 'attn.Wo.weight'),
      rules.copy('feed_forward_norm/scale', 'mlp_norm.weight'),
      _joined(['feed_forward/up/kernel', 'feed_forward/gate/kernel'], 'mlp.Wi.weight'),
      rules.transpose('feed_forward/down/kernel', 'mlp.Wo.weight')]
  if config.conv_reach:
    layer += [rules.copy('attention_convolution/taps', 'attn_convolution.weight'),
              rules.copy('feed_forward_convolution/taps', 'mlp_convolution.weight')]
  encoder = [
      rules.per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight',
                      config),
      rules.copy('bert/embeddings/norm/scale', 'embeddings.norm.weight'),
      rules.copy('bert/final_norm/scale', 'final_norm.weight'),
      *rules.in_layer(layer, 'bert/first', 'encoder.layer.0')]
  layer.append(rules.copy('attention_norm/scale', 'attn_norm.weight'))
  # A scan over layers needs equal layers: local and global ones are separate stacks.
  for place, name in enumerate(group_names(config)):
    layers = range(1 + place, config.num_layers - config.last_layers, config.global_every)
    encoder += rules.in_layer(layer, f'bert/layers/{name}', layers=layers, stacked=True)
  for i in range(config.last_layers):
    number = config.num_layers - config.last_layers + i
    encoder += rules.in_layer(layer, f'bert/last_{i}', f'encoder.layer.{number}')
  return {'encoder': encoder,
          'pooler': [rules.transpose('bert/pooler/dense/kernel', 'pooler.dense.weight'),
                     rules.copy('bert/pooler/norm/scale', 'pooler.norm.weight')],
          'mlm': [rules.per_entry('mlm_bias', 'cls.predictions.bias', config)]}


def _lacks(config: ModernConfig) -> str:
  reach = config.conv_reach
  return f'short convolutions (model.conv_reach={reach})' if reach else ''


def _read(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Converts config.json of transformers 5, which lists the kind of every layer."""
  fields, kinds = dict(config), config.get('layer_types')
  angles = config.get('rope_parameters') or {}
  try:
    for ours, kind in (('global', 'full_attention'), ('local', 'sliding_attention')):
      # rope_scaling and the key 'type' are the older form of rope_parameters.
      of_kind = {**(angles.get(kind) or {}), **(config.get('rope_scaling') or {})}
      rule = of_kind.get('rope_type', of_kind.get('type', 'default'))
      require(rule == 'default',
              f'config.json has rope_type={rule!r}: only the default is supported')
      if 'rope_theta' in of_kind:
        fields[f'{ours}_rope_theta'] = of_kind['rope_theta']
    if kinds and not isinstance(kinds, list):
      raise TypeError('layer_types is not a list')
    # Our config has only a period, so the list must be periodic.
    if kinds:
      every = (kinds.index('full_attention', 1)
               if 'full_attention' in kinds[1:] else len(kinds))
      expected = ['sliding_attention' if i % every else 'full_attention'
                  for i in range(len(kinds))]
      require(kinds == expected,
              'config.json has layer_types without a period: every n-th layer must be '
              'full_attention, beginning with the first')
      fields['global_attn_every_n_layers'] = every
  except (AttributeError, TypeError) as e:
    raise UserError(
        f'config.json has malformed layer_types or rope_parameters: {e}') from e
  return fields


MODERN = Family(
    'modernbert', 'ModernBert',
    {'ForMaskedLM': ('pooler', 'mlm')}, prefix='model', layer='layers.{}.',
    names=(('embeddings.word_embeddings.', 'embeddings.tok_embeddings.'),
           ('pooler.', 'head.'),
           ('cls.predictions.bias', 'decoder.bias'),
           ('cls.predictions.decoder.', 'decoder.')),
    of_class={'ModernBertForQuestionAnswering': (('qa_outputs.', 'classifier.'),)},
    fields=SIZES | {
        'initializer_range': 'initializer_range',
        'norm_eps': 'layer_norm_eps',
        'hidden_activation': 'activation',
        'attention_dropout': 'attention_dropout',
        'embedding_dropout': 'dropout',
        'global_attn_every_n_layers': 'global_every',
        'local_attention': 'local_window',
        'global_rope_theta': 'global_theta',
        'local_rope_theta': 'local_theta',
        'classifier_pooling': 'classifier_pooling'},
    published={'norm_bias': False,
               'attention_bias': False,
               'mlp_bias': False,
               'decoder_bias': True,
               'classifier_bias': False,
               'classifier_activation': 'gelu',
               'tie_word_embeddings': True},
    read=_read, tensors=_rules, lacks=_lacks,
    settings=lambda t: {**ends(t), 'cls_token_id': t.cls_id, 'sep_token_id': t.sep_id})
