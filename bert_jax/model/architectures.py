"""The architectures by name, and the configs and encoders that they make."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from bert_jax.errors import require_choice
from bert_jax.model.albert import Albert, AlbertConfig
from bert_jax.model.attention_kernels import CHOICES
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.deberta import Deberta, DebertaConfig
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.modern import Modern, ModernConfig
from bert_jax.model.mpnet import MPNet, MPNetConfig
from bert_jax.model.roberta import RobertaConfig


class Architecture(NamedTuple):
  """The config class and the encoder class of an architecture."""

  config: type[BertConfig]
  encoder: type[Encoder] = Encoder


ALL = {'bert': Architecture(BertConfig),
       'roberta': Architecture(RobertaConfig),
       'xlm-roberta': Architecture(RobertaConfig),
       'camembert': Architecture(RobertaConfig),
       'mpnet': Architecture(MPNetConfig, MPNet),
       'distilbert': Architecture(DistilBertConfig),
       'albert': Architecture(AlbertConfig, Albert),
       'electra': Architecture(ElectraConfig),
       'deberta-v2': Architecture(DebertaConfig, Deberta),
       'modernbert': Architecture(ModernConfig, Modern)}


def find(name: str) -> Architecture:
  """Returns the architecture with this name; raises UserError for an unknown one."""
  require_choice('model.architecture', name, ALL)
  return ALL[name]


def make_encoder(config: BertConfig) -> Encoder:
  """Makes the encoder that a config describes."""
  return ALL[config.architecture].encoder(config)


def make_config(fields: Mapping[str, Any]) -> BertConfig:
  """Makes a config from `fields`; ignores fields that its architecture does not have.

  Raises:
    UserError: an unknown architecture or kernel, or a value that no model can have.
  """
  config = find(fields.get('architecture', 'bert')).config
  require_choice('model.attention', fields.get('attention', 'auto'), CHOICES)
  return config(**{field.name: fields[field.name] for field in dataclasses.fields(config)
                   if field.name in fields})
