"""The device half of a fine-tuning task: a head on the encoder and its loss on packed examples."""

import abc
from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.labelled.packed_examples import Batch
from bert_jax.model import dropout_bits, embeddings
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch as Inputs
from bert_jax.objectives.losses import Metrics


def output_layer(config: BertConfig, outputs: int) -> nn.Dense:
  """The last layer of a head: [..., D] -> [..., outputs] float32."""
  return nn.Dense(
      outputs, dtype=jnp.float32, bias_init=embeddings.zeros('labels'),
      kernel_init=embeddings.truncated_normal(config.initializer_range, 'embed', 'labels'))


@functools.partial(jax.jit, static_argnames=('head', 'method'))
def apply_head(head: nn.Module, params: Any, batch: Inputs, starts: jax.Array,
               method: str | None = None) -> jax.Array:
  """Runs a head without dropout, compiled once for each head and shape."""
  return head.apply(params, batch, starts, method=method)


@dataclasses.dataclass(frozen=True)
class FineTuning(abc.ABC):
  """A model with a head, called with [R, L] inputs and the [R, P] positions of [CLS]."""

  model: nn.Module

  def with_config(self, config: BertConfig) -> 'FineTuning':
    """The same task with a model of other sizes."""
    return dataclasses.replace(self, model=self.model.clone(config=config))

  @property
  def loss_weights(self) -> dict[str, float]:
    return {'loss': 1.0}

  @property
  def frozen(self) -> dict[str, Any]:
    return {}

  def init(self, key: jax.Array) -> Any:
    """Parameters, boxed with their logical axes."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return self.model.init(key, Inputs(*[tokens] * 4), tokens[:, :1])

  def logits(self, apply: Callable[..., jax.Array], batch: Batch) -> jax.Array:
    """The head's outputs; `apply` runs the model, with dropout or without."""
    return apply(batch.inputs, batch.starts)

  @abc.abstractmethod
  def metrics(self, logits: jax.Array, batch: Batch) -> Metrics:
    """'loss' and other metrics of a batch."""

  def reduced(self, logits: jax.Array) -> jax.Array:
    """The part of the logits that the scores need: an evaluation fetches no more."""
    return logits

  def _forward(self, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
    rngs = {}
    if key is not None:
      # Every microbatch of a step gets the same key: its first row tells them apart.
      rngs['dropout'] = dropout_bits.key_of(jax.random.fold_in(key, jnp.min(batch.row)))

    def apply(*args, **kwargs):
      return self.model.apply(params, *args, deterministic=key is None, rngs=rngs, **kwargs)

    return self.logits(apply, batch)

  def loss(self, params: Any, frozen: Any, batch: Batch, key: jax.Array | None) -> Metrics:
    """The metrics, and 'tokens': the real tokens of the batch."""
    del frozen
    tokens = jnp.sum(batch.inputs.pair_index > 0).astype(jnp.float32)
    return {**self.metrics(self._forward(params, batch, key), batch),
            'tokens': (tokens, jnp.float32(1))}

  def measure(self, params: Any, frozen: Any, batch: Batch) -> tuple[Metrics, jax.Array]:
    """(metrics, reduced logits), without dropout."""
    del frozen
    logits = self._forward(params, batch, None)
    return self.metrics(logits, batch), self.reduced(logits)

  def flops_per_token(self, length: int) -> float:
    """Model FLOPs of the encoder."""
    return self.model.config.flops_per_token(length, 0)
