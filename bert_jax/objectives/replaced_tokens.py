"""Replaced token detection: ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555).

A small generator fills the masked positions by sampling; the discriminator tells, of every token,
whether it was replaced. They share the embeddings. What is kept as a model is the discriminator.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.model.electra import ElectraConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.heads import BertForPreTraining
from bert_jax.model.heads import ElectraForPreTraining
from bert_jax.objectives.losses import Metrics
from bert_jax.objectives.losses import cross_entropy
from bert_jax.objectives.losses import weighted
from bert_jax.objectives.objective import Example
from bert_jax.objectives.objective import Keys

_RTD_WEIGHT = 50.0  # of the discriminator's loss, beside 1 for the generator's


def sample(key: jax.Array, logits: jax.Array, row: jax.Array) -> jax.Array:
  """Draws a token at each position: [B, M, V] logits and the rows' numbers -> [B, M] int32."""
  return jax.vmap(lambda n, x: jax.random.categorical(jax.random.fold_in(key, n), x))(row, logits)


def replace(ids: jax.Array, positions: jax.Array, weights: jax.Array,
            tokens: jax.Array) -> jax.Array:
  """`ids` [B, L] with `tokens` [B, M] at those positions whose weight is not 0."""
  # Unused slots write beyond the row, where the update is dropped.
  where = jnp.where(weights > 0, positions, ids.shape[1])
  return jax.vmap(lambda row, at, new: row.at[at].set(new, mode='drop'))(ids, where, tokens)


@dataclasses.dataclass(frozen=True)
class ReplacedTokens:
  """Generator and discriminator, trained together; no gradient goes through the sampling."""

  model: ElectraForPreTraining  # the discriminator

  @property
  def loss_weights(self) -> dict[str, float]:
    """As published."""
    return {'mlm_loss': 1.0, 'rtd_loss': _RTD_WEIGHT}

  @property
  def generator(self) -> BertForPreTraining:
    """The masked LM that the replacements come from."""
    return BertForPreTraining(self.model.config.generator())

  def with_config(self, config: ElectraConfig) -> 'ReplacedTokens':
    """The same with models of other sizes."""
    return ReplacedTokens(ElectraForPreTraining(config))

  def init(self, key: jax.Array) -> Any:
    """Parameters of the discriminator, and under 'generator' those that it does not share."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    batch, (first, second) = Batch(*[tokens] * 4), jax.random.split(key)
    tree = self.model.init(first, batch)['params']
    generator = self.generator.init(second, batch, tokens[:, :1], None)['params']
    del generator['bert']['embeddings']
    return {'params': {**tree, 'generator': generator}}

  def loss(self, params: Any, frozen: Any, example: Example, keys: Keys) -> Metrics:
    """Losses and accuracies.

    Returns:
      mlm_loss and mlm_accuracy of the generator; rtd_loss and rtd_accuracy over all tokens, special
      ones too; rtd_replaced, the share of tokens that were replaced by another one.
    """
    del frozen
    mode = {'deterministic': keys.dropout is None}
    first, second = (None, None) if keys.dropout is None else jax.random.split(keys.dropout)
    discriminator = dict(params['params'])
    generator = discriminator.pop('generator')
    shared = {'bert': {**generator['bert'], 'embeddings': discriminator['bert']['embeddings']}}
    masked, inputs = example.masked, example.inputs
    logits, _ = self.generator.apply(
        {'params': {**generator, **shared}}, inputs, masked.positions, None, **mode,
        rngs={} if first is None else {'dropout': first})
    mlm_loss, mlm_right = cross_entropy(logits, masked.targets)

    drawn = sample(keys.sampling, jax.lax.stop_gradient(logits), example.row)
    ids = replace(inputs.ids, masked.positions, masked.weights, drawn)
    original = replace(inputs.ids, masked.positions, masked.weights, masked.targets)
    replaced = (ids != original).astype(jnp.float32)  # the generator may have found the token
    scores = self.model.apply({'params': discriminator}, inputs._replace(ids=ids), **mode,
                              rngs={} if second is None else {'dropout': second})
    real = (inputs.pair_index > 0).astype(jnp.float32)
    return {'mlm_loss': weighted(mlm_loss, masked.weights),
            'mlm_accuracy': weighted(mlm_right, masked.weights),
            'rtd_loss': weighted(jnp.logaddexp(0, scores) - scores * replaced, real),
            'rtd_accuracy': weighted((scores > 0) == (replaced > 0), real),
            'rtd_replaced': weighted(replaced, real)}

  def exported(self, params: Any) -> Any:
    """The discriminator."""
    return {'params': {name: x for name, x in params['params'].items() if name != 'generator'}}

  def parameters(self) -> int:
    """Of both, the embeddings counted once."""
    c, small = self.model.config, self.model.config.generator()
    embeddings = (c.vocab_size + c.max_positions + c.type_vocab_size + 2) * c.embedding_size
    head = c.hidden_size**2 + 2 * c.hidden_size + 1
    return (c.count_parameters(pooler=False) + head - embeddings
            + small.count_parameters(pooler=False, heads=True))

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Of both."""
    c = self.model.config
    return (c.flops_per_token(length, 0) + 6 * (c.hidden_size**2 + c.hidden_size)
            + c.generator().flops_per_token(length, predictions))
