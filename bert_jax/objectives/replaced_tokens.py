"""Replaced token detection: ELECTRA.

Clark et al. 2020, https://arxiv.org/abs/2003.10555. A small generator samples tokens for
the masked positions. The discriminator predicts for every token whether it was replaced.
Both share the embeddings. Only the discriminator is exported.
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


def sample(key: jax.Array, logits: jax.Array, row: jax.Array) -> jax.Array:
  """Samples a token at each position, with a key for each row.

  Args:
    key: the key of the step.
    logits: [B, M, V] float32.
    row: [B] int32, the number of each row in the global batch.

  Returns:
    [B, M] int32.
  """
  return jax.vmap(lambda n, x: jax.random.categorical(jax.random.fold_in(key, n), x))(
      row, logits)


def replace(ids: jax.Array, positions: jax.Array, weights: jax.Array,
            tokens: jax.Array) -> jax.Array:
  """Writes `tokens` [B, M] into `ids` [B, L] at `positions` [B, M] with weight > 0."""
  # Unused slots write past the end of the row, where JAX drops the update.
  where = jnp.where(weights > 0, positions, ids.shape[1])
  return jax.vmap(lambda row, at, new: row.at[at].set(new, mode='drop'))(
      ids, where, tokens)


@dataclasses.dataclass(frozen=True)
class ReplacedTokens(objective.Objective):
  """Trains a generator and a discriminator (`model`); samples pass no gradient."""

  # As published: a binary loss is much smaller than a loss over the vocabulary.
  loss_weights: ClassVar[dict[str, float]] = {'mlm_loss': 1.0, 'rtd_loss': 50.0}

  def __post_init__(self):
    self.model.config.generator()  # raises UserError for sizes that no generator can have

  @property
  def generator(self) -> BertForPreTraining:
    """The masked LM that samples the replacements."""
    return BertForPreTraining(self.model.config.generator())

  def init(self, key: jax.Array) -> Any:
    """Initializes the discriminator and, under 'generator', the rest of the generator."""
    discriminator_key, generator_key = jax.random.split(key)
    tree = self.model.init(discriminator_key, init_tokens(),
                           method='rtd_logits')['params']
    generator = objective.init_masked_lm(self.generator, generator_key)['params']
    # The embeddings are shared: `split` gives the discriminator's to the generator.
    del generator['bert']['embeddings']
    return {'params': {**tree, 'generator': generator}}

  def split(self, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (parameters of the generator, parameters of the discriminator)."""
    discriminator = dict(params['params'])
    generator = discriminator.pop('generator')
    shared = {**generator['bert'], 'embeddings': discriminator['bert']['embeddings']}
    return {**generator, 'bert': shared}, discriminator

  def loss(self, params: Any, frozen: Any, rows: Rows, masked: Masked,
           keys: objective.Keys) -> losses.Metrics:
    """Computes the metrics of both models.

    Returns:
      mlm_loss and mlm_accuracy of the generator; rtd_loss and rtd_accuracy over all real
      tokens, special tokens included; rtd_replaced, the share of replaced tokens.
    """
    first, second = (
        (None, None) if keys.dropout is None else jax.random.split(keys.dropout))
    generator, discriminator = self.split(params)
    tokens = rows.tokens
    logits, _ = self.generator.apply({'params': generator}, tokens, masked.positions,
                                     None, **objective.with_dropout(first))

    # A sample is discrete: the discriminator cannot train the generator through it.
    drawn = sample(keys.sampling, jax.lax.stop_gradient(logits), rows.row)
    ids = replace(tokens.ids, masked.positions, masked.weights, drawn)
    original = replace(tokens.ids, masked.positions, masked.weights, masked.targets)
    # The generator may draw the original token, which then counts as not replaced.
    replaced = (ids != original).astype(jnp.float32)
    scores = self.model.apply({'params': discriminator}, tokens._replace(ids=ids),
                              method='rtd_logits', **objective.with_dropout(second))
    real = (tokens.text_ids > 0).astype(jnp.float32)
    rtd_loss = losses.binary_cross_entropy(scores, replaced)
    return {**losses.classification(logits, masked.targets, masked.weights, 'mlm_'),
            'rtd_loss': losses.weighted(rtd_loss, real),
            'rtd_accuracy': losses.weighted((scores > 0) == (replaced > 0), real),
            'rtd_replaced': losses.weighted(replaced, real)}

  def exported(self, params: Any) -> Any:
    return {'params': {name: tensors for name, tensors in params['params'].items()
                       if name != 'generator'}}

  def flops_per_token(self, length: int, predictions: float) -> float:
    """Model FLOPs per token of both models."""
    c = self.model.config
    # The discriminator has no MLM head; its own head is D x D and D x 1 at every token.
    return (c.flops_per_token(length, 0) + 6 * (c.hidden_size**2 + c.hidden_size)
            + c.generator().flops_per_token(length, predictions))
