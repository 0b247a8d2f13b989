"""Distillation: DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108).

The student learns the masked words themselves, and at all real tokens the teacher's distribution
over the vocabulary and the direction of its hidden states, as the authors' `distiller.py` does.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.objectives.objective import Example
from bert_jax.objectives.objective import Keys

_TEMPERATURE = 2.0


def soft_cross_entropy(student: jax.Array, teacher: jax.Array) -> jax.Array:
  """T^2 KL(teacher || student) of softened logits (Hinton et al. 2015): [..., V] -> [...]."""
  student, teacher = (jax.nn.log_softmax(x / _TEMPERATURE) for x in (student, teacher))
  return _TEMPERATURE**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def cosine_distance(a: jax.Array, b: jax.Array) -> jax.Array:
  """1 - cos(a, b) in float32: [..., D] -> [...]."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  norms = jnp.sqrt(jnp.sum(a * a, -1) * jnp.sum(b * b, -1))
  return 1 - jnp.sum(a * b, -1) / jnp.maximum(norms, 1e-8)


@dataclasses.dataclass(frozen=True)
class Distillation:
  """A student and its teacher, of the same vocabulary and width; the teacher is frozen."""

  model: BertForPreTraining  # the student
  teacher: BertForPreTraining

  @property
  def loss_weights(self) -> dict[str, float]:
    """As published."""
    return {'soft_loss': 5.0, 'mlm_loss': 2.0, 'cosine_loss': 1.0}

  def with_config(self, config: BertConfig) -> 'Distillation':
    """The same with a student of other sizes."""
    return dataclasses.replace(self, model=type(self.model)(config))

  def init(self, key: jax.Array) -> Any:
    """Parameters of the student, boxed with their logical axes."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return self.model.init(key, Batch(*[tokens] * 4), tokens[:, :1], None)

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> Metrics:
    """mlm_loss and mlm_accuracy at the masked positions, soft_loss and cosine_loss at all."""
    masked, inputs = example.masked, example.inputs
    rngs = {} if keys.dropout is None else {'dropout': keys.dropout}

    def encode(module, batch, **kwargs):
      return module.bert.encode(batch, **kwargs)

    hidden = self.model.apply(params, inputs, method=encode, rngs=rngs,
                              deterministic=keys.dropout is None)
    theirs = self.teacher.apply(frozen, inputs, method=encode)
    logits = self.model.apply(params, hidden, masked.positions, method='mlm_logits')
    mlm_loss, mlm_right = cross_entropy(logits, masked.targets)
    real = (inputs.pair_index > 0).astype(jnp.float32)
    at_once = masked.positions.shape[1]
    return {'soft_loss': self._soft_loss(params, frozen, hidden, theirs, real, at_once),
            'mlm_loss': weighted(mlm_loss, masked.weights),
            'mlm_accuracy': weighted(mlm_right, masked.weights),
            'cosine_loss': weighted(cosine_distance(hidden, theirs), real)}

  def _soft_loss(self, params: Any, frozen: Any, hidden: jax.Array, theirs: jax.Array,
                 real: jax.Array, at_once: int) -> tuple[jax.Array, jax.Array]:
    """(sum, count) over the real tokens of [B, L, D] hidden states of student and teacher.

    Logits at all positions would be the largest thing in memory: those of `at_once` positions of
    each row are made at a time, and again in the backward pass.
    """
    length = real.shape[1]
    pieces = -(-length // at_once)

    def split(x):  # [B, L, ...] -> [pieces, B, at_once, ...], filled up with zeros
      x = jnp.pad(x, [(0, 0), (0, pieces * at_once - length), *[(0, 0)] * (x.ndim - 2)])
      return jnp.moveaxis(x.reshape(len(x), pieces, at_once, *x.shape[2:]), 1, 0)

    def add(total, piece):
      hidden, theirs, real = piece
      every = jnp.broadcast_to(jnp.arange(at_once), real.shape)
      student = self.model.apply(params, hidden, every, method='mlm_logits')
      teacher = self.teacher.apply(frozen, theirs, every, method='mlm_logits')
      return total + weighted(soft_cross_entropy(student, teacher), real)[0], None

    total, _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), jnp.float32(0),
                            (split(hidden), split(theirs), split(real)))
    return total, jnp.sum(real)

  def exported(self, params: Any) -> Any:
    """All of them."""
    return params

  def parameters(self) -> int:
    """Of the student."""
    return self.model.config.count_parameters(pooler=False, heads=True)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Of both, with logits at every token; the teacher has no backward pass."""
    del predictions  # their logits are among those of all tokens
    return (self.model.config.flops_per_token(length, 1)
            + self.teacher.config.flops_per_token(length, 1) / 3)
