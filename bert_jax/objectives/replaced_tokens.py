"""Replaced token detection: ELECTRA (Clark et al. 2020, https://arxiv.org/abs/2003.10555).

A small generator fills the masked positions by sampling; the discriminator tells, for every token,
whether it was replaced. They share the embeddings. Only the discriminator is exported.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from bert_jax.data.rows import Rows
from bert_jax.model.encoder import init_tokens
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import losses, objective
from bert_jax.objectives.masking import Masked
from bert_jax.objectives.objective import Keys


def sample(key: jax.Array, logits: jax.Array, row: jax.Array) -> jax.Array:
  """Draws a token at each position: [B, M, V] logits and the rows' numbers -> [B, M] int32."""
  return jax.vmap(lambda n, x: jax.random.categorical(jax.random.fold_in(key, n), x))(row, logits)


def replace(ids: jax.Array, positions: jax.Array, weights: jax.Array,
            tokens: jax.Array) -> jax.Array:
  """Puts `tokens` [B, M] into `ids` [B, L] at the positions whose weight is not 0."""
  # Unused slots write beyond the row, where the update is dropped.
  where = jnp.where(weights > 0, positions, ids.shape[1])
  return jax.vmap(lambda row, at, new: row.at[at].set(new, mode='drop'))(ids, where, tokens)


@dataclasses.dataclass(frozen=True)
class ReplacedTokens(objective.Objective):
  """Generator and discriminator (`model`), trained together; the sampling passes no gradient."""

  loss_weights: ClassVar[dict[str, float]] = {'mlm_loss': 1.0, 'rtd_loss': 50.0}  # as published

  def __post_init__(self):
    self.model.config.generator()  # refuses sizes that no generator has

  @property
  def generator(self) -> BertForPreTraining:
    """The masked LM that samples the replacements."""
    return BertForPreTraining(self.model.config.generator())

  def init(self, key: jax.Array) -> Any:
    """Variables of the discriminator, and under 'generator' those that it does not share."""
    first, second = jax.random.split(key)
    tree = self.model.init(first, init_tokens(), method='rtd_logits')['params']
    generator = objective.init_masked_lm(self.generator, second)['params']
    del generator['bert']['embeddings']
    return {'params': {**tree, 'generator': generator}}

  def split(self, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of the generator and of the discriminator."""
    discriminator = dict(params['params'])
    generator = discriminator.pop('generator')
    shared = {**generator['bert'], 'embeddings': discriminator['bert']['embeddings']}
    return {**generator, 'bert': shared}, discriminator

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: Keys) -> losses.Metrics:
    """Computes the metrics of both models.

    Returns:
      mlm_loss and mlm_accuracy of the generator; rtd_loss and rtd_accuracy over all tokens, special
      ones too; rtd_replaced, the share of tokens that were replaced by another one.
    """
    del frozen
    first, second = (None, None) if keys.dropout is None else jax.random.split(keys.dropout)
    generator, discriminator = self.split(params)
    tokens = rows.tokens
    logits, _ = self.generator.apply({'params': generator}, tokens, masked.positions, None,
                                     **objective.with_dropout(first))

    drawn = sample(keys.sampling, jax.lax.stop_gradient(logits), rows.row)
    ids = replace(tokens.ids, masked.positions, masked.weights, drawn)
    original = replace(tokens.ids, masked.positions, masked.weights, masked.targets)
    replaced = (ids != original).astype(jnp.float32)  # the generator may draw the original token
    scores = self.model.apply({'params': discriminator}, tokens._replace(ids=ids),
                              method='rtd_logits', **objective.with_dropout(second))
    real = (tokens.text_ids > 0).astype(jnp.float32)
    return {**losses.classification(logits, masked.targets, masked.weights, 'mlm_'),
            'rtd_loss': losses.weighted(jnp.logaddexp(0, scores) - scores * replaced, real),
            'rtd_accuracy': losses.weighted((scores > 0) == (replaced > 0), real),
            'rtd_replaced': losses.weighted(replaced, real)}

  def exported(self, params: Any) -> Any:
    return {'params': {name: x for name, x in params['params'].items() if name != 'generator'}}

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs of both models."""
    c = self.model.config
    return (c.flops_per_token(length, 0) + 6 * (c.hidden_size**2 + c.hidden_size)
            + c.generator().flops_per_token(length, predictions))
