"""Distillation: DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108).

The student learns the masked words themselves, and at all real tokens the teacher's distribution
over the vocabulary and the direction of its hidden states, as the authors' `distiller.py` does.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bert_jax.data.rows import Rows
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import losses, objective
from bert_jax.objectives.masking import Masked
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
class Distillation(objective.Objective):
  """A student (`model`) and its frozen teacher, of the same vocabulary and width."""

  teacher: BertForPreTraining

  loss_weights: ClassVar[dict[str, float]] = {
      'soft_loss': 5.0, 'mlm_loss': 2.0, 'cosine_loss': 1.0}  # as published

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """mlm_loss and mlm_accuracy at the masked positions, soft_loss and cosine_loss at all."""
    tokens = rows.tokens

    def encode(module, tokens, **kwargs):
      return module.bert.encode(tokens, **kwargs)

    student = self.model.apply(params, tokens, method=encode,
                               **objective.with_dropout(keys.dropout))  # [B, L, D]
    teacher = self.teacher.apply(frozen, tokens, method=encode)  # [B, L, D]
    logits = self.model.apply(params, student, masked.positions, method='mlm_logits')
    real = (tokens.text_ids > 0).astype(jnp.float32)
    soft_loss = self._soft_loss(params, frozen, student, teacher, real, masked.positions.shape[1])
    return {'soft_loss': (soft_loss, jnp.sum(real)),
            **losses.classification(logits, masked.targets, masked.weights, 'mlm_'),
            'cosine_loss': losses.weighted(cosine_distance(student, teacher), real)}

  def _soft_loss(self, params: Any, frozen: Any, student: jax.Array, teacher: jax.Array,
                 real: jax.Array, at_once: int) -> jax.Array:
    """Sums the soft loss over the real tokens [B, L] of [B, L, D] hidden states.

    Logits at all positions would be the largest thing in memory: those of `at_once` positions of
    each row are computed at a time, and again in the backward pass.
    """
    length = real.shape[1]
    pieces = -(-length // at_once)

    def split(x):
      """[B, L, ...] -> [pieces, B, at_once, ...], filled up with zeros."""
      x = jnp.pad(x, [(0, 0), (0, pieces * at_once - length), *[(0, 0)] * (x.ndim - 2)])
      return jnp.moveaxis(x.reshape(len(x), pieces, at_once, *x.shape[2:]), 1, 0)

    def add(total, piece):
      student, teacher, real = piece
      every = jnp.broadcast_to(jnp.arange(at_once), real.shape)
      student = self.model.apply(params, student, every, method='mlm_logits')
      teacher = self.teacher.apply(frozen, teacher, every, method='mlm_logits')
      return total + losses.weighted(soft_cross_entropy(student, teacher), real)[0], None

    total, _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), jnp.float32(0),
                            (split(student), split(teacher), split(real)))
    return total

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of both, with logits at every token and no backward pass of the teacher."""
    del predictions  # their logits are among those of all tokens
    return (self.model.config.flops_per_token(length, 1)
            + self.teacher.config.flops_per_token(length, 1) / 3)
