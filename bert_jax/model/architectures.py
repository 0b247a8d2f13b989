"""The members of the family: which config and which encoder an architecture's name stands for."""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

from bert_jax.errors import UserError
from bert_jax.model.albert import Albert
from bert_jax.model.albert import AlbertConfig
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.distilbert import DistilBert
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.model.electra import Electra
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.encoder import Bert
from bert_jax.model.modern import Modern
from bert_jax.model.modern import ModernConfig


class Architecture(NamedTuple):
  """What a name stands for."""

  config: type[BertConfig]
  encoder: type[Bert] | type[Modern]


ALL = {'bert': Architecture(BertConfig, Bert),
       'roberta': Architecture(BertConfig, Bert),
       'distilbert': Architecture(DistilBertConfig, DistilBert),
       'albert': Architecture(AlbertConfig, Albert),
       'electra': Architecture(ElectraConfig, Electra),
       'modernbert': Architecture(ModernConfig, Modern)}


def encoder(config: BertConfig) -> Bert | Modern:
  """The encoder that a config describes."""
  return ALL[config.architecture].encoder(config)


def make_config(fields: Mapping[str, Any]) -> BertConfig:
  """The config that some fields describe; what is no field of it is left out.

  Raises:
    UserError: a value that no model has.
  """
  name = fields.get('architecture', 'bert')
  if name not in ALL:
    raise UserError(f'model.architecture={name!r} is unknown: use {", ".join(ALL)}')
  config = ALL[name].config
  known = [field.name for field in dataclasses.fields(config)]
  return config(**{field: fields[field] for field in known if field in fields})
