"""The device half of fine-tuning: a head on the encoder, and its loss on packed examples.

The host half is in `finetuning_data`. The answers of a trained model are in `task_kind`.
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
from bert_jax.objectives import losses, objective


def output_layer(config: bert_config.BertConfig, outputs: int) -> nn.Dense:
  """Makes the last layer of a head: [..., D] -> [..., outputs] float32."""
  return layers.dense(config, outputs, ('embed', 'labels'), dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class FineTuning(abc.ABC):
  """The device half of a task (`task.Task`); each fine-tuning task is a subclass.

  The model takes `Tokens` [R, L] and the positions of [CLS], [R, P] int32. For the other
  letters of the shapes, see `labelled.packed_examples.Batch`.
  """

  model: nn.Module

  loss_weights: ClassVar[dict[str, float]] = {'loss': 1.0}
  frozen: ClassVar[dict[str, Any]] = {}

  def with_config(self, config: bert_config.BertConfig) -> 'FineTuning':
    """Returns this task for a model with another config."""
    return dataclasses.replace(self, model=self.model.clone(config=config))

  def init(self, key: jax.Array) -> Any:
    tokens = encoder.init_tokens()
    return self.model.init(key, tokens, tokens.ids[:, :1])

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """Returns the outputs of the head; `apply` is `model.apply` with its parameters."""
    return apply(batch.tokens, batch.starts)

  @abc.abstractmethod
  def metrics(self, logits: jax.Array, batch: Batch) -> losses.Metrics:
    """Returns 'loss' and other metrics of a batch; `logits` come from `self.logits`."""

  def reduced(self, logits: jax.Array) -> jax.Array:
    """Returns the part of the logits that the scores need; only this goes to the host."""
    return logits

  def _applied(self, params: Any, row: jax.Array, key: jax.Array | None) -> Callable:
    """Returns the model as a function of its inputs; `row` [R] has the row numbers."""
    # Microbatches must not share dropout: their lowest row number distinguishes them.
    dropout = None if key is None else dropout_bits.microbatch_key(key, row)
    return functools.partial(self.model.apply, params, **objective.with_dropout(dropout))

  def _forward(self, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    return self.logits(self._applied(params, batch.row, key), batch)

  def loss(self, params: Any, frozen: Any, batch: Batch,
           key: jax.Array | None) -> losses.Metrics:
    return {**self.metrics(self._forward(params, batch, key), batch),
            'tokens': losses.token_count(batch.tokens.text_ids)}

  def measure(self, params: Any, frozen: Any,
              batch: Batch) -> tuple[losses.Metrics, jax.Array]:
    """Returns (metrics, reduced logits), without dropout."""
    logits = self._forward(params, batch, None)
    return self.metrics(logits, batch), self.reduced(logits)

  def flops_per_token(self, length: int) -> float:
    """Returns the model FLOPs per token of the encoder, without the head."""
    return self.model.config.flops_per_token(length, 0)


class InputScoring(FineTuning):
  """Scores each input of an example; the loss compares the inputs of one example."""

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """Returns [E, C] scores; -1e9 where an example has fewer inputs."""
    # Not -inf: an example of padding has no input, and its softmax would be NaN.
    scores = batch.by_example(apply(batch.tokens, batch.starts))[..., 0]
    return jnp.where(batch.members >= 0, scores, layers.MASKED)
