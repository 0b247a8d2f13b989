"""DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108): BERT without segments."""

import dataclasses

from flax import linen as nn

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import PositionEmbeddings
from bert_jax.model.encoder import Bert


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(BertConfig):
  """Sizes of a DistilBERT; the defaults are those of the published base."""

  architecture: str = 'distilbert'
  num_layers: int = 6
  type_vocab_size: int = 0

  @property
  def fewest_segments(self) -> int:
    """None."""
    return 0


class DistilBert(Bert):
  """BERT without segment embeddings, and with a ReLU in the pooler of its classifier."""

  embeddings_class = PositionEmbeddings
  pool_activation = staticmethod(nn.relu)
