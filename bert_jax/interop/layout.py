"""Parameters <-> tensors by name: what a model consists of, whatever its architecture.

What a checkpoint holds besides the encoder comes in groups, each whole or not there at all.
"""

from collections.abc import Callable
from collections.abc import Collection
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.interop import bert_layout
from bert_jax.interop import modern_layout
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.model.heads import ReplacedTokenHead

# What a model may have on top of the encoder, and how the names of its tensors begin.
GROUPS = {'pooler': 'pooler.', 'mlm': 'cls.predictions.', 'nsp': 'cls.seq_relationship.',
          'rtd': 'discriminator_predictions.', 'classifier': 'classifier.',
          'qa_outputs': 'qa_outputs.'}
# Which file knows the names of an architecture.
_LAYOUTS = {'modernbert': modern_layout}


def groups(params: Any) -> tuple[str, ...]:
  """The groups that a tree of parameters has."""
  tree = params['params']
  there = {'pooler': 'pooler' in tree['bert'], 'mlm': 'mlm_bias' in tree,
           **{name: name in tree for name in ('nsp', 'rtd', 'classifier', 'qa_outputs')}}
  return tuple(name for name, present in there.items() if present)


def abstract_params(config: BertConfig, present: Collection[str], num_labels: int = 0) -> Any:
  """The tree of ShapeDtypeStructs, boxed with logical axes, of a model with these groups."""
  tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  tree = jax.eval_shape(BertForPreTraining(config).init, jax.random.key(0), Batch(*[tokens] * 4),
                        tokens, tokens)['params']
  dense = tree.pop('nsp')
  if 'pooler' not in present:
    tree['bert'].pop('pooler')
  if 'mlm' not in present:
    tree = {'bert': tree['bert']}
  if 'rtd' in present:
    vectors = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
    tree['rtd'] = jax.eval_shape(ReplacedTokenHead(config).init, jax.random.key(0),
                                 vectors)['params']
  for name, outputs in (('nsp', 2), ('classifier', num_labels), ('qa_outputs', 2)):
    if name in present:
      tree[name] = {
          'kernel': dense['kernel'].replace_boxed(
              jax.ShapeDtypeStruct((config.hidden_size, outputs), jnp.float32)),
          'bias': dense['bias'].replace_boxed(jax.ShapeDtypeStruct((outputs,), jnp.float32))}
  return {'params': tree}


def from_tensors(get: Callable[[str], np.ndarray], config: BertConfig,
                 present: Collection[str]) -> Any:
  """The tree of parameters, float32, of tensors under their canonical names.

  Args:
    get: gives a tensor by name.
    config: of the model; the shapes are expected to fit it.
    present: groups besides the encoder.
  """
  return _LAYOUTS.get(config.architecture, bert_layout).from_tensors(get, config, present)


def to_tensors(params: Any, config: BertConfig) -> dict[str, np.ndarray]:
  """The tensors of a tree of parameters, under their canonical names; the inverse of the above."""
  return _LAYOUTS.get(config.architecture, bert_layout).to_tensors(params, config)


def expected_shapes(config: BertConfig, present: Collection[str],
                    num_labels: int = 0) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of a model with these groups."""
  abstract = nn.unbox(abstract_params(config, present, num_labels))
  zeros = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), abstract)
  return {name: x.shape for name, x in to_tensors(zeros, config).items()}
