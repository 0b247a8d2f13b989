"""The kind of each parameter, by its name, and the parameter count.

The kind decides what happens to a parameter: the encoder keeps norms in float32, weight
decay excludes some kinds, Muon orthogonalizes the updates of matrices, and LoRA adds
factors to matrices. All of them ask this module, so a new parameter gets its kind once.
"""

import enum
from typing import Any

from flax import linen as nn
import jax

from bert_jax.model.bert_config import BertConfig

Kind = enum.StrEnum('Kind', [
    'MATRIX',  # of a dense layer or a projection, [..., in, out]
    'BIAS',
    'NORM',  # the scale or the bias of a norm
    'TABLE',  # rows of tokens, positions, segments or distances
    'TAPS',  # of a short convolution: one for each neighbor and feature
    'FACTOR'])  # of LoRA

# By the whole name, or by the part after its last underscore: qkv_kernel, mlm_bias.
_BY_NAME = {'kernel': Kind.MATRIX, 'bias': Kind.BIAS, 'taps': Kind.TAPS,
            'token': Kind.TABLE, 'position': Kind.TABLE, 'segment': Kind.TABLE,
            'table': Kind.TABLE, 'token_delta': Kind.TABLE,
            'lora_a': Kind.FACTOR, 'lora_b': Kind.FACTOR}


def kind(path: tuple[Any, ...]) -> Kind:
  """The kind of the parameter at a path of `jax.tree_util`.

  Raises:
    ValueError: the name of the parameter is unknown.
  """
  # The path of a boxed parameter ends with the attribute of its box, which is not a name.
  names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
  name = names[-1]
  if name in ('scale', 'bias') and any('norm' in module for module in names[:-1]):
    return Kind.NORM
  known = _BY_NAME.get(name) or _BY_NAME.get(name.rpartition('_')[2])
  if known is None:
    raise ValueError(f'{"/".join(names)} is a parameter of no known kind: add its name to '
                     f'{__name__}, which decides on its weight decay and its dtype')
  return known


def kinds(params: Any) -> Any:
  """The kind of each parameter, boxed or not, as a tree of the same nested dicts."""
  return jax.tree_util.tree_map_with_path(
      lambda path, _: kind(path), params, is_leaf=lambda x: not isinstance(x, dict))


def count_parameters(boxed: Any, config: BertConfig) -> int:
  """Counts parameters without the padding of the vocabulary.

  Args:
    boxed: a tree of arrays or ShapeDtypeStructs, boxed with their logical axes.
    config: of the model.
  """
  total = 0
  for box in jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned)):
    # Published counts do not have the rows that round the vocabulary up to 128.
    total += (box.value.size // config.padded_vocab_size * config.vocab_size
              if 'vocab' in box.names else box.value.size)
  return total
