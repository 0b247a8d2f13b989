"""ALBERT (Lan et al. 2020, https://arxiv.org/abs/1909.11942): narrow embeddings, shared layers."""

import dataclasses

from flax import linen as nn
import jax

from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal
from bert_jax.model.embeddings import zeros
from bert_jax.model.encoder import Batch
from bert_jax.model.encoder import Bert
from bert_jax.model.encoder import EncoderLayer
from bert_jax.model.encoder import rematerialised
from bert_jax.model.encoder import stacked


@dataclasses.dataclass(frozen=True)
class AlbertConfig(BertConfig):
  """Sizes of an ALBERT; those of the published base, large, ... differ in D, F, H and N."""

  architecture: str = 'albert'
  embedding_size: int = 128  # E
  groups: int = 1  # G: layers with parameters of their own, each applied N / G times in a row

  def __post_init__(self):
    super().__post_init__()
    self._check_at_least_one('embedding_size', 'groups')
    if self.num_layers % self.groups:
      raise UserError(f'model.num_layers={self.num_layers} is not divisible by model.groups='
                      f'{self.groups}: each group is applied as often as the others')

  @property
  def projects(self) -> bool:
    """Always, also where E is D."""
    return True

  @property
  def stacked_layers(self) -> int:
    """G."""
    return self.groups

  @property
  def fewest_layers(self) -> tuple[int, int]:
    """Multiples of G."""
    return self.groups, 2 * self.groups


class SharedLayer(nn.Module):
  """One layer, applied N / G times: [B, L, D] -> [B, L, D]; one turn of the scan over groups."""

  config: AlbertConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, pair_index: jax.Array,
               bias: jax.Array | None) -> tuple[jax.Array, None]:
    """As `EncoderLayer`."""
    c = self.config
    repeated = nn.scan(rematerialised(EncoderLayer, c), variable_broadcast='params',
                       variable_axes={'intermediates': 0},
                       split_rngs={'params': False, 'dropout': True}, in_axes=nn.broadcast,
                       length=c.num_layers // c.groups, unroll=c.scan_unroll)
    layer = repeated(c, self.deterministic)
    nn.share_scope(self, layer)
    return layer(x, pair_index, bias)


class Albert(Bert):
  """BERT with projected embeddings and G layers, each of which is applied N / G times."""

  config: AlbertConfig

  def setup(self):
    super().setup()
    self.projection = projection(self.config)

  def embed(self, batch: Batch, deterministic: bool) -> jax.Array:
    """[B, L, E] projected to [B, L, D]."""
    return self.projection(super().embed(batch, deterministic))

  def run_layers(self, x: jax.Array, pair_index: jax.Array, bias: jax.Array | None,
                 deterministic: bool) -> jax.Array:
    """The embeddings through each group, one after another."""
    c = self.config
    groups = stacked(SharedLayer, c, c.groups, self.is_initializing())
    return groups(c, deterministic, name='layers')(x, pair_index, bias)[0]


def projection(config: BertConfig) -> nn.Dense:
  """Embeddings to the width of the layers: [..., E] -> [..., D]."""
  return nn.Dense(config.hidden_size, dtype=config.compute_dtype, bias_init=zeros('embed_act'),
                  kernel_init=truncated_normal(config.initializer_range, 'pooled', 'embed'))
