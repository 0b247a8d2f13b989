"""A SparseEncoder of sentence-transformers: a masked LM, and a pooling of its logits (SPLADE)."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from etils import epath
import numpy as np

from bert_jax.errors import require
from bert_jax.interop import text_layout
from bert_jax.runtime import storage

MODULE = 'SpladePooling'
_POOLING = f'1_{MODULE}'
POOLINGS, ACTIVATIONS = ('max', 'sum'), ('relu', 'log1p_relu')


@dataclasses.dataclass(frozen=True)
class SparseLayout(text_layout.TextLayout):
  """How a model weighs the entries of its vocabulary for a text, as its folder says.

  Attributes:
    pooling: 'max' or 'sum' of the weights that the tokens of the text give an entry.
    activation: 'relu': a token gives log(1 + relu(logit)); 'log1p_relu': the log(1 + x) of that.
    most: entries that are kept, those with the largest weights; None = all.
  """

  pooling: str = 'max'
  activation: str = 'relu'
  most: int | None = None

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """The weights with all but the `most` largest of each text set to 0."""
    if self.most is None or self.most >= outputs.shape[-1]:
      return outputs
    largest = np.argpartition(-outputs, self.most - 1, axis=-1)[:, :self.most]
    kept = np.zeros_like(outputs)
    np.put_along_axis(kept, largest, np.take_along_axis(outputs, largest, -1), -1)
    return kept

  def files(self, width: int) -> dict[str, bytes]:
    del width
    modules = [('', 'sparse_encoder.models.MLMTransformer'),
               (_POOLING, f'sparse_encoder.models.{MODULE}')]
    pooling = {'pooling_strategy': self.pooling, 'activation_function': self.activation}
    most = {'max_active_dims': self.most} if self.most else {}
    return self._files(modules, {f'{_POOLING}/config.json': pooling},
                       {'model_type': 'SparseEncoder', **most}, {})


def read(directory: epath.Path, encoder: epath.Path, module: epath.Path, is_mlm: bool,
         texts: Mapping[str, Any]) -> SparseLayout:
  """Reads the pooling of a folder.

  Args:
    directory, encoder, module: the folders of the model, of its encoder and of the pooling.
    is_mlm: True if modules.json calls the encoder a masked LM; else the encoder's settings do.
    texts: what `text_layout.read` gave.

  Raises:
    UserError: it pools anything but the logits of a masked LM, or in an unknown way.
  """
  task = text_layout.encoder_settings(encoder).get(
      'transformer_task', 'fill-mask' if is_mlm else 'feature-extraction')
  require(task == 'fill-mask', f"{encoder}: transformer_task={task!r}: {MODULE} pools the logits "
          "of 'fill-mask'")
  config = storage.read_json_if_any(module / 'config.json')
  pooling, activation = (config.get('pooling_strategy', 'max'),
                         config.get('activation_function', 'relu'))
  for name, value, known in (('pooling_strategy', pooling, POOLINGS),
                             ('activation_function', activation, ACTIVATIONS)):
    require(value in known, f'{module}: {name}={value!r} is unknown: known are {", ".join(known)}')
  path = directory / text_layout.SETTINGS
  most = storage.read_json_if_any(path).get('max_active_dims')
  require(most is None or isinstance(most, int) and most > 0,
          f'{path}: max_active_dims={most!r} is no positive number')
  return SparseLayout(pooling, activation, most, **texts)
