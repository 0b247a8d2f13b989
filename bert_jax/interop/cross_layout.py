"""CrossEncoder of sentence-transformers: a classifier of pairs with an activation."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from etils import epath
import numpy as np
from scipy import special

from bert_jax.errors import require
from bert_jax.interop import text_layout
from bert_jax.runtime import console

KIND = 'CrossEncoder'  # the model_type in SETTINGS
SIGMOID = 'torch.nn.modules.activation.Sigmoid'
# sentence-transformers replaces a function without this prefix by its default.
_TRUSTED = 'torch.'
_FUNCTIONS = {
    'Identity': np.asarray,
    'Sigmoid': special.expit,
    'Tanh': np.tanh,
    'ReLU': functools.partial(np.maximum, 0),
    'SiLU': lambda x: x * special.expit(x),
    'Softplus': functools.partial(np.logaddexp, 0),
    'LogSigmoid': lambda x: -np.logaddexp(0, -x),
    'GELU': lambda x: x * special.ndtr(x),
}


@dataclasses.dataclass(frozen=True)
class CrossLayout(text_layout.TextLayout):
  """How a model scores a pair, as its folder describes.

  Attributes:
    activation: the PyTorch name of the function from logits to scores; '' = the sigmoid
      of a single logit, no function of several logits.
  """

  activation: str = ''

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """Returns the scores that CrossEncoder.predict computes from logits [B, C]: [B, C].

    Raises:
      UserError: the activation is unknown.
    """
    name = self.activation.rsplit('.', 1)[-1]
    if not self.activation.startswith(_TRUSTED):
      name = 'Sigmoid' if outputs.shape[-1] == 1 else 'Identity'
    require(name in _FUNCTIONS,
            f'the activation_fn {self.activation} of this model is unknown: expected one '
            f'of {", ".join(_FUNCTIONS)}')
    return _FUNCTIONS[name](outputs)

  @property
  def config_fields(self) -> dict[str, Any]:
    """The fields of config.json that hold the activation."""
    return ({text_layout.PACKAGE: {'activation_fn': self.activation}}
            if self.activation else {})

  def files(self, width: int) -> dict[str, bytes]:
    del width
    activation = {'activation_fn': self.activation} if self.activation else {}
    return self._files(
        modules=[('', 'models.Transformer')],
        contents={},
        settings={'model_type': KIND, **activation},
        encoder={'transformer_task': 'sequence-classification'})


def _checked(activation: Any, path: epath.Path) -> str:
  require(isinstance(activation, str),
          f'{path}: activation_fn={activation!r} is not a name')
  if activation and not activation.startswith(_TRUSTED):
    console.note(f'{path}: the activation_fn {activation} is not a function of torch: '
                 'scores are computed without it')
  return activation


def of_config(fields: Mapping[str, Any], path: epath.Path,
              max_len: int) -> CrossLayout | None:
  """Returns the layout with the activation in config.json; None = no activation there."""
  own = fields.get(text_layout.PACKAGE)
  activation = own.get('activation_fn') if isinstance(own, dict) else None
  # The name of the field before version 4 of sentence-transformers.
  activation = activation or fields.get('sbert_ce_default_activation_function')
  if not activation:
    return None
  return CrossLayout(_checked(activation, path), max_len=max_len)


def read(settings: Mapping[str, Any], path: epath.Path,
         texts: Mapping[str, Any]) -> CrossLayout:
  """Makes the layout of a cross-encoder's folder.

  Args:
    settings, path: the content of the file SETTINGS, and its path.
    texts: the result of `text_layout.read`.
  """
  return CrossLayout(_checked(settings.get('activation_fn') or '', path), **texts)
