"""The modern encoder's parameters <-> tensors, as transformers' PyTorch ModernBERT has them.

Names within a layer are theirs (`attn.Wqkv`, `mlp.Wi`, ...); others are BERT's where it has such a
tensor. Weights lie [out, in].
"""

from collections.abc import Callable
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from bert_jax.interop.bert_layout import HEADS
from bert_jax.model.modern import ModernConfig
from bert_jax.model.modern import group_names


def _layer_from(tensor: Callable[[str], np.ndarray], config: ModernConfig, i: int) -> dict:
  p, d, f = f'encoder.layer.{i}', config.hidden_size, config.intermediate_size
  qkv = tensor(f'{p}.attn.Wqkv.weight').T.reshape(d, 3, config.num_heads, config.head_size)
  up, gate = np.split(tensor(f'{p}.mlp.Wi.weight').T, [f], axis=1)
  found = {
      'attention': {'qkv_kernel': np.moveaxis(qkv, 1, 2).reshape(d, -1),
                    'out_kernel': tensor(f'{p}.attn.Wo.weight').T},
      'feed_forward_norm': {'scale': tensor(f'{p}.mlp_norm.weight')},
      'feed_forward': {'up': {'kernel': up}, 'gate': {'kernel': gate},
                       'down': {'kernel': tensor(f'{p}.mlp.Wo.weight').T}}}
  if i:
    found['attention_norm'] = {'scale': tensor(f'{p}.attn_norm.weight')}
  return found


def _layer_to(layer: dict, config: ModernConfig, i: int) -> dict[str, np.ndarray]:
  p, d = f'encoder.layer.{i}', config.hidden_size
  qkv = layer['attention']['qkv_kernel'].reshape(d, config.num_heads, 3, config.head_size)
  mlp = layer['feed_forward']
  found = {
      f'{p}.attn.Wqkv.weight': np.moveaxis(qkv, 2, 1).reshape(d, -1).T,
      f'{p}.attn.Wo.weight': layer['attention']['out_kernel'].T,
      f'{p}.mlp_norm.weight': layer['feed_forward_norm']['scale'],
      f'{p}.mlp.Wi.weight': np.concatenate([mlp['up']['kernel'], mlp['gate']['kernel']], 1).T,
      f'{p}.mlp.Wo.weight': mlp['down']['kernel'].T}
  if i:
    found[f'{p}.attn_norm.weight'] = layer['attention_norm']['scale']
  return found


def _numbers(config: ModernConfig, place: int) -> range:
  """Which layers stand at a place of the groups."""
  return range(1 + place, config.num_layers, config.global_every)


def from_tensors(get: Callable[[str], np.ndarray], config: ModernConfig,
                 present: Collection[str]) -> Any:
  """As `bert_jax.interop.layout.from_tensors`."""
  padding = config.padded_vocab_size - config.vocab_size

  def tensor(name):
    return np.asarray(get(name)).astype(np.float32)

  groups = {name: jax.tree.map(lambda *xs: np.stack(xs), *(
      _layer_from(tensor, config, i) for i in _numbers(config, place)))
            for place, name in enumerate(group_names(config))}
  bert = {
      'embeddings': {
          'token': np.pad(tensor('embeddings.word_embeddings.weight'), ((0, padding), (0, 0))),
          'norm': {'scale': tensor('embeddings.norm.weight')}},
      'first': _layer_from(tensor, config, 0), 'layers': groups,
      'final_norm': {'scale': tensor('final_norm.weight')}}
  if 'pooler' in present:
    bert['pooler'] = {'dense': {'kernel': tensor('pooler.dense.weight').T},
                      'norm': {'scale': tensor('pooler.norm.weight')}}
  tree = {'bert': bert}
  if 'mlm' in present:
    tree['mlm_bias'] = np.pad(tensor('cls.predictions.bias'), (0, padding))
  for name, theirs in HEADS.items():
    if name in present:
      tree[name] = {'kernel': tensor(f'{theirs}.weight').T, 'bias': tensor(f'{theirs}.bias')}
  return {'params': tree}


def to_tensors(params: Any, config: ModernConfig) -> dict[str, np.ndarray]:
  """As `bert_jax.interop.layout.to_tensors`."""
  tree = jax.tree.map(np.asarray, params['params'])
  bert, v = tree['bert'], config.vocab_size
  found = {'embeddings.word_embeddings.weight': bert['embeddings']['token'][:v],
           'embeddings.norm.weight': bert['embeddings']['norm']['scale'],
           'final_norm.weight': bert['final_norm']['scale'],
           **_layer_to(bert['first'], config, 0)}
  for place, name in enumerate(group_names(config)):
    for group, i in enumerate(_numbers(config, place)):
      layer = jax.tree.map(lambda x, group=group: x[group], bert['layers'][name])
      found |= _layer_to(layer, config, i)
  if 'pooler' in bert:
    found['pooler.dense.weight'] = bert['pooler']['dense']['kernel'].T
    found['pooler.norm.weight'] = bert['pooler']['norm']['scale']
  if 'mlm_bias' in tree:
    found['cls.predictions.bias'] = tree['mlm_bias'][:v]
  for name, theirs in HEADS.items():
    if name in tree:
      found[f'{theirs}.weight'] = tree[name]['kernel'].T
      found[f'{theirs}.bias'] = tree[name]['bias']
  return found
