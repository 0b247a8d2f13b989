"""An architecture that a user may add: BERT with one more norm after the last layer."""

import dataclasses

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.layers import LayerNorm


@dataclasses.dataclass(frozen=True)
class LastNormConfig(BertConfig):
  """Sizes of the architecture."""

  architecture: str = 'last_norm'


class LastNorm(Encoder):
  """BERT's encoder, then a norm."""

  config: LastNormConfig

  def setup(self):
    super().setup()
    self.last_norm = LayerNorm(self.config)

  def run_layers(self, x, tokens, attend, deterministic):
    x, states = super().run_layers(x, tokens, attend, deterministic)
    return self.last_norm(x), states
