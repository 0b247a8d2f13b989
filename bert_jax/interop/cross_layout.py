"""A CrossEncoder of sentence-transformers: a classifier of pairs, its activation and prompts."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from etils import epath
import numpy as np
from scipy import special

from bert_jax.errors import require
from bert_jax.interop import text_layout
from bert_jax.runtime import console, storage

_KIND = 'CrossEncoder'
SIGMOID = 'torch.nn.modules.activation.Sigmoid'
_TRUSTED = 'torch.'  # the package runs no other code that a folder names, and takes its default
_FUNCTIONS = {
    'Identity': lambda x: x, 'Sigmoid': special.expit, 'Tanh': np.tanh,
    'ReLU': lambda x: np.maximum(x, 0), 'SiLU': lambda x: x * special.expit(x),
    'Softplus': lambda x: np.logaddexp(0, x), 'LogSigmoid': lambda x: -np.logaddexp(0, -x),
    'GELU': lambda x: x * special.ndtr(x)}


@dataclasses.dataclass(frozen=True)
class CrossLayout(text_layout.TextLayout):
  """How a model scores a pair, as its folder says.

  Attributes:
    activation: the name in PyTorch of the function from logits to scores; '' = the sigmoid of a
      single logit, and several as they are.
  """

  activation: str = ''

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """The scores of logits, as CrossEncoder.predict gives them.

    Raises:
      UserError: the activation is unknown.
    """
    name = self.activation.rsplit('.', 1)[-1]
    if not self.activation.startswith(_TRUSTED):
      name = 'Sigmoid' if outputs.shape[-1] == 1 else 'Identity'
    require(name in _FUNCTIONS, f'the activation_fn {self.activation} of this model is unknown: '
            f'known are {", ".join(_FUNCTIONS)}')
    return _FUNCTIONS[name](outputs)

  @property
  def config_fields(self) -> dict[str, Any]:
    """The fields of a config.json that hold the activation."""
    return {text_layout.PACKAGE: {'activation_fn': self.activation}} if self.activation else {}

  def files(self, width: int) -> dict[str, bytes]:
    del width
    activation = {'activation_fn': self.activation} if self.activation else {}
    return self._files([('', 'models.Transformer')], {}, {'model_type': _KIND, **activation},
                       {'transformer_task': 'sequence-classification'})


def _checked(activation: Any, path: epath.Path) -> str:
  require(isinstance(activation, str), f'{path}: activation_fn={activation!r} is no name')
  if activation and not activation.startswith(_TRUSTED):
    console.note(f'{path}: the activation_fn {activation} is code that nobody has checked: scores '
                 'are as without it')
  return activation


def of_config(fields: Mapping[str, Any], path: epath.Path, max_len: int) -> CrossLayout | None:
  """The activation in the fields of a config.json; None where it has none.

  Before version 4 sentence-transformers wrote 'sbert_ce_default_activation_function'.
  """
  own = fields.get(text_layout.PACKAGE)
  activation = own.get('activation_fn') if isinstance(own, dict) else None
  activation = activation or fields.get('sbert_ce_default_activation_function')
  if not activation:
    return None
  return CrossLayout(_checked(activation, path), max_len=max_len)


def is_cross(directory: epath.Path) -> bool:
  """True for a folder that sentence-transformers has saved as a cross-encoder."""
  return storage.read_json_if_any(directory / text_layout.SETTINGS).get('model_type') == _KIND


def read(directory: epath.Path, texts: Mapping[str, Any]) -> CrossLayout:
  """The activation in a folder of a cross-encoder; `texts` is what `text_layout.read` gave."""
  path = directory / text_layout.SETTINGS
  activation = storage.read_json_if_any(path).get('activation_fn') or ''
  return CrossLayout(_checked(activation, path), **texts)
