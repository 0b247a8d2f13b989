"""Who attends to whom: the attention weights of a text, as a page and as a picture."""

import base64
import importlib.resources
import json
from typing import NamedTuple

from etils import epath
import jax
import matplotlib
from matplotlib import figure
import numpy as np

from bert_jax.errors import UserError
from bert_jax.inference.bert import Bert
from bert_jax.model import architectures
from bert_jax.model.encoder import Batch


class Attention(NamedTuple):
  """The attention weights of one text or pair of L tokens."""

  tokens: list[str]  # L, special ones included
  weights: np.ndarray  # [N, H, L, L] float32: layer, head, from, to; sums to 1 over the last


def attention(bert: Bert, text: str, text_pair: str | None = None) -> Attention:
  """The attention weights of a text or pair.

  Raises:
    UserError: it is longer than the position table.
  """
  row = bert.row(text if text_pair is None else (text, text_pair))
  ids, type_ids = np.array([row.ids], np.int32), np.array([row.type_ids], np.int32)
  batch = Batch(ids, type_ids, np.arange(ids.size, dtype=np.int32)[None], np.ones_like(ids))
  encoder = architectures.encoder(bert.config)
  _, kept = jax.jit(lambda params, batch: encoder.apply(
      params, batch, method='encode', mutable=['intermediates']))(
          {'params': bert.params['params']['bert']}, batch)
  weights = np.asarray(encoder.intermediates(kept['intermediates']).attention, np.float32)[:, 0]
  return Attention(bert.tokenizer.tokens(row.ids), weights)


def _selected(found: Attention, layer: int | None, head: int | None) -> tuple[np.ndarray, str]:
  """([L, L], its name): of a layer and head counted from 1; None = the mean over all."""
  for name, value, most in (('layer', layer, found.weights.shape[0]),
                            ('head', head, found.weights.shape[1])):
    if value is not None and not 1 <= value <= most:
      raise UserError(f'{name}={value} is not there: the model has {most}')
  weights = found.weights if layer is None else found.weights[layer - 1:layer]
  weights = weights if head is None else weights[:, head - 1:head]
  title = ', '.join((f'layer {layer}' if layer else 'all layers',
                     f'head {head}' if head else 'all heads'))
  return weights.mean((0, 1)), title


def write_png(found: Attention, path: str, layer: int | None = None, head: int | None = None):
  """A heat map: rows attend to columns.

  Args:
    found: the weights.
    path: of the picture.
    layer: counted from 1; None = the mean over all.
    head: the same.
  """
  weights, title = _selected(found, layer, head)
  size = 1.8 + 0.26 * len(found.tokens)
  picture = figure.Figure(figsize=(size, size), layout='constrained')
  axes = picture.subplots()
  axes.imshow(weights, cmap='Blues', vmin=0)
  axes.set_xticks(range(len(found.tokens)), found.tokens, rotation=90)
  axes.set_yticks(range(len(found.tokens)), found.tokens)
  axes.xaxis.tick_top()
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  axes.set_xlabel(f'attention of each row to each column: {title}')
  with matplotlib.rc_context({'font.family': fonts()}):
    picture.savefig(path, dpi=120)


def fonts() -> list[str]:
  """Fonts to draw tokens with: matplotlib's own has no Chinese characters."""
  from matplotlib import font_manager
  there = {font.name for font in font_manager.fontManager.ttflist}
  chinese = ('Noto Sans CJK SC', 'Noto Sans CJK JP', 'WenQuanYi Zen Hei', 'PingFang SC',
             'Microsoft YaHei', 'SimHei')
  return ['DejaVu Sans', *(name for name in chinese if name in there)]


def write_html(found: Attention, path: str):
  """One page without outside parts: all layers and heads at a glance, one in detail."""
  layers, heads, length, _ = found.weights.shape
  scaled = np.round(found.weights * 255).astype(np.uint8)
  data = {'tokens': found.tokens, 'layers': layers, 'heads': heads, 'length': length,
          'weights': base64.b64encode(scaled.tobytes()).decode()}
  template = importlib.resources.files('bert_jax.views').joinpath('attention.html').read_text()
  # A token may be "</script>".
  page = template.replace('"DATA"', json.dumps(data, ensure_ascii=False).replace('<', '\\u003c'))
  epath.Path(path).write_text(page)
