"""The modules after an encoder of sentence-transformers: pooling, dense layers and norms.

A folder lists its modules in modules.json. Each module has a folder with a config.json
(https://www.sbert.net/docs/package_reference/base/modules.html). The modules run on the
host in float32. They take about a thousandth of the encoder's time, and an accelerator
may round their matrix products to bfloat16.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
from typing import Any, NamedTuple

from etils import epath
import numpy as np
from safetensors.numpy import save
from scipy import special

from bert_jax.data import late_inputs
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.errors import UserError, require
from bert_jax.interop import cross_layout, late_layout, sparse_layout, text_layout
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.pooling import POOLINGS
from bert_jax.runtime import storage

_MLM = 'MLMTransformer'  # the name of the encoder of a SpladePooling in older folders
# The names of the prompts for queries and documents; the first that exists counts.
# sentence-transformers gives each dense model a "document" prompt, empty by default.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ('query',), late_layout.DOCUMENT_PROMPTS
# The poolings by their names in older folders, in the order of concatenation.
_OLD_POOLINGS = {'pooling_mode_cls_token': 'cls',
                 'pooling_mode_max_tokens': 'max',
                 'pooling_mode_mean_tokens': 'mean',
                 'pooling_mode_mean_sqrt_len_tokens': 'mean_sqrt_len_tokens',
                 'pooling_mode_weightedmean_tokens': 'weightedmean',
                 'pooling_mode_lasttoken': 'lasttoken'}
_TANH = 'torch.nn.modules.activation.Tanh'
_ACTIVATIONS = {_TANH: np.tanh,
                'torch.nn.modules.linear.Identity': np.asarray,
                'torch.nn.modules.activation.ReLU': functools.partial(np.maximum, 0),
                'torch.nn.modules.activation.GELU': lambda x: x * special.ndtr(x)}


class Module(NamedTuple):
  """A step from hidden states to vectors."""

  kind: str  # Pooling, or one of _RUN
  config: dict[str, Any]
  tensors: dict[str, np.ndarray]  # float32, by their names in PyTorch


def unit(vectors: np.ndarray) -> np.ndarray:
  """Normalizes vectors [..., D] to length 1; a zero vector stays zero."""
  norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
  return vectors / np.maximum(norms, 1e-12)


def _dense(module: Module, x: np.ndarray) -> np.ndarray:
  x = (x @ module.tensors['linear.weight'].T
       + module.tensors.get('linear.bias', np.float32(0)))
  return _ACTIVATIONS[module.config['activation_function']](x)


def _layer_norm(module: Module, x: np.ndarray) -> np.ndarray:
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-5))
  return x * module.tensors['norm.weight'] + module.tensors['norm.bias']


_RUN = {'Dense': _dense,
        'LayerNorm': _layer_norm,
        'Normalize': lambda module, x: unit(x),
        'Dropout': lambda module, x: x}  # acts only in training


def _shapes(kind: str, config: Mapping[str, Any],
            width: int) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the tensors of a module whose input has this width."""
  if kind == 'Dense':
    out = config.get('out_features')
    bias = {'linear.bias': (out,)} if config.get('bias', True) else {}
    return {'linear.weight': (out, width), **bias}
  return {'norm.weight': (width,), 'norm.bias': (width,)} if kind == 'LayerNorm' else {}


# Which modules may follow a module. After any other module, only a module of _RUN or a
# MultiVectorMask may follow.
_FOLLOWERS = {'Transformer': ('Pooling', sparse_layout.MODULE, *late_layout.MODULES),
              _MLM: (sparse_layout.MODULE,),
              sparse_layout.MODULE: ()}


@dataclasses.dataclass(frozen=True)
class SentenceLayout(text_layout.TextLayout):
  """How a model turns a text into a vector, as its folder describes.

  Attributes:
    pooling: one or several of `model.pooling.POOLINGS`, concatenated.
    include_prompt: whether the tokens of a prompt are pooled too.
    modules: the modules after the pooling.
    dim: the number of entries of a vector to keep; None = all.
  """

  pooling: tuple[str, ...] = ('mean',)
  include_prompt: bool = True
  modules: tuple[Module, ...] = ()
  dim: int | None = None
  similarity: str = dataclasses.field(default='cosine', kw_only=True)

  @property
  def search_normalizes(self) -> bool | None:
    """The argument `normalize` of `finished` in a search, which compares by dot products.

    Raises UserError for a model whose similarity is neither the cosine nor the product.
    """
    require(self.similarity in ('cosine', 'dot'),
            f'this model compares vectors by {self.similarity}: a search knows cosine and dot')
    return True if self.similarity == 'cosine' else None

  def finished(self, vectors: np.ndarray, normalize: bool | None = None) -> np.ndarray:
    """Applies the modules to pooled hidden states: [B, D] -> [B, D'] float32.

    Args:
      vectors: the pooled hidden states.
      normalize: True adds a normalization at the end, False leaves out the normalization
        of the model, None keeps it.

    Raises:
      UserError: the vectors do not have the width that a layer takes.
    """
    modules = self.modules
    if normalize is False and modules and modules[-1].kind == 'Normalize':
      modules = modules[:-1]
    for module in modules:
      # Users may ask for a pooling or layers that give vectors of another width.
      weight = module.tensors.get('linear.weight', module.tensors.get('norm.weight'))
      width = None if weight is None else weight.shape[-1]
      require(width in (None, vectors.shape[1]),
              f'the {module.kind} of this model takes vectors of {width}, not of '
              f'{vectors.shape[1]}: leave out pooling and layers')
      vectors = _RUN[module.kind](module, vectors)
    vectors = vectors[:, :self.dim]
    return unit(vectors) if normalize else vectors

  def files(self, width: int) -> dict[str, bytes]:
    # Every version of sentence-transformers reads the field names of older folders.
    pooling = {'word_embedding_dimension': width,
               **{key: name in self.pooling for key, name in _OLD_POOLINGS.items()},
               'include_prompt': self.include_prompt}
    if len(self.pooling) > 1 or not set(self.pooling) <= set(_OLD_POOLINGS.values()):
      pooling['pooling_mode'] = self.pooling
    modules = [Module('Pooling', pooling, {}), *self.modules]
    by_path = {f'{i}_{module.kind}': module for i, module in enumerate(modules, 1)}
    files = self._files(
        modules=[('', 'models.Transformer'),
                 *((path, f'models.{module.kind}') for path, module in by_path.items())],
        contents={f'{path}/config.json': module.config
                  for path, module in by_path.items()},
        settings={'truncate_dim': self.dim} if self.dim else {},
        encoder={})
    return files | {f'{path}/{text_layout.WEIGHTS}': save(module.tensors)
                    for path, module in by_path.items() if module.tensors}


# ---- reading ---------------------------------------------------------------------------


class Listed(NamedTuple):
  """An entry of modules.json."""

  kind: str  # Transformer, Pooling, ...
  path: str  # the folder of the module; '' = the folder of the model


def listed(directory: epath.Path) -> list[Listed]:
  """Returns the modules of a folder; raises UserError for an unknown one."""
  path = directory / text_layout.FILE
  try:
    rows = [(str(row['type']), str(row['path'])) for row in json.loads(path.read_text())]
  except (ValueError, TypeError, KeyError) as e:
    raise UserError(f'{path} is not a list of modules with a type and a path') from e
  modules, known = [], ('Transformer', _MLM)
  for place, (kind, folder) in enumerate(rows):
    # A type is the name of a Python class. It is compared, never imported.
    package, name = kind.split('.')[0], kind.split('.')[-1]
    require(package in (text_layout.PACKAGE, late_layout.PYLATE) and name in known,
            f'{path}: the module {kind} is unknown in place {place}: expected '
            f'{" or ".join(known) or "no module"}')
    require(epath.Path(folder).name == folder != '..',
            f'{path} names {folder!r}, which is not a folder directly inside the model')
    modules.append(Listed(name, folder))
    known = _FOLLOWERS.get(name, (*_RUN, late_layout.MODULES[-1]))
  require(modules, f'{path} lists no module')
  return modules


def _read_pooling(path: epath.Path) -> tuple[tuple[str, ...], bool]:
  """Returns (poolings, include_prompt)."""
  config = storage.read_json(path)
  modes = config.get('pooling_mode')
  # Older folders have a flag for each pooling.
  if modes is None:
    flags = [key for key, value in config.items()
             if key.startswith('pooling_mode_') and value]
    modes = [name for key, name in _OLD_POOLINGS.items() if key in flags]
    modes += [key for key in flags if key not in _OLD_POOLINGS]
  modes = tuple(modes if isinstance(modes, list) else [modes]) or ('mean',)
  unknown = [str(mode) for mode in modes if mode not in POOLINGS]
  require(not unknown,
          f'{path}: the pooling {", ".join(unknown)} is unknown: expected one of '
          f'{", ".join(POOLINGS)}')
  return modes, bool(config.get('include_prompt', True))


def _read_module(kind: str, folder: epath.Path, width: int) -> Module:
  """Reads a module after the pooling, whose input has this width."""
  config = storage.read_json_if_any(folder / 'config.json')
  places = [config.get(f'module_{end}_name') for end in ('input', 'output')]
  require(all(place in (None, 'sentence_embedding') for place in places)
          and not config.get('use_residual'),
          f'{folder} is not a plain {kind} of the pooled vector: it has a residual, or '
          'other names for its input and output')
  if kind == 'Dense':
    # The default of sentence-transformers.
    config.setdefault('activation_function', _TANH)
    require(str(config['activation_function']) in _ACTIVATIONS,
            f'{folder}: the activation_function {config["activation_function"]} is '
            f'unknown: expected one of {", ".join(_ACTIVATIONS)}')
  shapes = _shapes(kind, config, width)
  if not shapes:
    return Module(kind, config, {})
  tensors = text_layout.tensors(folder)
  sizes = {name: x.shape for name, x in tensors.items()}
  require(sizes == shapes,
          f'{folder} has tensors of shapes {sizes}, but its config and the module before '
          f'it need {shapes}')
  return Module(kind, config, tensors)


def read(directory: epath.Path, config: BertConfig,
         tokenizer: tokenizer_base.Tokenizer) -> text_layout.TextLayout | None:
  """Reads everything but the encoder from a folder of sentence-transformers.

  Args:
    directory: the folder of the model.
    config: the config of its encoder.
    tokenizer: the tokenizer of its encoder.

  Returns:
    The layout; None = the folder has only an encoder.

  Raises:
    UserError: a module is unknown, or its tensors do not fit.
  """
  modules = listed(directory)
  path = directory / text_layout.SETTINGS
  settings = storage.read_json_if_any(path)
  encoder = directory / modules[0].path
  text_layout.check_encoder(encoder)
  if len(modules) == 1 and settings.get('model_type') != cross_layout.KIND:
    return None
  texts = text_layout.read(settings, path, encoder, config.max_positions, tokenizer)
  if len(modules) == 1:
    return cross_layout.read(settings, path, texts)
  if modules[1].kind == sparse_layout.MODULE:
    return sparse_layout.read(settings, path, encoder, directory / modules[1].path,
                              modules[0].kind == _MLM, texts)
  if settings.get('model_type') in late_layout.KINDS:
    layout = late_layout.read(directory, modules, config.hidden_size, settings, texts)
    require(config.can_hide or layout.texts.expansion not in late_inputs.HIDING,
            f'{directory} hides the added [MASK] of queries (attend=false), which is not '
            f'supported for {config.architecture}')
    return layout
  require(modules[1].kind == 'Pooling',
          f'{directory / text_layout.FILE}: the module {modules[1].kind} needs a Pooling '
          f'before it, or the model_type {late_layout.KINDS[0]} in {path}')
  pooling, include_prompt = _read_pooling(directory / modules[1].path / 'config.json')
  # Each module must fit the width that the modules before it leave.
  steps, width = [], config.hidden_size * len(pooling)
  for kind, folder in modules[2:]:
    require(kind in _RUN, f'{directory / text_layout.FILE}: {kind} is not for one vector')
    steps.append(_read_module(kind, directory / folder, width))
    width = steps[-1].config['out_features'] if kind == 'Dense' else width
  dim = settings.get('truncate_dim')
  require(dim is None or isinstance(dim, int) and dim > 0,
          f'{path}: truncate_dim={dim!r} is not a positive number')
  texts['similarity'] = texts['similarity'] or 'cosine'
  return SentenceLayout(pooling, include_prompt, tuple(steps), dim, **texts)
