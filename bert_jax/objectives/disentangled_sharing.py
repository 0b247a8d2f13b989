"""Replaced token detection with gradient-disentangled embedding sharing: DeBERTa v3.

He et al. 2021, https://arxiv.org/abs/2111.09543, section 3.3. In ELECTRA, masked LM and
replaced token detection pull the shared token embeddings in different directions. Here
only the masked LM trains the table that both models read. The discriminator adds a second
table to it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.objectives import objective
from bert_jax.objectives.replaced_tokens import ReplacedTokens


def _with_tokens(tree: dict[str, Any], table: jax.Array) -> dict[str, Any]:
  """Returns the parameters of a model with its token table replaced, [padded V, E]."""
  bert = tree['bert']
  return {**tree, 'bert': {**bert, 'embeddings': {**bert['embeddings'], 'token': table}}}


@dataclasses.dataclass(frozen=True)
class DisentangledSharing(ReplacedTokens):
  """Shares only the token table, and passes only the generator's gradient to it."""

  def init(self, key: jax.Array) -> Any:
    """Initializes the discriminator, the rest of the 'generator', and 'token_delta'.

    The discriminator adds 'token_delta' to the token table. The delta starts at zero, so
    both models start from the same table: with `init_from`, the table of that model.
    """
    discriminator_key, generator_key = jax.random.split(key)
    tree = super().init(discriminator_key)['params']
    generator = objective.init_masked_lm(self.generator, generator_key)['params']
    # The tree of the discriminator holds the one shared table.
    table = generator['bert']['embeddings'].pop('token')
    return {'params': {**_with_tokens(tree, table), 'generator': generator,
                       'token_delta': jax.tree.map(jnp.zeros_like, table)}}

  def split(self, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    discriminator = dict(params['params'])
    generator, delta = discriminator.pop('generator'), discriminator.pop('token_delta')
    table = discriminator['bert']['embeddings']['token']
    # The loss of the discriminator trains only the delta.
    tokens = jax.lax.stop_gradient(table) + delta
    return _with_tokens(generator, table), _with_tokens(discriminator, tokens)

  def exported(self, params: Any) -> Any:
    """Returns the discriminator, with the sum of both token tables.

    A DeBERTa is exported without its detection head, because transformers has no DeBERTa
    class with such a head.
    """
    discriminator = self.split(params)[1]
    names = ('bert',) if self.model.config.architecture == 'deberta-v2' else ('bert', 'rtd')
    return {'params': {name: discriminator[name] for name in names}}
