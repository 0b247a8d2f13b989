"""RoBERTa (Liu et al. 2019, https://arxiv.org/abs/1907.11692), XLM-RoBERTa, CamemBERT."""

import dataclasses
from typing import ClassVar

from bert_jax.model.bert_config import BertConfig


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
  """Sizes of a RoBERTa. As in transformers, its MLM head always has gelu."""

  architecture: str = 'roberta'

  mlm_activation: ClassVar[str] = 'gelu'
