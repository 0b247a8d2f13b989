"""The kind of each parameter, by its name.

The kind decides what happens to a parameter: the encoder keeps norms in float32, weight
decay excludes some kinds, Muon orthogonalizes matrices, LoRA adds factors to matrices.
All of them ask this module, so that a new parameter gets its kind once.
"""

import enum
from typing import Any

import jax

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
    ValueError: no rule knows the name of the parameter.
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
  """The kind of each parameter of a tree of dicts, boxed or not, in the same dicts."""
  return jax.tree_util.tree_map_with_path(
      lambda path, _: kind(path), params, is_leaf=lambda x: not isinstance(x, dict))
