"""Shows the attention weights of a text as an HTML page or a picture."""

import base64
import functools
import importlib.resources
import json
from typing import NamedTuple

from etils import epath
import jax
import matplotlib
from matplotlib import figure
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.inference.bert import Bert
from bert_jax.model import architectures

_MOST_IN_PICTURE = 256  # tokens; each takes 31 pixels, and a page has no such limit


class Attention(NamedTuple):
  """The attention weights of one text or pair of L tokens."""

  tokens: list[str]  # L tokens, including special tokens
  weights: np.ndarray  # [N, H, L, L] float32: layer, head, from, to; sums to 1 over `to`
  special: list[str]  # the tokens that the tokenizer adds: [CLS] and [SEP]


def attention(bert: Bert, text: str, text_pair: str | None = None) -> Attention:
  """Computes the attention weights of a text or pair.

  Raises:
    UserError: the text is longer than the position table.
  """
  row = bert.row(text if text_pair is None else (text, text_pair))
  ids, type_ids = np.array([row.ids], np.int32), np.array([row.type_ids], np.int32)
  batch = Tokens(ids, type_ids, np.arange(ids.size, dtype=np.int32)[None],
                 np.ones_like(ids))
  encoder = architectures.make_encoder(bert.config)
  run = jax.jit(functools.partial(encoder.apply, method='states'))
  states = run({'params': bert.params['params']['bert']}, batch)
  weights = np.asarray(states.attention, np.float32)[:, 0]  # [N, H, L, L]
  tokenizer = bert.tokenizer
  return Attention(tokenizer.tokens(row.ids), weights,
                   tokenizer.tokens([tokenizer.cls_id, tokenizer.sep_id]))


def _selected(attention: Attention, layer: int | None,
              head: int | None) -> tuple[np.ndarray, str]:
  """The weights [L, L] of a layer and head, and their title."""
  for name, value, count in zip(('layer', 'head'), (layer, head),
                                attention.weights.shape):
    require(value is None or 1 <= value <= count,
            f'--{name}={value} does not exist: the model has {count}')
  weights = attention.weights if layer is None else attention.weights[layer - 1:layer]
  weights = weights if head is None else weights[:, head - 1:head]
  title = ', '.join((f'layer {layer}' if layer else 'all layers',
                     f'head {head}' if head else 'all heads'))
  return weights.mean((0, 1)), title


def write_png(attention: Attention, path: str, layer: int | None = None,
              head: int | None = None):
  """Draws a heat map in which rows attend to columns.

  `layer` and `head` count from 1; None = the mean over all.
  """
  require(len(attention.tokens) <= _MOST_IN_PICTURE,
          f'--output={path}: {len(attention.tokens)} tokens are too many for a picture (at '
          f'most {_MOST_IN_PICTURE}): write .html, or give a shorter text')
  weights, title = _selected(attention, layer, head)
  size = 1.8 + 0.26 * len(attention.tokens)
  picture = figure.Figure(figsize=(size, size), layout='constrained')
  axes = picture.subplots()
  axes.imshow(weights, cmap='Blues', vmin=0)
  places = range(len(attention.tokens))
  # A token may contain $, which matplotlib would parse as math.
  axes.set_xticks(places, attention.tokens, rotation=90, parse_math=False)
  axes.set_yticks(places, attention.tokens, parse_math=False)
  axes.xaxis.tick_top()
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  axes.set_xlabel(f'attention of each row to each column: {title}')
  save_picture(picture, path)


def save_picture(picture: figure.Figure, path: str):
  """Saves a picture. Installed fonts add Chinese characters, which DejaVu Sans lacks."""
  from matplotlib import font_manager
  installed = {font.name for font in font_manager.fontManager.ttflist}
  chinese = ('Noto Sans CJK SC', 'Noto Sans CJK JP', 'WenQuanYi Zen Hei', 'PingFang SC',
             'Microsoft YaHei', 'SimHei')
  fonts = ['DejaVu Sans', *(name for name in chinese if name in installed)]
  with matplotlib.rc_context({'font.family': fonts}):
    picture.savefig(path, dpi=120)


def write_html(attention: Attention, path: str):
  """Writes a self-contained page: an overview of all heads, and one head in detail."""
  layers, heads, length, _ = attention.weights.shape
  # One byte for a weight: shades of color show no more, and a page stays small.
  scaled = np.round(attention.weights * 255).astype(np.uint8)
  data = {'tokens': attention.tokens, 'layers': layers, 'heads': heads, 'length': length,
          'special': attention.special,
          'weights': base64.b64encode(scaled.tobytes()).decode()}
  template = importlib.resources.files('bert_jax.views') / 'attention.html'
  # A token may be "</script>".
  content = json.dumps(data, ensure_ascii=False).replace('<', '\\u003c')
  epath.Path(path).write_text(template.read_text().replace('"DATA"', content))
