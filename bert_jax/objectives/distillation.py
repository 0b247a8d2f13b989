"""Distillation: DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108).

The student learns the words themselves, the teacher's distribution over the vocabulary at the same
positions, and the direction of the teacher's hidden states.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.config import BertConfig
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
  def weights(self) -> dict[str, float]:
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
    """soft_loss and mlm_loss at the masked positions, cosine_loss at all, mlm_accuracy."""
    masked, inputs = example.masked, example.inputs
    rngs = {} if keys.dropout is None else {'dropout': keys.dropout}

    def run(module, batch, positions, **kwargs):
      hidden = module.bert.encode(batch, **kwargs)
      return hidden, module.mlm_logits(hidden, positions)

    hidden, logits = self.model.apply(params, inputs, masked.positions, method=run, rngs=rngs,
                                      deterministic=keys.dropout is None)
    theirs, their_logits = self.teacher.apply(frozen, inputs, masked.positions, method=run)
    mlm_loss, mlm_right = cross_entropy(logits, masked.targets)
    real = (inputs.pair_index > 0).astype(jnp.float32)
    return {'soft_loss': weighted(soft_cross_entropy(logits, their_logits), masked.weights),
            'mlm_loss': weighted(mlm_loss, masked.weights),
            'mlm_accuracy': weighted(mlm_right, masked.weights),
            'cosine_loss': weighted(cosine_distance(hidden, theirs), real)}

  def exported(self, params: Any) -> Any:
    """All of them."""
    return params

  def parameters(self) -> int:
    """Of the student."""
    return self.model.config.count_parameters(pooler=False, heads=True)

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Of both; the teacher has no backward pass."""
    return (self.model.config.flops_per_token(length, predictions)
            + self.teacher.config.flops_per_token(length, predictions) / 3)
