"""ALBERT (Lan et al. 2020, https://arxiv.org/abs/1909.11942): narrow embeddings, shared layers."""

import dataclasses
from typing import ClassVar

from flax import linen as nn
import jax

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.model import attention, encoder
from bert_jax.model.bert_config import BertConfig


@dataclasses.dataclass(frozen=True)
class AlbertConfig(BertConfig):
  """Sizes of an ALBERT; those of the published base, large, ... differ in D, F, H and N."""

  architecture: str = 'albert'
  embedding_size: int = 128  # E
  groups: int = 1  # G: layers with parameters of their own, each applied N / G times in a row

  always_projects: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    self._check_at_least_one('embedding_size', 'groups')
    require(self.num_layers % self.groups == 0,
            f'model.num_layers={self.num_layers} is not divisible by model.groups={self.groups}: '
            'each group is applied as often as the others')

  @property
  def stacked_layers(self) -> int:
    return self.groups

  @property
  def fewest_layers(self) -> tuple[int, int]:
    return self.groups, 2 * self.groups


class SharedLayer(nn.Module):
  """One layer, applied N / G times; one turn of the scan over groups."""

  config: AlbertConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, mask: attention.Mask) -> tuple[jax.Array, None]:
    """[B, L, D] -> ([B, L, D], None)."""
    c = self.config
    layer = encoder.rematerialised(encoder.EncoderLayer, c)
    repeated = nn.scan(layer, variable_broadcast='params', variable_axes={'intermediates': 0},
                       split_rngs={'params': False, 'dropout': True}, in_axes=nn.broadcast,
                       length=c.num_layers // c.groups, unroll=c.scan_unroll)
    layers = repeated(c, self.deterministic)
    nn.share_scope(self, layers)
    return layers(x, mask)


class Albert(encoder.Bert):
  """BERT with G layers, each of which is applied N / G times."""

  config: AlbertConfig

  def run_layers(self, x: jax.Array, tokens: Tokens, deterministic: bool) -> jax.Array:
    c, mask = self.config, attention.make_mask(self, tokens.text_ids)
    groups = encoder.stacked(SharedLayer, c, c.groups, self.is_initializing())
    return groups(c, deterministic, name='layers')(x, mask)[0]
