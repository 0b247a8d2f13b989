"""Converts parameters to the tensors of a checkpoint and back, by the rules of `rules`.

Besides the encoder a checkpoint has groups of tensors. A group is complete or absent.
"""

from collections.abc import Collection, Mapping
import functools
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.errors import require
from bert_jax.interop import families, rules
from bert_jax.interop.family import GROUPS
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import BertForPreTraining, ReplacedTokenHead
from bert_jax.model.layers import dense
from bert_jax.objectives.objective import MaskedLM, abstract_variables
from bert_jax.tasks import task_list


def _rules(config: BertConfig, present: Collection[str]) -> list[rules.Rule]:
  """Returns all rules of a model with these groups."""
  by_group = families.ALL[config.architecture].tensors(config) | {
      'nsp': rules.linear('nsp', 'cls.seq_relationship'),
      'rtd': [*rules.linear('rtd/dense', 'discriminator_predictions.dense'),
              *rules.linear('rtd/out', 'discriminator_predictions.dense_prediction')],
      'classifier': rules.linear('classifier', 'classifier'),
      'qa_outputs': rules.linear('qa_outputs', 'qa_outputs')}
  own = [group for group in GROUPS if group in present]
  return [rule for group in ('encoder', *own) for rule in by_group[group]]


def from_tensors(tensors: Mapping[str, np.ndarray], config: BertConfig,
                 needed: Collection[str], source: Any) -> Any:
  """Builds a tree of parameters, float32, from the tensors of a checkpoint.

  Args:
    tensors: the tensors by canonical name.
    config: the config of the model.
    needed: the groups that the checkpoint must have; it may have more.
    source: the folder of the checkpoint, for messages.

  Raises:
    UserError: tensors are missing, surplus or of another shape.
  """
  # A group with one tensor counts as present: `_check_shapes` names its missing tensors.
  present = [group for group, start in GROUPS.items()
             if group in needed or any(name.startswith(start) for name in tensors)]
  _check_shapes(tensors, config, present, source)
  leaves = {}
  for rule in _rules(config, present):
    layers = [
        rule.read(*(tensors[name.format(i)].astype(np.float32) for name in rule.tensors))
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
      arrays = [leaves[leaf][place] if rule.stacked else leaves[leaf]
                for leaf in rule.leaves]
      tensors.update(zip([name.format(layer) for name in rule.tensors],
                         rule.write(*arrays)))
  return tensors


def shapes(config: BertConfig, present: Collection[str],
           num_labels: int = 0) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each tensor of a model with these groups, by canonical name."""
  abstract = nn.unbox(abstract_params(config, present, num_labels))
  # Broadcast zeros take no memory, and the rules of `to_tensors` need arrays.
  zeros = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), abstract)
  return {name: x.shape for name, x in to_tensors(zeros, config).items()}


def _check_shapes(tensors: Mapping[str, np.ndarray], config: BertConfig,
                  present: Collection[str], source: Any):
  """Raises UserError for tensors that are missing, surplus or of another shape."""
  expected = shapes(config, present, num_labels(tensors))
  for problem, names in (('lacks tensors', expected.keys() - tensors.keys()),
                         ('has tensors that its architecture does not',
                          tensors.keys() - expected.keys())):
    more = f' and {len(names) - 5} more' if len(names) > 5 else ''
    require(not names, f'{source} {problem}: {", ".join(sorted(names)[:5])}{more}')
  for name, shape in expected.items():
    require(tensors[name].shape == shape,
            f'{source}: {name} has shape {list(tensors[name].shape)}, but its config '
            f'needs {list(shape)}')


def num_labels(tensors: Mapping[str, np.ndarray]) -> int:
  """Returns the number of outputs of the classifier; 0 without one."""
  return np.size(tensors.get('classifier.bias', ()))


def groups(params: Any) -> tuple[str, ...]:
  """Returns the groups of a tree of parameters."""
  tree = params['params']
  has = {'pooler': 'pooler' in tree['bert'], 'mlm': 'mlm_bias' in tree}
  return tuple(group for group in GROUPS if has.get(group, group in tree))


def abstract_params(config: BertConfig, present: Collection[str], num_labels: int = 0,
                    task: str = '') -> Any:
  """Returns the parameters of a model with these groups: a tree of ShapeDtypeStructs.

  Groups in GROUPS are boxed with their logical axes. Other groups belong to the head of
  `task`.
  """
  # The masked LM of every architecture has an encoder and an MLM head. Keep only the
  # groups in `present`.
  whole = abstract_variables(MaskedLM(BertForPreTraining(config)))['params']
  tree = {name: x for name, x in whole.items()
          if name == 'bert' or ('mlm' in present and name != 'nsp')}
  if 'pooler' not in present:
    tree['bert'] = {name: x for name, x in tree['bert'].items() if name != 'pooler'}
  outputs = functools.partial(dense, config, axes=('embed', 'labels'), dtype=jnp.float32)
  heads = {'nsp': outputs(2),
           'rtd': ReplacedTokenHead(config),
           'classifier': outputs(num_labels),
           'qa_outputs': outputs(2)}
  hidden = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
  tree |= {name: jax.eval_shape(head.init, jax.random.key(0), hidden)['params']
           for name, head in heads.items() if name in present}
  others = set(present) - GROUPS.keys()
  # Heads that no class of transformers has, such as the projection of late_interaction.
  if others:
    head = task_list.ALL[task].abstract_params(config, num_labels)['params']
    tree |= {name: head[name] for name in others}
  return {'params': tree}
