"""The modules behind an encoder of sentence-transformers: pooling, dense layers, norms, prompts.

In its folders modules.json lists the modules, and each has a folder with its config.json
(https://www.sbert.net/docs/package_reference/base/modules.html). The modules run on the host: they
cost a thousandth of the encoder, and numpy rounds alike on every platform.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
from typing import Any, NamedTuple

from etils import epath
import jax
import numpy as np
import safetensors
from safetensors.numpy import load_file, save

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import UserError, require
from bert_jax.interop import cross_layout, sparse_layout, text_layout
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.pooling import POOLINGS
from bert_jax.runtime import storage

FILE = text_layout.FILE
_MLM = 'MLMTransformer'  # how older folders call the encoder before a SpladePooling
_POOLING, _WEIGHTS = '1_Pooling', 'model.safetensors'
# The names of prompts before queries and documents, as `encode_query` and `encode_document` of
# sentence-transformers look for them.
QUERY, DOCUMENT = ('query',), ('document', 'passage', 'corpus')
# Poolings in the order in which several stand side by side, by their names in older folders.
_OLD_POOLINGS = {'pooling_mode_cls_token': 'cls', 'pooling_mode_max_tokens': 'max',
                 'pooling_mode_mean_tokens': 'mean',
                 'pooling_mode_mean_sqrt_len_tokens': 'mean_sqrt_len_tokens',
                 'pooling_mode_weightedmean_tokens': 'weightedmean',
                 'pooling_mode_lasttoken': 'lasttoken'}
_TANH = 'torch.nn.modules.activation.Tanh'
_ACTIVATIONS = {
    _TANH: np.tanh, 'torch.nn.modules.linear.Identity': lambda x: x,
    'torch.nn.modules.activation.ReLU': lambda x: np.maximum(x, 0),
    'torch.nn.modules.activation.GELU': lambda x: np.asarray(jax.nn.gelu(x, approximate=False))}


class Module(NamedTuple):
  """One step from pooled hidden states to vectors."""

  kind: str  # one of _KINDS
  config: dict[str, Any]
  tensors: dict[str, np.ndarray]  # float32, by PyTorch's names

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """[B, D] float32 -> [B, D'] float32."""
    return _KINDS[self.kind].run(self, x)


def unit(vectors: np.ndarray) -> np.ndarray:
  """The vectors [..., D] at length 1; a zero stays a zero."""
  norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
  return vectors / np.maximum(norms, 1e-12)


def _dense(module: Module, x: np.ndarray) -> np.ndarray:
  x = x @ module.tensors['linear.weight'].T + module.tensors.get('linear.bias', np.float32(0))
  return _ACTIVATIONS[module.config['activation_function']](x)


def _layer_norm(module: Module, x: np.ndarray) -> np.ndarray:
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-5))
  return x * module.tensors['norm.weight'] + module.tensors['norm.bias']


def _dense_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
  out = config.get('out_features')
  bias = {'linear.bias': (out,)} if config.get('bias', True) else {}
  return {'linear.weight': (out, width), **bias}


class _Kind(NamedTuple):
  """A kind of module."""

  run: Callable[[Module, np.ndarray], np.ndarray]
  # (config, width of the input) -> shapes of its tensors
  shapes: Callable[[Mapping[str, Any], int], dict[str, tuple[int, ...]]] = lambda config, width: {}


_KINDS = {
    'Dense': _Kind(_dense, _dense_shapes),
    'LayerNorm': _Kind(_layer_norm, lambda config, width: {
        'norm.weight': (width,), 'norm.bias': (width,)}),
    'Normalize': _Kind(lambda module, x: unit(x)),
    'Dropout': _Kind(lambda module, x: x)}  # vectors are made without it


# The modules that may follow one; behind any other those of _KINDS may.
_BEHIND = {'Transformer': ('Pooling', sparse_layout.MODULE), _MLM: (sparse_layout.MODULE,),
           sparse_layout.MODULE: ()}


@dataclasses.dataclass(frozen=True)
class SentenceLayout(text_layout.TextLayout):
  """How a model makes a vector of a text, as its folder says.

  Attributes:
    pooling: one or several of `model.pooling.POOLINGS`, side by side.
    include_prompt: whether the tokens of a prompt are pooled too.
    modules: the steps behind the pooling.
    dim: the first entries of a vector that are kept; None = all.
  """

  pooling: tuple[str, ...] = ('mean',)
  include_prompt: bool = True
  modules: tuple[Module, ...] = ()
  dim: int | None = None
  similarity: str = dataclasses.field(default='cosine', kw_only=True)

  def apply(self, vectors: np.ndarray, normalize: bool | None = None) -> np.ndarray:
    """Takes pooled hidden states [B, D] through the modules: [B, D'] float32.

    `normalize` adds a last step to length 1; False leaves out that of the model, None keeps it.
    """
    modules = self.modules
    if normalize is False and modules and modules[-1].kind == 'Normalize':
      modules = modules[:-1]
    for module in modules:
      width = _input_width(module)
      require(width in (None, vectors.shape[1]), f'the {module.kind} of this model takes vectors '
              f'of {width}, not of {vectors.shape[1]}: leave out pooling and layers')
      vectors = module(vectors)
    vectors = vectors[:, :self.dim]
    return unit(vectors) if normalize else vectors

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    return self.apply(outputs)

  def files(self, width: int) -> dict[str, bytes]:
    pooling = {'word_embedding_dimension': width,
               **{key: name in self.pooling for key, name in _OLD_POOLINGS.items()},
               'include_prompt': self.include_prompt}
    if len(self.pooling) > 1 or not set(self.pooling) <= set(_OLD_POOLINGS.values()):
      pooling['pooling_mode'] = self.pooling
    paths = ['', _POOLING, *(f'{i}_{m.kind}' for i, m in enumerate(self.modules, 2))]
    kinds = ['Transformer', 'Pooling', *(module.kind for module in self.modules)]
    contents = {f'{path}/config.json': x
                for path, x in zip(paths[1:], (pooling, *(m.config for m in self.modules)))}
    files = self._files([(path, f'models.{kind}') for path, kind in zip(paths, kinds)], contents,
                        {'truncate_dim': self.dim} if self.dim else {}, {})
    return files | {f'{path}/{_WEIGHTS}': save(module.tensors)
                    for path, module in zip(paths[2:], self.modules) if module.tensors}


def _input_width(module: Module) -> int | None:
  """The width that a module needs; None = any."""
  weight = module.tensors.get('linear.weight', module.tensors.get('norm.weight'))
  return None if weight is None else weight.shape[-1]


# ---- reading ------------------------------------------------------------------------------------


class Listed(NamedTuple):
  """A line of modules.json."""

  kind: str  # Transformer, Pooling, ...
  path: str  # of its folder; '' = the model's own


def listed(directory: epath.Path) -> list[Listed]:
  """The modules of a folder; raises UserError for an unknown one, which it names."""
  path = directory / FILE
  try:
    rows = [(str(row['type']), str(row['path'])) for row in json.loads(path.read_text())]
  except (ValueError, TypeError, KeyError) as e:
    raise UserError(f'{path} is no list of modules with a type and a path') from e
  modules, known = [], ('Transformer', _MLM)
  for place, (kind, folder) in enumerate(rows):
    parts = kind.split('.')
    name = parts[-1]
    require(parts[0] == text_layout.PACKAGE and name in known, f'{path}: the module {kind} is '
            f'unknown in place {place}: known is {" or ".join(known) or "none"}')
    require(epath.Path(folder).name == folder, f'{path} names {folder!r}, which is no folder in '
            'its own')
    modules.append(Listed(name, folder))
    known = _BEHIND.get(name, tuple(_KINDS))
  require(modules, f'{path} lists no module')
  return modules


def _read_pooling(path: epath.Path) -> tuple[tuple[str, ...], bool]:
  """(poolings, include_prompt)."""
  config = storage.read_json(path)
  modes = config.get('pooling_mode')
  if modes is None:
    asked = [key for key, value in config.items() if key.startswith('pooling_mode_') and value]
    modes = [name for key, name in _OLD_POOLINGS.items() if key in asked]
    modes += [key for key in asked if key not in _OLD_POOLINGS]
  modes = tuple(modes if isinstance(modes, list) else [modes]) or ('mean',)
  unknown = [str(mode) for mode in modes if mode not in POOLINGS]
  require(not unknown, f'{path}: the pooling {", ".join(unknown)} is unknown: known are '
          f'{", ".join(POOLINGS)}')
  return modes, bool(config.get('include_prompt', True))


def _read_module(kind: str, folder: epath.Path, width: int) -> Module:
  """A module behind the pooling, whose input has this width."""
  config, path = storage.read_json_if_any(folder / 'config.json'), folder / _WEIGHTS
  places = [config.get(f'module_{end}_name') for end in ('input', 'output')]
  require(all(x in (None, 'sentence_embedding') for x in places) and not config.get('use_residual'),
          f'{folder} is no plain {kind} of the pooled vector: it has a residual, or other names of '
          'its input and output')
  if kind == 'Dense':
    config.setdefault('activation_function', _TANH)
    require(str(config['activation_function']) in _ACTIVATIONS,
            f'{folder}: the activation_function {config["activation_function"]} is unknown: known '
            f'are {", ".join(_ACTIVATIONS)}')
  shapes = _KINDS[kind].shapes(config, width)
  if not shapes:
    return Module(kind, config, {})
  require(path.exists(), f'{folder} lacks {_WEIGHTS}: SentenceTransformer(FOLDER)'
          '.save_pretrained(NEW) of sentence-transformers writes it')
  try:
    tensors = {name: x.astype(np.float32) for name, x in load_file(str(path)).items()}
  except (safetensors.SafetensorError, OSError) as e:
    raise UserError(f'{path} is corrupt or no safetensors file: {e}') from e
  sizes = {name: x.shape for name, x in tensors.items()}
  require(sizes == shapes, f'{path} has tensors of shapes {sizes}, its config and the module '
          f'before it ask for {shapes}')
  return Module(kind, config, tensors)


def read(directory: epath.Path, config: BertConfig,
         tokenizer: tokenizer_base.Tokenizer) -> text_layout.TextLayout | None:
  """Reads all but the encoder, which has this config and tokenizer; None for an encoder alone.

  Raises:
    UserError: a module is not as we know it, or its tensors do not fit.
  """
  modules = listed(directory)
  if len(modules) == 1 and not cross_layout.is_cross(directory):
    return None
  encoder = directory / modules[0].path
  texts = text_layout.read(directory, encoder, config.max_positions, tokenizer)
  if len(modules) == 1:
    return cross_layout.read(directory, texts)
  if modules[1].kind == sparse_layout.MODULE:
    return sparse_layout.read(directory, encoder, directory / modules[1].path,
                              modules[0].kind == _MLM, texts)
  pooling, include_prompt = _read_pooling(directory / modules[1].path / 'config.json')
  steps, width = [], config.hidden_size * len(pooling)
  for kind, path in modules[2:]:
    steps.append(_read_module(kind, directory / path, width))
    width = steps[-1].config['out_features'] if kind == 'Dense' else width
  path = directory / text_layout.SETTINGS
  dim = storage.read_json_if_any(path).get('truncate_dim')
  require(dim is None or isinstance(dim, int) and dim > 0,
          f'{path}: truncate_dim={dim!r} is no positive number')
  texts['similarity'] = texts['similarity'] or 'cosine'
  return SentenceLayout(pooling, include_prompt, tuple(steps), dim, **texts)
