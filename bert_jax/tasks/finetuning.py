"""The device half of fine-tuning: a head on the encoder, and its loss on packed examples.

The host half is in `finetuning_data`; `task_kind` has what a trained model answers.
"""

import abc
from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.labelled.packed_examples import Batch
from bert_jax.model import bert_config, dropout_bits, encoder, layers
from bert_jax.objectives import losses


def output_layer(config: bert_config.BertConfig, outputs: int) -> nn.Dense:
  """The last layer of a head: [..., D] -> [..., outputs] float32."""
  return layers.dense(config, outputs, ('embed', 'labels'), dtype=jnp.float32)


def choice_scores(apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
  """The score of each input of an example, [E, C]; -1e9 where an example has fewer inputs."""
  scores = batch.by_example(apply(batch.tokens, batch.starts))[..., 0]
  return jnp.where(batch.members >= 0, scores, layers.MASKED)


@dataclasses.dataclass(frozen=True)
class FineTuning(abc.ABC):
  """The device half of a task (`task.Task`): each fine-tuning task is a subclass.

  The model is called with [R, L] inputs and the [R, P] positions of [CLS].
  """

  model: nn.Module

  loss_weights: ClassVar[dict[str, float]] = {'loss': 1.0}
  frozen: ClassVar[dict[str, Any]] = {}

  def with_config(self, config: bert_config.BertConfig) -> 'FineTuning':
    """This task with a model of other sizes."""
    return dataclasses.replace(self, model=self.model.clone(config=config))

  def init(self, key: jax.Array) -> Any:
    tokens = encoder.init_tokens()
    return self.model.init(key, tokens, tokens.ids[:, :1])

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """The head's outputs; `apply` runs the model, with dropout or without."""
    return apply(batch.tokens, batch.starts)

  @abc.abstractmethod
  def metrics(self, logits: jax.Array, batch: Batch) -> losses.Metrics:
    """'loss' and other metrics of a batch."""

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The part of the logits that the scores need: an evaluation fetches no more."""
    return logits

  def _applied(self, params: Any, row: jax.Array, key: jax.Array | None) -> Callable:
    """The model as a function of its inputs; `row` [R] holds the numbers of their rows."""
    rngs = {}
    if key is not None:
      rngs['dropout'] = dropout_bits.microbatch_key(key, row)
    return functools.partial(self.model.apply,
                             params,
                             deterministic=key is None,
                             rngs=rngs)

  def _forward(self, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    return self.logits(self._applied(params, batch.row, key), batch)

  def loss(self, params: Any, frozen: Any, batch: Batch,
           key: jax.Array | None) -> losses.Metrics:
    del frozen
    return {**self.metrics(self._forward(params, batch, key), batch),
            'tokens': losses.token_count(batch.tokens.text_ids)}

  def measure(self, params: Any, frozen: Any,
              batch: Batch) -> tuple[losses.Metrics, jax.Array]:
    """(metrics, reduced logits), without dropout."""
    del frozen
    logits = self._forward(params, batch, None)
    return self.metrics(logits, batch), self.reduced(logits)

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs of the encoder."""
    return self.model.config.flops_per_token(length, 0)
