"""MPNet (Song et al. 2020, https://arxiv.org/abs/2004.09297): BERT with relative positions.

As transformers has it: one table of biases by distance, which all layers add to their attention.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from bert_jax.model import attention, encoder
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import truncated_normal

BUCKETS = 32  # rows of the table
_FARTHEST = 128  # tokens apart: from there on all share a bucket


@dataclasses.dataclass(frozen=True)
class MPNetConfig(BertConfig):
  """Sizes of an MPNet; the defaults are those of the published base."""

  architecture: str = 'mpnet'
  vocab_size: int = 30527
  type_vocab_size: int = 0
  layer_norm_eps: float = 1e-5

  has_segments: ClassVar[bool] = False
  biases_attention: ClassVar[bool] = True


def buckets(length: int) -> np.ndarray:
  """The row of the table for each query and key of a row (Raffel et al. 2020, arXiv:1910.10683).

  Half of the buckets are for keys after the query. In each half the first 8 are for one distance
  each, the others for ranges that grow by a constant factor.

  Returns:
    [L, L] int32.
  """
  half, exact = BUCKETS // 2, BUCKETS // 4
  at = np.arange(length)
  behind = at[:, None] - at[None, :]  # [L, L]
  distance = np.abs(behind)
  # In float32, as transformers computes it.
  logs = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
  far = exact + (logs / np.float32(math.log(_FARTHEST / exact)) * (half - exact)).astype(np.int32)
  bucket = np.where(distance < exact, distance, np.minimum(far, half - 1))
  return (bucket + half * (behind < 0)).astype(np.int32)


class MPNet(encoder.Bert):
  """BERT without segments whose attention adds a bias of the distance."""

  config: MPNetConfig

  def attention_mask(self, batch: encoder.Batch) -> attention.Mask:
    c, mask = self.config, attention.make_mask(self, batch.pair_index)
    init = truncated_normal(c.initializer_range, 'position', 'heads')
    table = self.param('relative_bias', init, (BUCKETS, c.num_heads))
    # The tokens of a pair stand side by side: places in the row are as far apart as positions.
    bias = jnp.moveaxis(table[buckets(batch.ids.shape[1])], -1, 0)  # [H, L, L]
    return mask._replace(bias=mask.bias + bias)  # [B, H, L, L] float32
