"""The list of architectures, and the functions that find theirs by the name in a config."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

from bert_jax.errors import require_choice
from bert_jax.model.albert import Albert, AlbertConfig
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.encoder import Bert, Encoder
from bert_jax.model.modern import Modern, ModernConfig


class Architecture(NamedTuple):
  """A member of the family."""

  config: type[BertConfig]
  encoder: Callable[[BertConfig], Encoder] = Bert
  # Numbers of layers are `first_layers` and a multiple of `layer_step`.
  layer_step: Callable[[BertConfig], int] = lambda config: 1
  first_layers: int = 0


ALL = {'bert': Architecture(BertConfig),
       'roberta': Architecture(BertConfig),
       'distilbert': Architecture(DistilBertConfig),
       'albert': Architecture(AlbertConfig, Albert, lambda config: config.groups),
       'electra': Architecture(ElectraConfig),
       'modernbert': Architecture(ModernConfig, Modern, lambda config: config.global_every, 1)}


def encoder(config: BertConfig) -> Encoder:
  """Returns the encoder that a config describes."""
  return ALL[config.architecture].encoder(config)


def fewest_layers(config: BertConfig) -> tuple[int, int]:
  """Returns the two smallest numbers of layers that a model of this kind can have."""
  architecture = ALL[config.architecture]
  step = architecture.layer_step(config)
  return architecture.first_layers + step, architecture.first_layers + 2 * step


def make_config(fields: Mapping[str, Any]) -> BertConfig:
  """Makes a config of those `fields` that its architecture has.

  Raises:
    UserError: a value that no model has.
  """
  name = fields.get('architecture', 'bert')
  require_choice('model.architecture', name, ALL)
  config = ALL[name].config
  known = [field.name for field in dataclasses.fields(config)]
  return config(**{field: fields[field] for field in known if field in fields})
