"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT with a relative position bias.

As in transformers, all layers share one table of biases and add them to their scores.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.model import encoder
from bert_jax.model.attention import Attend, Mask
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import truncated_normal

BUCKETS = 32  # rows of the table
_FARTHEST = 128  # tokens; distances from here on share a bucket


@dataclasses.dataclass(frozen=True)
class MPNetConfig(BertConfig):
  """Sizes of an MPNet, by default of the published base."""

  architecture: str = 'mpnet'
  vocab_size: int = 30527
  type_vocab_size: int = 0
  layer_norm_eps: float = 1e-5

  has_segments: ClassVar[bool] = False
  mlm_activation: ClassVar[str] = 'gelu'
  kernel_obstacle: ClassVar[str] = 'no kernel adds the biases of mpnet'


def buckets(longest: int) -> np.ndarray:
  """The row of the table for each distance between query and key (arXiv:1910.10683).

  Half of the buckets are for keys after the query. In each half, the first 8 buckets are
  for one distance each, and the others for ranges that grow by a constant factor (Raffel
  et al. 2020).

  Args:
    longest: the length of the longest row.

  Returns:
    [2 * longest - 1] int32, from the farthest key after the query to the farthest before.
  """
  half, exact = BUCKETS // 2, BUCKETS // 4
  behind = np.arange(1 - longest, longest)
  distance = np.abs(behind)
  # In float32, because transformers rounds in float32.
  logs = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
  steps = logs / np.float32(math.log(_FARTHEST / exact)) * (half - exact)
  far = np.minimum(exact + steps.astype(np.int32), half - 1)
  bucket = np.where(distance < exact, distance, far)
  return (bucket + half * (behind < 0)).astype(np.int32)


class MPNet(encoder.Encoder):
  """BERT without segments; its attention adds a bias that depends on the distance."""

  config: MPNetConfig

  def attention_mask(self, tokens: Tokens, attend: Attend) -> Mask:
    c, mask = self.config, attend.mask(tokens)
    init = truncated_normal(c.initializer_range, 'position', 'heads')
    table = self.param('relative_bias', init, (BUCKETS, c.num_heads))
    # The tokens of a pair are adjacent, so row indices give the distances.
    at = jnp.arange(tokens.ids.shape[1])
    behind = at[:, None] - at[None, :]  # [L, L]
    bias = table[buckets(c.max_positions)][behind + c.max_positions - 1]  # [L, L, H]
    bias = jnp.moveaxis(bias, -1, 0)  # [H, L, L]
    return mask._replace(bias=mask.bias + bias)  # [B, H, L, L] float32
