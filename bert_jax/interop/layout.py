"""Parameters <-> tensors by name, for every architecture: one table serves both directions.

Tensors have canonical names, those of transformers' PyTorch BERT: the encoder's without the prefix
"bert.", weights [out, in]. Within a layer of ModernBERT they are ModernBERT's own. On top of the
encoder a checkpoint holds groups of tensors; a group is complete or absent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import UserError
from bert_jax.model import deberta, modern
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import BertForPreTraining, ReplacedTokenHead
from bert_jax.model.layers import dense
from bert_jax.objectives.objective import MaskedLM, abstract_variables
from bert_jax.tasks import task_list

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
  layers: Sequence[int] = (0,)  # numbers of the layers that follow this rule
  stacked: bool = False  # True if a leaf stacks these layers along its first axis


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
              **layers: Any) -> list[_Rule]:
  """Puts the rules of a layer where the tree and the names of the tensors have it."""
  return [rule._replace(leaves=[f'{leaf}/{name}' for name in rule.leaves],
                        tensors=[f'{tensor}.{name}' for name in rule.tensors], **layers)
          for rule in rules]


def _bert_layer(config: BertConfig) -> list[_Rule]:
  """A layer of every architecture but ModernBERT."""
  qkv = [f'attention.self.{name}' for name in ('query', 'key', 'value')]
  return [
      _qkv('attention/qkv_kernel', [f'{name}.weight' for name in qkv], config),
      _qkv('attention/qkv_bias', [f'{name}.bias' for name in qkv], config),
      _transpose('attention/out_kernel', 'attention.output.dense.weight'),
      _copy('attention/out_bias', 'attention.output.dense.bias'),
      *_norm('attention_norm', 'attention.output.LayerNorm'),
      *_linear('feed_forward/up', 'intermediate.dense'),
      *_linear('feed_forward/down', 'output.dense'),
      *_norm('feed_forward_norm', 'output.LayerNorm')]


def _bert(config: BertConfig) -> list[_Rule]:
  """The encoder of every architecture but ModernBERT and DeBERTa."""
  rules = [
      _per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      _copy('bert/embeddings/position', 'embeddings.position_embeddings.weight'),
      *_norm('bert/embeddings/norm', 'embeddings.LayerNorm'),
      *_in_layer(_bert_layer(config), 'bert/layers', layers=range(config.stacked_layers),
                 stacked=True)]
  if config.type_vocab_size:
    rules.append(_copy('bert/embeddings/segment', 'embeddings.token_type_embeddings.weight'))
  if config.architecture == 'mpnet':
    rules.append(_copy('bert/relative_bias', 'encoder.relative_attention_bias.weight'))
  if config.projects:
    rules += _linear('bert/projection', 'embeddings.projection')
  return rules


def _convolution(leaf: str, tensor: str, config: BertConfig) -> _Rule:
  """The kernel of a convolution, [out, in, taps]; ours is [taps * in, out]."""
  return _Rule([leaf], [tensor],
               read=lambda x: [x.T.reshape(-1, len(x))],
               write=lambda x: [x.reshape(-1, config.hidden_size, x.shape[-1]).T])


def _deberta(config: deberta.DebertaConfig) -> list[_Rule]:
  """The encoder of DeBERTa: a layer beside a convolution, if it has one, then the others."""
  layer, rest = _bert_layer(config), range(config.num_layers)
  if not config.share_att_key:
    for name, term in (('key', 'c2p'), ('query', 'p2c')):
      if term in config.pos_att_type:
        layer += _linear(f'attention/pos_{name}', f'attention.self.pos_{name}_proj')
  rules = [
      _per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      *_norm('bert/embeddings/norm', 'embeddings.LayerNorm'),
      _copy('bert/relative/table', 'encoder.rel_embeddings.weight')]
  if config.norm_rel_ebd == 'layer_norm':
    rules += _norm('bert/relative/norm', 'encoder.LayerNorm')
  if config.conv_kernel_size:
    rest = rest[1:]
    rules += [*_in_layer(layer, 'bert/first', 'encoder.layer.0'),
              _convolution('bert/convolution/taps/kernel', 'encoder.conv.conv.weight', config),
              _copy('bert/convolution/taps/bias', 'encoder.conv.conv.bias'),
              *_norm('bert/convolution/norm', 'encoder.conv.LayerNorm')]
  return rules + _in_layer(layer, 'bert/layers', layers=rest, stacked=True)


def _modern(config: modern.ModernConfig) -> list[_Rule]:
  """The encoder of ModernBERT: a first layer without a norm before it, then groups of layers."""
  layer = [
      _qkv('attention/qkv_kernel', ['attn.Wqkv.weight'], config),
      _transpose('attention/out_kernel', 'attn.Wo.weight'),
      _copy('feed_forward_norm/scale', 'mlp_norm.weight'),
      _joined(['feed_forward/up/kernel', 'feed_forward/gate/kernel'], 'mlp.Wi.weight'),
      _transpose('feed_forward/down/kernel', 'mlp.Wo.weight')]
  if config.conv_reach:
    layer += [_copy('attention_convolution/taps', 'attn_convolution.weight'),
              _copy('feed_forward_convolution/taps', 'mlp_convolution.weight')]
  rules = [
      _per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      _copy('bert/embeddings/norm/scale', 'embeddings.norm.weight'),
      _copy('bert/final_norm/scale', 'final_norm.weight'),
      *_in_layer(layer, 'bert/first', 'encoder.layer.0')]
  layer.append(_copy('attention_norm/scale', 'attn_norm.weight'))
  for place, name in enumerate(modern.group_names(config)):
    rules += _in_layer(layer, f'bert/layers/{name}', stacked=True,
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
    encoder = (_deberta if config.architecture == 'deberta-v2' else _bert)(config)
    by_group |= {
        'pooler': _linear('bert/pooler', 'pooler.dense'),
        'mlm': [*_linear('mlm_dense', 'cls.predictions.transform.dense'),
                *_norm('mlm_norm', 'cls.predictions.transform.LayerNorm'), mlm_bias]}
  return encoder + [rule for group in GROUPS if group in present for rule in by_group[group]]


def from_tensors(tensors: Mapping[str, np.ndarray], config: BertConfig, needed: Collection[str],
                 source: Any) -> Any:
  """Builds a tree of parameters, float32, from the tensors of a checkpoint.

  Args:
    tensors: by canonical name.
    config: of the model.
    needed: groups that the checkpoint must have; it may have others.
    source: folder of the checkpoint, for messages.

  Raises:
    UserError: tensors are missing, surplus or of another shape.
  """
  present = [group for group, start in GROUPS.items()
             if group in needed or any(name.startswith(start) for name in tensors)]
  _check_shapes(tensors, config, present, source)
  leaves = {}
  for rule in _rules(config, present):
    layers = [rule.read(*(tensors[name.format(i)].astype(np.float32) for name in rule.tensors))
              for i in rule.layers]
    for leaf, arrays in zip(rule.leaves, zip(*layers)):
      leaves[leaf] = np.stack(arrays) if rule.stacked else arrays[0]
  return {'params': traverse_util.unflatten_dict(leaves, sep='/')}


def to_tensors(params: Any, config: BertConfig) -> dict[str, np.ndarray]:
  """Returns the tensors of a tree of parameters, by canonical name."""
  leaves = traverse_util.flatten_dict(jax.tree.map(np.asarray, params['params']), sep='/')
  tensors = {}
  for rule in _rules(config, groups(params)):
    for place, layer in enumerate(rule.layers):
      arrays = [leaves[leaf][place] if rule.stacked else leaves[leaf] for leaf in rule.leaves]
      tensors.update(zip([name.format(layer) for name in rule.tensors], rule.write(*arrays)))
  return tensors


def shapes(config: BertConfig, present: Collection[str],
           num_labels: int = 0) -> dict[str, tuple[int, ...]]:
  """The shape of each tensor of a model with these groups, by canonical name."""
  abstract = nn.unbox(abstract_params(config, present, num_labels))
  zeros = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), abstract)
  return {name: x.shape for name, x in to_tensors(zeros, config).items()}


def _check_shapes(tensors: Mapping[str, np.ndarray], config: BertConfig, present: Collection[str],
                  source: Any):
  """Raises UserError, naming them, if tensors are missing, surplus or of another shape."""
  expected = shapes(config, present, num_labels(tensors))
  for problem, names in (('lacks tensors', expected.keys() - tensors.keys()),
                         ('has tensors that its architecture does not',
                          tensors.keys() - expected.keys())):
    if names:
      more = f' and {len(names) - 5} more' if len(names) > 5 else ''
      raise UserError(f'{source} {problem}: {", ".join(sorted(names)[:5])}{more}')
  for name, shape in expected.items():
    if tensors[name].shape != shape:
      raise UserError(f'{source}: {name} has shape {list(tensors[name].shape)}, its config asks '
                      f'for {list(shape)}')


def num_labels(tensors: Mapping[str, np.ndarray]) -> int:
  """Returns the number of outputs of the classifier; 0 without one."""
  return np.size(tensors.get('classifier.bias', ()))


def groups(params: Any) -> tuple[str, ...]:
  """The groups that a tree of parameters has."""
  tree = params['params']
  has = {'pooler': 'pooler' in tree['bert'], 'mlm': 'mlm_bias' in tree}
  return tuple(group for group in GROUPS if has.get(group, group in tree))


def abstract_params(config: BertConfig, present: Collection[str], num_labels: int = 0,
                    task: str = '') -> Any:
  """Returns the parameters of a model with these groups: a tree of ShapeDtypeStructs.

  Those of GROUPS are boxed with their logical axes. Others belong to the head of `task`.
  """
  whole = abstract_variables(MaskedLM(BertForPreTraining(config)))['params']
  tree = {name: x for name, x in whole.items()
          if name == 'bert' or ('mlm' in present and name != 'nsp')}
  if 'pooler' not in present:
    tree['bert'] = {name: x for name, x in tree['bert'].items() if name != 'pooler'}
  outputs = functools.partial(dense, config, axes=('embed', 'labels'), dtype=jnp.float32)
  heads = {'nsp': outputs(2), 'rtd': ReplacedTokenHead(config), 'classifier': outputs(num_labels),
           'qa_outputs': outputs(2)}
  hidden = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
  for name, head in heads.items():
    if name in present:
      tree[name] = jax.eval_shape(head.init, jax.random.key(0), hidden)['params']
  others = set(present) - GROUPS.keys()
  if others:
    head = task_list.ALL[task].abstract_params(config, num_labels)['params']
    tree |= {name: head[name] for name in others}
  return {'params': tree}
