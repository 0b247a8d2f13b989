"""Parameters <-> tensors by name, for every architecture: one table serves both directions.

Tensors have canonical names, those of transformers' PyTorch BERT: the encoder's without the prefix
"bert.", weights [out, in]. Within a layer of ModernBERT they are ModernBERT's own. On top of the
encoder a checkpoint holds groups of tensors; a group is complete or absent.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.model import modern
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining, ReplacedTokenHead

# The groups, and the prefix of their tensors' names.
GROUPS = {'pooler': 'pooler.', 'mlm': 'cls.predictions.', 'nsp': 'cls.seq_relationship.',
          'rtd': 'discriminator_predictions.', 'classifier': 'classifier.',
          'qa_outputs': 'qa_outputs.'}

Arrays = Sequence[np.ndarray]


class _Rule(NamedTuple):
  """Leaves of the parameter tree, and the tensors that hold the same numbers."""

  leaves: Sequence[str]  # paths below 'params'
  tensors: Sequence[str]  # names; {} stands for the number of the layer
  read: Callable[..., Arrays]  # tensors -> leaves
  write: Callable[..., Arrays]  # leaves -> tensors
  layers: Sequence[int] | None = None  # the layers that a leaf stacks along its first axis


def _copy(leaf: str, tensor: str) -> _Rule:
  return _Rule([leaf], [tensor], read=lambda x: [x], write=lambda x: [x])


def _transpose(leaf: str, tensor: str) -> _Rule:
  return _Rule([leaf], [tensor], read=lambda x: [x.T], write=lambda x: [x.T])


def _linear(leaf: str, tensor: str) -> list[_Rule]:
  return [_transpose(f'{leaf}/kernel', f'{tensor}.weight'),
          _copy(f'{leaf}/bias', f'{tensor}.bias')]


def _norm(leaf: str, tensor: str) -> list[_Rule]:
  return [_copy(f'{leaf}/scale', f'{tensor}.weight'), _copy(f'{leaf}/bias', f'{tensor}.bias')]


def _per_entry(leaf: str, tensor: str, config: BertConfig) -> _Rule:
  """An array with a row for each entry of the vocabulary; ours is padded."""
  def pad(x):
    padding = config.padded_vocab_size - config.vocab_size
    return [np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))]

  return _Rule([leaf], [tensor], read=pad, write=lambda x: [x[:config.vocab_size]])


def _qkv(leaf: str, tensors: Sequence[str], config: BertConfig) -> _Rule:
  """Query, key and value, [H * K, ...] each; ours is [..., H * 3 * K], the three side by side.

  They are three tensors, or one that holds them one below the other.
  """
  h, k, is_one = config.num_heads, config.head_size, len(tensors) == 1

  def read(*parts):
    parts = np.split(parts[0], 3) if is_one else parts
    heads = [x.T.reshape(*x.T.shape[:-1], h, k) for x in parts]
    return [np.stack(heads, -2).reshape(*parts[0].T.shape[:-1], -1)]

  def write(x):
    heads = x.reshape(*x.shape[:-1], h, 3, k)
    parts = [heads[..., i, :].reshape(*x.shape[:-1], -1).T for i in range(3)]
    return [np.concatenate(parts)] if is_one else parts

  return _Rule([leaf], tensors, read, write)


def _joined(leaves: Sequence[str], tensor: str) -> _Rule:
  """One tensor that holds the kernels of several of our products, one below the other."""
  return _Rule(leaves, [tensor],
               read=lambda x: [part.T for part in np.split(x, len(leaves))],
               write=lambda *parts: [np.concatenate([part.T for part in parts])])


def _in_layer(rules: Iterable[_Rule], leaf: str, tensor: str = 'encoder.layer.{}',
              layers: Sequence[int] | None = None) -> list[_Rule]:
  """The rules of a layer, where the tree and the names of the tensors have it."""
  return [rule._replace(leaves=[f'{leaf}/{name}' for name in rule.leaves],
                        tensors=[f'{tensor}.{name}' for name in rule.tensors], layers=layers)
          for rule in rules]


def _bert(config: BertConfig) -> list[_Rule]:
  """The encoder of every architecture but ModernBERT."""
  qkv = [f'attention.self.{name}' for name in ('query', 'key', 'value')]
  layer = [
      _qkv('attention/qkv_kernel', [f'{name}.weight' for name in qkv], config),
      _qkv('attention/qkv_bias', [f'{name}.bias' for name in qkv], config),
      _transpose('attention/out_kernel', 'attention.output.dense.weight'),
      _copy('attention/out_bias', 'attention.output.dense.bias'),
      *_norm('attention_norm', 'attention.output.LayerNorm'),
      *_linear('feed_forward/up', 'intermediate.dense'),
      *_linear('feed_forward/down', 'output.dense'),
      *_norm('feed_forward_norm', 'output.LayerNorm')]
  rules = [
      _per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      _copy('bert/embeddings/position', 'embeddings.position_embeddings.weight'),
      *_norm('bert/embeddings/norm', 'embeddings.LayerNorm'),
      *_in_layer(layer, 'bert/layers', layers=range(config.stacked_layers))]
  if config.type_vocab_size:
    rules.append(_copy('bert/embeddings/segment', 'embeddings.token_type_embeddings.weight'))
  if config.projects:
    rules += _linear('bert/projection', 'embeddings.projection')
  return rules


def _modern(config: modern.ModernConfig) -> list[_Rule]:
  """The encoder of ModernBERT: a first layer without a norm before it, then groups of layers."""
  layer = [
      _qkv('attention/qkv_kernel', ['attn.Wqkv.weight'], config),
      _transpose('attention/out_kernel', 'attn.Wo.weight'),
      _copy('feed_forward_norm/scale', 'mlp_norm.weight'),
      _joined(['feed_forward/up/kernel', 'feed_forward/gate/kernel'], 'mlp.Wi.weight'),
      _transpose('feed_forward/down/kernel', 'mlp.Wo.weight')]
  rules = [
      _per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      _copy('bert/embeddings/norm/scale', 'embeddings.norm.weight'),
      _copy('bert/final_norm/scale', 'final_norm.weight'),
      *_in_layer(layer, 'bert/first', 'encoder.layer.0')]
  layer.append(_copy('attention_norm/scale', 'attn_norm.weight'))
  for place, name in enumerate(modern.group_names(config)):
    rules += _in_layer(layer, f'bert/layers/{name}',
                       layers=range(1 + place, config.num_layers, config.global_every))
  return rules


def _rules(config: BertConfig, present: Collection[str]) -> list[_Rule]:
  """All rules of a model with these groups."""
  mlm_bias = _per_entry('mlm_bias', 'cls.predictions.bias', config)
  by_group = {
      'nsp': _linear('nsp', 'cls.seq_relationship'),
      'rtd': [*_linear('rtd/dense', 'discriminator_predictions.dense'),
              *_linear('rtd/out', 'discriminator_predictions.dense_prediction')],
      'classifier': _linear('classifier', 'classifier'),
      'qa_outputs': _linear('qa_outputs', 'qa_outputs')}
  if config.architecture == 'modernbert':
    encoder = _modern(config)
    by_group |= {
        'pooler': [_transpose('bert/pooler/dense/kernel', 'pooler.dense.weight'),
                   _copy('bert/pooler/norm/scale', 'pooler.norm.weight')],
        'mlm': [mlm_bias]}
  else:
    encoder = _bert(config)
    by_group |= {
        'pooler': _linear('bert/pooler', 'pooler.dense'),
        'mlm': [*_linear('mlm_dense', 'cls.predictions.transform.dense'),
                *_norm('mlm_norm', 'cls.predictions.transform.LayerNorm'), mlm_bias]}
  return encoder + [rule for group in GROUPS if group in present for rule in by_group[group]]


def from_tensors(get: Callable[[str], np.ndarray], config: BertConfig,
                 present: Collection[str]) -> Any:
  """Builds the tree of parameters, float32, of a model with the encoder and these groups.

  `get` gives a tensor by its canonical name; the shapes are expected to fit the config.
  """
  leaves = {}

  def read(rule, layer=None):
    names = [name.format(layer) for name in rule.tensors]
    return rule.read(*(np.asarray(get(name)).astype(np.float32) for name in names))

  for rule in _rules(config, present):
    if rule.layers is None:
      arrays = read(rule)
    else:
      arrays = map(np.stack, zip(*(read(rule, layer) for layer in rule.layers)))
    leaves.update(zip(rule.leaves, arrays))
  return {'params': traverse_util.unflatten_dict(leaves, sep='/')}


def to_tensors(params: Any, config: BertConfig) -> dict[str, np.ndarray]:
  """The tensors of a tree of parameters, by canonical name; the inverse of `from_tensors`."""
  leaves, tensors = traverse_util.flatten_dict(params['params'], sep='/'), {}
  for rule in _rules(config, groups(params)):
    arrays = [np.asarray(leaves[name]) for name in rule.leaves]
    if rule.layers is None:
      tensors.update(zip(rule.tensors, rule.write(*arrays)))
    for i, layer in enumerate(rule.layers or ()):
      names = [name.format(layer) for name in rule.tensors]
      tensors.update(zip(names, rule.write(*(x[i] for x in arrays))))
  return tensors


def groups(params: Any) -> tuple[str, ...]:
  """The groups that a tree of parameters has."""
  tree = params['params']
  leaf = {'mlm': 'mlm_bias'}
  return tuple(group for group in GROUPS
               if leaf.get(group, group) in (tree['bert'] if group == 'pooler' else tree))


def abstract_params(config: BertConfig, present: Collection[str], num_labels: int = 0) -> Any:
  """The parameters of a model with these groups: ShapeDtypeStructs, boxed with logical axes."""
  key, tokens = jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32)
  tree = jax.eval_shape(BertForPreTraining(config).init, key, Batch(*[tokens] * 4), tokens,
                        tokens)['params']
  nsp = tree.pop('nsp')
  if 'pooler' not in present:
    del tree['bert']['pooler']
  if 'mlm' not in present:
    tree = {'bert': tree['bert']}
  if 'rtd' in present:
    hidden = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
    tree['rtd'] = jax.eval_shape(ReplacedTokenHead(config).init, key, hidden)['params']
  for name, outputs in (('nsp', 2), ('classifier', num_labels), ('qa_outputs', 2)):
    if name in present:  # the logical axes are those of the next-sentence head
      shapes = {'kernel': (config.hidden_size, outputs), 'bias': (outputs,)}
      tree[name] = {leaf: nsp[leaf].replace_boxed(jax.ShapeDtypeStruct(shape, jnp.float32))
                    for leaf, shape in shapes.items()}
  return {'params': tree}


def expected_shapes(config: BertConfig, present: Collection[str],
                    num_labels: int = 0) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of a model with these groups."""
  abstract = nn.unbox(abstract_params(config, present, num_labels))
  zeros = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), abstract)
  return {name: x.shape for name, x in to_tensors(zeros, config).items()}
