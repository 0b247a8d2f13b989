"""BERT's parameters <-> tensors under the names that transformers' PyTorch BERT gives them.

Names are canonical here: the encoder's without the prefix "bert.", weights [out, in] as in PyTorch.
"""

from collections.abc import Callable
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from bert_jax.model.bert_config import BertConfig

HEADS = {'nsp': 'cls.seq_relationship', 'classifier': 'classifier', 'qa_outputs': 'qa_outputs'}
_QKV = ('query', 'key', 'value')


def from_tensors(get: Callable[[str], np.ndarray], config: BertConfig,
                 present: Collection[str]) -> Any:
  """As `bert_jax.interop.layout.from_tensors`."""
  h, k = config.num_heads, config.head_size
  padding = config.padded_vocab_size - config.vocab_size

  def tensor(name):
    return np.asarray(get(name)).astype(np.float32)

  def linear(name):
    return {'kernel': tensor(f'{name}.weight').T, 'bias': tensor(f'{name}.bias')}

  def norm(name):
    return {'scale': tensor(f'{name}.weight'), 'bias': tensor(f'{name}.bias')}

  def side_by_side(parts):
    """Three [..., H * K] as [..., H * 3 * K]."""
    heads = [x.reshape(*x.shape[:-1], h, 1, k) for x in parts]
    return np.concatenate(heads, -2).reshape(*parts[0].shape[:-1], -1)

  def layer(i):
    p = f'encoder.layer.{i}'
    qkv = [linear(f'{p}.attention.self.{x}') for x in _QKV]
    out = linear(f'{p}.attention.output.dense')
    return {
        'attention': {
            'qkv_kernel': side_by_side([x['kernel'] for x in qkv]),
            'qkv_bias': side_by_side([x['bias'] for x in qkv]),
            'out_kernel': out['kernel'], 'out_bias': out['bias']},
        'attention_norm': norm(f'{p}.attention.output.LayerNorm'),
        'feed_forward': {'up': linear(f'{p}.intermediate.dense'),
                         'down': linear(f'{p}.output.dense')},
        'feed_forward_norm': norm(f'{p}.output.LayerNorm')}

  bert = {
      'embeddings': {
          'token': np.pad(tensor('embeddings.word_embeddings.weight'), ((0, padding), (0, 0))),
          'position': tensor('embeddings.position_embeddings.weight'),
          'norm': norm('embeddings.LayerNorm')},
      'layers': jax.tree.map(lambda *xs: np.stack(xs), *map(layer, range(config.stacked_layers)))}
  if config.type_vocab_size:
    bert['embeddings']['segment'] = tensor('embeddings.token_type_embeddings.weight')
  if config.projects:
    bert['projection'] = linear('embeddings.projection')
  if 'pooler' in present:
    bert['pooler'] = linear('pooler.dense')
  tree = {'bert': bert}
  if 'mlm' in present:
    tree |= {'mlm_dense': linear('cls.predictions.transform.dense'),
             'mlm_norm': norm('cls.predictions.transform.LayerNorm'),
             'mlm_bias': np.pad(tensor('cls.predictions.bias'), (0, padding))}
  if 'rtd' in present:
    tree['rtd'] = {'dense': linear('discriminator_predictions.dense'),
                   'out': linear('discriminator_predictions.dense_prediction')}
  tree |= {name: linear(theirs) for name, theirs in HEADS.items() if name in present}
  return {'params': tree}


def to_tensors(params: Any, config: BertConfig) -> dict[str, np.ndarray]:
  """As `bert_jax.interop.layout.to_tensors`."""
  tree, found = params['params'], {}
  d, v = config.hidden_size, config.vocab_size

  def linear(name, leaf):
    found[f'{name}.weight'] = np.asarray(leaf['kernel']).T
    found[f'{name}.bias'] = np.asarray(leaf['bias'])

  def norm(name, leaf):
    found[f'{name}.weight'], found[f'{name}.bias'] = map(np.asarray, (leaf['scale'], leaf['bias']))

  embeddings = tree['bert']['embeddings']
  found['embeddings.word_embeddings.weight'] = np.asarray(embeddings['token'])[:v]
  found['embeddings.position_embeddings.weight'] = np.asarray(embeddings['position'])
  if config.type_vocab_size:
    found['embeddings.token_type_embeddings.weight'] = np.asarray(embeddings['segment'])
  norm('embeddings.LayerNorm', embeddings['norm'])
  if config.projects:
    linear('embeddings.projection', tree['bert']['projection'])
  layers = jax.tree.map(np.asarray, tree['bert']['layers'])
  for i in range(config.stacked_layers):
    p, layer = f'encoder.layer.{i}', jax.tree.map(lambda x: x[i], layers)
    attention = layer['attention']
    for j, x in enumerate(_QKV):
      parts = {name: attention[f'qkv_{name}'].reshape(*shape, config.num_heads, 3, config.head_size)
               for name, shape in (('kernel', (d,)), ('bias', ()))}
      linear(f'{p}.attention.self.{x}', {name: part[..., j, :].reshape(*part.shape[:-3], d)
                                         for name, part in parts.items()})
    linear(f'{p}.attention.output.dense', {'kernel': attention['out_kernel'],
                                           'bias': attention['out_bias']})
    norm(f'{p}.attention.output.LayerNorm', layer['attention_norm'])
    linear(f'{p}.intermediate.dense', layer['feed_forward']['up'])
    linear(f'{p}.output.dense', layer['feed_forward']['down'])
    norm(f'{p}.output.LayerNorm', layer['feed_forward_norm'])
  if 'pooler' in tree['bert']:
    linear('pooler.dense', tree['bert']['pooler'])
  if 'mlm_dense' in tree:
    linear('cls.predictions.transform.dense', tree['mlm_dense'])
    norm('cls.predictions.transform.LayerNorm', tree['mlm_norm'])
    found['cls.predictions.bias'] = np.asarray(tree['mlm_bias'])[:v]
  if 'rtd' in tree:
    linear('discriminator_predictions.dense', tree['rtd']['dense'])
    linear('discriminator_predictions.dense_prediction', tree['rtd']['out'])
  for name, theirs in HEADS.items():
    if name in tree:
      linear(theirs, tree[name])
  return found
