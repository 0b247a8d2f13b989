"""ELECTRA's encoder (Clark et al. 2020, https://arxiv.org/abs/2003.10555)."""

import dataclasses

import jax

from bert_jax.errors import UserError
from bert_jax.model.albert import projection
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.encoder import Bert
from bert_jax.model.encoder import gelu


@dataclasses.dataclass(frozen=True)
class ElectraConfig(BertConfig):
  """Sizes of a discriminator; its generator has the same embeddings, and layers of a share."""

  architecture: str = 'electra'
  embedding_size: int = 768  # E; projected where it is not D
  generator_size: float = 1 / 3  # D, H and F of the generator, as a share of the discriminator's

  def __post_init__(self):
    super().__post_init__()
    self._check_at_least_one('embedding_size')
    if not 0 < self.generator_size <= 1:
      raise UserError(f'model.generator_size={self.generator_size} must lie in (0, 1]: a generator '
                      'is no larger than its discriminator')

  @property
  def projects(self) -> bool:
    """Where E is not D."""
    return self.embedding_size != self.hidden_size

  def generator(self) -> 'ElectraConfig':
    """Sizes of the generator: as many layers, the width of a head the same.

    Raises:
      UserError: the share of the heads is no whole number.
    """
    heads = round(self.num_heads * self.generator_size)
    if not heads or abs(heads / self.num_heads - self.generator_size) > 0.01:
      raise UserError(f'model.generator_size={self.generator_size} of model.num_heads='
                      f'{self.num_heads} is no number of heads')
    return dataclasses.replace(
        self, hidden_size=heads * self.head_size, num_heads=heads,
        intermediate_size=round(self.intermediate_size * heads / self.num_heads))


class Electra(Bert):
  """BERT with embeddings of another width, and GELU in the pooler of its classifier."""

  config: ElectraConfig
  pool_activation = staticmethod(gelu)

  def setup(self):
    super().setup()
    if self.config.projects:
      self.projection = projection(self.config)

  def embed(self, batch: Batch, deterministic: bool) -> jax.Array:
    """[B, L, E], projected to [B, L, D]."""
    x = super().embed(batch, deterministic)
    return self.projection(x) if self.config.projects else x
