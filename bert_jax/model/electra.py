"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): the sizes of its two encoders."""

import dataclasses
from typing import ClassVar

from bert_jax.errors import require
from bert_jax.model.bert_config import BertConfig


@dataclasses.dataclass(frozen=True)
class ElectraConfig(BertConfig):
  """Sizes of a discriminator; the generator shares its embeddings and is narrower."""

  architecture: str = 'electra'
  embedding_size: int = 768  # E, the width of the token table; projected to D
  # D, H and F of the generator, as a share of the discriminator's.
  generator_size: float = 1 / 3

  mlm_activation: ClassVar[str] = 'gelu'
  pooler_activation: ClassVar[str] = 'gelu'

  def __post_init__(self):
    super().__post_init__()
    self._check_at_least_one('embedding_size')
    require(0 < self.generator_size <= 1,
            f'model.generator_size={self.generator_size} must lie in (0, 1]: a generator is '
            'not larger than its discriminator')

  def generator(self) -> 'ElectraConfig':
    """Returns the config of the generator: fewer heads, with the same N and K.

    Raises:
      UserError: the share of the heads is not a whole number.
    """
    heads = round(self.num_heads * self.generator_size)
    # Configs round the share: 0.33 stands for a third.
    require(heads > 0 and abs(heads / self.num_heads - self.generator_size) <= 0.01,
            f'model.generator_size={self.generator_size} of '
            f'model.num_heads={self.num_heads} is not a whole number of heads')
    return dataclasses.replace(
        self, hidden_size=heads * self.head_size, num_heads=heads,
        intermediate_size=round(self.intermediate_size * heads / self.num_heads))
