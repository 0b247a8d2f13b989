"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without segments."""

import dataclasses
from typing import ClassVar

from bert_jax.model.bert_config import BertConfig


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(BertConfig):
  """Sizes of a DistilBERT, by default of the published base."""

  architecture: str = 'distilbert'
  num_layers: int = 6
  type_vocab_size: int = 0

  has_segments: ClassVar[bool] = False
  pooler_activation: ClassVar[str] = 'relu'
