"""Distillation: DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108).

As in the authors' `distiller.py`, the student learns the masked tokens, and at every real
token it matches the teacher's distribution over the vocabulary and the direction of the
teacher's hidden state.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bert_jax.data.rows import Rows
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import losses, objective
from bert_jax.objectives.masking import Masked

_TEMPERATURE = 2.0


def cosine_distance(a: jax.Array, b: jax.Array) -> jax.Array:
  """1 - cos(a, b) in float32: [..., D] -> [...]."""
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  norms = jnp.sqrt(jnp.sum(a * a, -1) * jnp.sum(b * b, -1))
  return 1 - jnp.sum(a * b, -1) / jnp.maximum(norms, 1e-8)


@dataclasses.dataclass(frozen=True)
class Distillation(objective.Objective):
  """A student (`model`) and its frozen teacher, with equal vocabulary and width."""

  teacher: BertForPreTraining

  loss_weights: ClassVar[dict[str, float]] = {
      'soft_loss': 5.0, 'mlm_loss': 2.0, 'cosine_loss': 1.0}  # as published

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: objective.Keys) -> losses.Metrics:
    """Computes MLM metrics at masked positions, and the other losses at real tokens."""
    tokens = rows.tokens

    # Computes only hidden states: the heads run later, on pieces of the rows.
    def encode(module, tokens, **kwargs):
      return module.bert.encode(tokens, **kwargs)

    student = self.model.apply(params, tokens, method=encode,
                               **objective.with_dropout(keys.dropout))  # [B, L, D]
    teacher = self.teacher.apply(frozen, tokens, method=encode)  # [B, L, D]
    logits = self.model.apply(params, student, masked.positions, method='mlm_logits')
    # Padding has arbitrary states and no text to learn from.
    real = (tokens.text_ids > 0).astype(jnp.float32)
    soft_loss = self._soft_loss(
        params, frozen, student, teacher, real, masked.positions.shape[1])
    return {'soft_loss': (soft_loss, jnp.sum(real)),
            **losses.classification(logits, masked.targets, masked.weights, 'mlm_'),
            'cosine_loss': losses.weighted(cosine_distance(student, teacher), real)}

  def _soft_loss(self, params: Any, frozen: Any, student: jax.Array, teacher: jax.Array,
                 real: jax.Array, piece_length: int) -> jax.Array:
    """Sums the soft loss over the real tokens [B, L] of [B, L, D] hidden states.

    The logits of all positions would be the largest array of the step. Therefore the loop
    computes the logits of `piece_length` positions of each row at a time, and the
    backward pass recomputes them.
    """
    length = real.shape[1]
    pieces = -(-length // piece_length)

    def split(x):
      """[B, L, ...] -> [pieces, B, piece_length, ...], padded with zeros."""
      x = jnp.pad(
          x, [(0, 0), (0, pieces * piece_length - length), *[(0, 0)] * (x.ndim - 2)])
      return jnp.moveaxis(x.reshape(len(x), pieces, piece_length, *x.shape[2:]), 1, 0)

    def add(total, piece):
      student, teacher, real = piece
      positions = jnp.broadcast_to(jnp.arange(piece_length), real.shape)
      student = self.model.apply(params, student, positions, method='mlm_logits')
      teacher = self.teacher.apply(frozen, teacher, positions, method='mlm_logits')
      divergence = losses.soft_divergence(student, teacher, _TEMPERATURE)
      return total + losses.weighted(divergence, real)[0], None

    # Inside a scan XLA cannot merge the forward and the recomputed logits, so the
    # barriers that prevent_cse=True adds would only cost time.
    total, _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), jnp.float32(0),
                            (split(student), split(teacher), split(real)))
    return total

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs per token of student and teacher."""
    # Every token has logits, so `predictions` does not matter. Without a backward pass,
    # the teacher costs a third of a training step.
    return (self.model.config.flops_per_token(length, 1)
            + self.teacher.config.flops_per_token(length, 1) / 3)
