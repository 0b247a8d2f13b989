"""ALBERT (Lan et al. 2020, arXiv:1909.11942): narrow embeddings, shared layers."""

import dataclasses

from flax import linen as nn
import jax

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.model import encoder
from bert_jax.model.attention import Attend, Mask
from bert_jax.model.bert_config import BertConfig


@dataclasses.dataclass(frozen=True)
class AlbertConfig(BertConfig):
  """Sizes of an ALBERT; the published models differ in D, F, H and N."""

  architecture: str = 'albert'
  embedding_size: int = 128  # E, the width of the token table
  groups: int = 1  # G, layers with their own parameters; each runs N / G times in a row

  def __post_init__(self):
    super().__post_init__()
    self._check_at_least_one('embedding_size', 'groups')
    require(self.num_layers % self.groups == 0,
            f'model.num_layers={self.num_layers} is not divisible by '
            f'model.groups={self.groups}: each group is applied as often as the others')

  @property
  def projects(self) -> bool:
    return True  # also where E = D

  @property
  def stacked_layers(self) -> int:
    return self.groups

  @property
  def fewest_layers(self) -> tuple[int, int]:
    return self.groups, 2 * self.groups


class SharedLayer(nn.Module):
  """One layer, applied N / G times; one step of the scan over groups."""

  config: AlbertConfig
  attend: Attend
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, mask: Mask) -> tuple[jax.Array, encoder.States | None]:
    """[B, L, D] -> ([B, L, D], the states [N / G, ...] if `attend` keeps the weights)."""
    c = self.config
    repeated = nn.scan(
        encoder.rematerialized(encoder.EncoderLayer, c), variable_broadcast='params',
        split_rngs={'params': False, 'dropout': True}, in_axes=nn.broadcast,
        length=c.num_layers // c.groups, unroll=max(c.scan_unroll, 1))
    layers = repeated(c, self.attend, self.deterministic)
    # The parameters then have the paths of a BERT layer.
    nn.share_scope(self, layers)
    return layers(x, mask)


class Albert(encoder.Encoder):
  """BERT with G layers, each of which is applied N / G times."""

  config: AlbertConfig

  def run_layers(self, x: jax.Array, tokens: Tokens, attend: Attend,
                 deterministic: bool) -> tuple[jax.Array, encoder.States | None]:
    c = self.config
    groups = encoder.stacked(SharedLayer, c, c.groups, self.is_initializing())
    return groups(c, attend, deterministic, name='layers')(x, attend.mask(tokens))
