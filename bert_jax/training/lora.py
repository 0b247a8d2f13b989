"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank factors on a frozen model.

A kernel W [..., in, out] becomes W + alpha / rank * A B, with A [..., in, rank] and
B [..., rank, out]. Each of the stacked layers has its own A and B. The encoder without
its pooler is the frozen base. The factors, the pooler and the heads are trained. A step
merges the factors into the base and runs the model on the result, so no module knows
about LoRA.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import operator
import re
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import errors
from bert_jax.model import parameters
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives.losses import Metrics
from bert_jax.tasks.task import Task

_flat = functools.partial(traverse_util.flatten_dict, sep='/')
_nested = functools.partial(traverse_util.unflatten_dict, sep='/')
_A, _B = '/lora_a', '/lora_b'  # appended to the path of their kernel


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """The rank, the scale and the kernels of the factors."""

  rank: int = 0  # the rank of the factors; 0 = no factors, all parameters train
  alpha: float = 16.0  # the product of the factors is scaled by alpha / rank
  # Kernels with factors: qkv, out, up, gate, down, or a module that holds some:
  # attention, feed_forward.
  targets: tuple[str, ...] = ('qkv', 'out')

  def __post_init__(self):
    errors.require(self.rank >= 0, f'lora.rank={self.rank} must not be negative')
    errors.require(self.alpha > 0, f'lora.alpha={self.alpha} must be positive')
    errors.require(bool(self.targets) or not self.rank,
                   f'lora.targets is empty, and lora.rank={self.rank}: name the kernels')


def _is_base(path: str) -> bool:
  return path.startswith('params/bert/') and '/pooler/' not in path


def is_factor(path: str) -> bool:
  """True for the path of a factor."""
  return path.endswith((_A, _B))


def starts_whole(task: Task, params: Any) -> bool:
  """True if `params` have every array of the task that would start at random."""
  fresh = _flat(jax.eval_shape(task.init, jax.random.key(0))).keys() - _flat(params).keys()
  # Biases and scales start as constants, factors with a fixed deviation.
  return all(path.endswith(('bias', 'scale')) or is_factor(path) for path in fresh)


def base_of(params: Any) -> Any:
  """The frozen part of a model's parameters."""
  return _nested({path: x for path, x in _flat(params).items() if _is_base(path)})


def heads_of(params: Any) -> Any:
  """The pooler and heads in a model's parameters, trained without factors; {} = none."""
  return _nested({path: x for path, x in _flat(params).items() if not _is_base(path)})


def _targets(kinds: Mapping[str, parameters.Kind], names: tuple[str, ...]) -> list[str]:
  """The paths of the named kernels; raises UserError for a name without a kernel."""
  parts = {path: re.sub('[/_]kernel$', '', path).split('/')[2:]
           for path, kind in sorted(kinds.items())
           if _is_base(path) and kind == parameters.Kind.MATRIX}
  known = set().union(*parts.values()) - {'layers'}
  for name in names:
    errors.require(name in known,
                   f'lora.targets: {name!r} matches no kernel of this model, it has '
                   f'{", ".join(sorted(known))}')
  return [path for path, kernel_parts in parts.items() if set(names) & set(kernel_parts)]


def init_trained(params: Any, config: LoraConfig, key: jax.Array) -> Any:
  """Initial heads and factors: A is normal with a deviation of in^-1/2, B is zero.

  `params` are the boxed parameters of the whole model.

  Raises:
    UserError: a target matches no kernel.
  """
  flat = _flat(params)
  tree = _flat(heads_of(params))
  for i, path in enumerate(_targets(_flat(parameters.kinds(params)), config.targets)):
    box = flat[path]
    *layers, size, features = box.value.shape
    a = jax.random.normal(jax.random.fold_in(key, i), (*layers, size, config.rank))
    b = jnp.zeros((*layers, config.rank, features))
    # The factors inherit the axes of their kernel. No mesh axis shards the rank.
    tree[path + _A] = box.replace(value=a / math.sqrt(size), names=(*box.names[:-1], None))
    tree[path + _B] = box.replace(value=b, names=(*box.names[:-2], None, box.names[-1]))
  return _nested(tree)


def merge(trained: Any, base: Any, config: LoraConfig) -> Any:
  """The parameters of the whole model, from the unboxed trained and frozen ones."""
  merged, tree = _flat(base), _flat(trained)
  for path, w in merged.items():
    if path + _A in tree:
      product = jnp.matmul(tree.pop(path + _A), tree.pop(path + _B), precision='highest')
      merged[path] = w + config.alpha / config.rank * product
  return _nested(merged | tree)


@dataclasses.dataclass(frozen=True)
class Lora:
  """A `Task` that trains the factors and heads of another task."""

  task: Task
  config: LoraConfig
  base: Any = None  # boxed host arrays; None = zeros of the same shapes, for plans

  model = property(operator.attrgetter('task.model'))
  loss_weights = property(operator.attrgetter('task.loss_weights'))
  # Includes the gradients of all kernels, although the base needs none.
  flops_per_token = property(operator.attrgetter('task.flops_per_token'))

  @property
  def frozen(self) -> Any:
    """The base, and the frozen arrays of the task."""
    # A broadcast zero takes no memory, however large the model of a plan is.
    whole = self.base or jax.tree.map(
        lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape),
        base_of(jax.eval_shape(self.task.init, jax.random.key(0))))
    return {'base': whole, 'task': self.task.frozen}

  def with_config(self, config: BertConfig) -> 'Lora':
    # A plan changes the number of layers: the base of the run then does not fit.
    is_same_size = config.num_layers == self.model.config.num_layers
    return dataclasses.replace(self, task=self.task.with_config(config),
                               base=self.base if is_same_size else None)

  def init(self, key: jax.Array) -> Any:
    return init_trained(self.task.init(key), self.config, jax.random.fold_in(key, 0))

  def loss(self, params: Any, frozen: Any, batch: Any, key: jax.Array | None) -> Metrics:
    return self.task.loss(
        merge(params, frozen['base'], self.config), frozen['task'], batch, key)

  def measure(self, params: Any, frozen: Any, batch: Any) -> Any:
    return self.task.measure(
        merge(params, frozen['base'], self.config), frozen['task'], batch)


def with_factors(task: Task, fields: Any, base: Any = None) -> Task:
  """The task with the factors of the config group `lora`; unchanged if the rank is 0."""
  config = LoraConfig(**fields)
  return Lora(task, config, base) if config.rank else task
