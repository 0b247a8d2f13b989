"""SparseEncoder of sentence-transformers: a masked LM with pooled logits (SPLADE)."""

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
  """How a model turns a text into weights of the vocabulary, as its folder describes.

  Attributes:
    pooling: 'max' or 'sum' over the tokens of the text.
    activation: 'relu' = the weight of a token is log(1 + relu(logit)); 'log1p_relu' =
      log(1 + x) of this weight.
    most: the number of largest weights to keep; None = all.
  """

  pooling: str = 'max'
  activation: str = 'relu'
  most: int | None = None

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """Keeps the `most` largest weights of each text [B, V], and sets the others to 0."""
    if self.most is None or self.most >= outputs.shape[-1]:
      return outputs
    # Vocabularies are large: a partition is linear, a sort is not.
    largest = np.argpartition(-outputs, self.most - 1, axis=-1)[:, :self.most]
    kept = np.zeros_like(outputs)
    np.put_along_axis(kept, largest, np.take_along_axis(outputs, largest, -1), -1)
    return kept

  def files(self, width: int) -> dict[str, bytes]:
    del width
    pooling = {'pooling_strategy': self.pooling, 'activation_function': self.activation}
    most = {'max_active_dims': self.most} if self.most else {}
    return self._files(
        modules=[('', 'sparse_encoder.models.MLMTransformer'),
                 (_POOLING, f'sparse_encoder.models.{MODULE}')],
        contents={f'{_POOLING}/config.json': pooling},
        settings={'model_type': 'SparseEncoder', **most},
        encoder={})


def read(settings: Mapping[str, Any], path: epath.Path, encoder: epath.Path,
         module: epath.Path, is_mlm: bool, texts: Mapping[str, Any]) -> SparseLayout:
  """Reads the pooling of a folder.

  Args:
    settings, path: the content of the file SETTINGS, and its path.
    encoder, module: the folders of the encoder and of the pooling.
    is_mlm: True if modules.json calls the encoder a masked LM; otherwise the settings of
      the encoder must do so.
    texts: the result of `text_layout.read`.

  Raises:
    UserError: the pooling is unknown, or does not pool the logits of a masked LM.
  """
  # Newer folders name the task in the settings of the encoder, not in its class.
  task = text_layout.encoder_settings(encoder).get(
      'transformer_task', 'fill-mask' if is_mlm else 'feature-extraction')
  require(task == 'fill-mask',
          f'{encoder}: transformer_task={task!r}: {MODULE} pools the logits of '
          "'fill-mask'")
  config = storage.read_json_if_any(module / 'config.json')
  pooling, activation = (config.get('pooling_strategy', 'max'),
                         config.get('activation_function', 'relu'))
  for name, value, known in (('pooling_strategy', pooling, POOLINGS),
                             ('activation_function', activation, ACTIVATIONS)):
    require(value in known,
            f'{module}: {name}={value!r} is unknown: expected one of {", ".join(known)}')
  most = settings.get('max_active_dims')
  require(most is None or isinstance(most, int) and most > 0,
          f'{path}: max_active_dims={most!r} is not a positive number')
  return SparseLayout(pooling, activation, most, **texts)
