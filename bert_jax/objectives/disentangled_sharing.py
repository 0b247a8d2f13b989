"""Replaced token detection with gradient-disentangled embedding sharing: DeBERTa v3.

He et al. 2021, https://arxiv.org/abs/2111.09543, section 3.3. The masked LM and the detection of
replaced tokens pull the token embeddings of ELECTRA in different directions. Here the masked LM
alone trains the table that both models read; the discriminator adds a table of its own to it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.objectives import objective
from bert_jax.objectives.replaced_tokens import ReplacedTokens


def _with_tokens(tree: dict[str, Any], table: jax.Array) -> dict[str, Any]:
  """The parameters of a model with another token table, [padded V, E]."""
  bert = tree['bert']
  return {**tree, 'bert': {**bert, 'embeddings': {**bert['embeddings'], 'token': table}}}


@dataclasses.dataclass(frozen=True)
class DisentangledSharing(ReplacedTokens):
  """Generator and discriminator that share the tokens alone, whose gradient is the generator's."""

  def init(self, key: jax.Array) -> Any:
    """Variables of the discriminator, under 'generator' those that it does not share, and a delta.

    'token_delta', zeros at first, is what the discriminator adds to the token table. So a run that
    starts from another model begins with its table in both models.
    """
    first, second = jax.random.split(key)
    tree = super().init(first)['params']
    generator = objective.init_masked_lm(self.generator, second)['params']
    table = generator['bert']['embeddings'].pop('token')
    return {'params': {**_with_tokens(tree, table), 'generator': generator,
                       'token_delta': jax.tree.map(jnp.zeros_like, table)}}

  def split(self, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    discriminator = dict(params['params'])
    generator, delta = discriminator.pop('generator'), discriminator.pop('token_delta')
    table = discriminator['bert']['embeddings']['token']
    tokens = jax.lax.stop_gradient(table) + delta
    return _with_tokens(generator, table), _with_tokens(discriminator, tokens)

  def exported(self, params: Any) -> Any:
    """Returns the discriminator, with the sum of both tables.

    It comes without its head for DeBERTa: transformers has no class of DeBERTa with that head.
    """
    discriminator = self.split(params)[1]
    names = ('bert',) if self.model.config.architecture == 'deberta-v2' else ('bert', 'rtd')
    return {'params': {name: discriminator[name] for name in names}}
