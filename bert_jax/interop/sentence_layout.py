"""The modules behind an encoder of sentence-transformers: pooling, dense layers, norms, prompts.

In its folders modules.json lists the modules, and each has a folder with its config.json
(https://www.sbert.net/docs/package_reference/base/modules.html). The modules run on the host: they
cost a thousandth of the encoder, and numpy rounds alike on every platform.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
from typing import Any, NamedTuple

from etils import epath
import jax
import numpy as np
import safetensors
from safetensors.numpy import load_file, save
import tokenizers

from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime import storage

FILE = 'modules.json'
_PACKAGE = 'sentence_transformers'
_FIRST = ('Transformer', 'Pooling')  # the first two modules
_SETTINGS, _ENCODER_SETTINGS = 'config_sentence_transformers.json', 'sentence_bert_config.json'
# Older folders call it by the kind of their encoder; the first that is there counts.
_OLD_ENCODER_SETTINGS = [f'sentence_{kind}_config.json' for kind in (
    'roberta', 'distilbert', 'camembert', 'albert', 'xlm-roberta')]
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


@dataclasses.dataclass(frozen=True)
class SentenceLayout:
  """How a model makes a vector of a text, as its folder says.

  Attributes:
    pooling: one or several of `model.pooling.POOLINGS`, side by side.
    include_prompt: whether the tokens of a prompt are pooled too.
    modules: the steps behind the pooling.
    prompts: the texts that go before a text, by name; `default_prompt` is the name of one or None.
    similarity: the function that compares two vectors, for sentence-transformers.
    max_len: tokens of a text, special ones included; None = as many as the model has positions.
    lowercase: a text is put in lower case before the tokeniser reads it.
    dim: the first entries of a vector that are kept; None = all.
  """

  pooling: tuple[str, ...] = ('mean',)
  include_prompt: bool = True
  modules: tuple[Module, ...] = ()
  prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  default_prompt: str | None = None
  similarity: str = 'cosine'
  max_len: int | None = None
  lowercase: bool = False
  dim: int | None = None

  def prompt(self, name: str | None) -> str:
    """The prompt of this name; None = the default one, '' = none at all."""
    name = self.default_prompt if name is None else name
    known = f'known are {", ".join(self.prompts)}' if self.prompts else 'the model has none'
    require(not name or name in self.prompts, f'prompt={name!r} is unknown: {known}')
    return self.prompts[name] if name else ''

  def prepared(self, texts: Sequence[tuple[str, ...]], prompt: str) -> list[tuple[str, ...]]:
    """The texts or pairs as the tokeniser reads them, behind a prompt."""
    lower = tokenizers.normalizers.Lowercase().normalize_str if self.lowercase else str
    return [(lower(prompt + first), *map(lower, rest)) for first, *rest in texts]

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

  def files(self, width: int) -> dict[str, bytes]:
    """The content of a folder around an encoder with hidden states of `width`, by path."""
    pooling = {'word_embedding_dimension': width,
               **{key: name in self.pooling for key, name in _OLD_POOLINGS.items()},
               'include_prompt': self.include_prompt}
    if len(self.pooling) > 1:
      pooling['pooling_mode'] = self.pooling
    paths = ['', _POOLING, *(f'{i}_{m.kind}' for i, m in enumerate(self.modules, 2))]
    kinds = ['Transformer', 'Pooling', *(module.kind for module in self.modules)]
    listed = [{'idx': i, 'name': str(i), 'path': path, 'type': f'{_PACKAGE}.models.{kind}'}
              for i, (path, kind) in enumerate(zip(paths, kinds))]
    settings = {'prompts': dict(self.prompts), 'default_prompt_name': self.default_prompt,
                'similarity_fn_name': self.similarity}
    if self.dim:
      settings['truncate_dim'] = self.dim
    contents = {FILE: listed, f'{_POOLING}/config.json': pooling, _SETTINGS: settings,
                _ENCODER_SETTINGS: {'max_seq_length': self.max_len,
                                    'do_lower_case': self.lowercase},
                **{f'{path}/config.json': m.config for path, m in zip(paths[2:], self.modules)}}
    files = {name: (json.dumps(x, indent=2) + '\n').encode() for name, x in contents.items()}
    return files | {f'{path}/{_WEIGHTS}': save(module.tensors)
                    for path, module in zip(paths[2:], self.modules) if module.tensors}

  def write(self, directory: epath.Path, width: int):
    """Writes all but the encoder."""
    for name, content in self.files(width).items():
      (directory / name).parent.mkdir(parents=True, exist_ok=True)
      (directory / name).write_bytes(content)


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
  modules = []
  for place, (kind, folder) in enumerate(rows):
    parts = kind.split('.')
    name, known = parts[-1], _FIRST[place:place + 1] or tuple(_KINDS)
    require(parts[0] == _PACKAGE and name in known, f'{path}: the module {kind} is unknown in '
            f'place {place}: known is {" or ".join(known)}')
    require(epath.Path(folder).name == folder, f'{path} names {folder!r}, which is no folder in '
            'its own')
    modules.append(Listed(name, folder))
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
  unknown = [str(mode) for mode in modes if mode not in _OLD_POOLINGS.values()]
  require(not unknown, f'{path}: the pooling {", ".join(unknown)} is unknown: known are '
          f'{", ".join(_OLD_POOLINGS.values())}')
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
         tokenizer: tokenizer_base.Tokenizer) -> SentenceLayout | None:
  """Reads all but the encoder, which has this config and tokeniser; None without a pooling.

  Raises:
    UserError: a module is not as we know it, or its tensors do not fit.
  """
  modules, positions = listed(directory), config.max_positions
  if len(modules) == 1:  # a cross-encoder's folder
    return None
  encoder = directory / modules[0].path
  pooling, include_prompt = _read_pooling(directory / modules[1].path / 'config.json')
  steps, width = [], config.hidden_size * len(pooling)
  for kind, path in modules[2:]:
    steps.append(_read_module(kind, directory / path, width))
    width = steps[-1].config['out_features'] if kind == 'Dense' else width
  settings = storage.read_json_if_any(directory / _SETTINGS)
  limits = next(filter(None, (storage.read_json_if_any(encoder / name) for name in (
      _ENCODER_SETTINGS, *_OLD_ENCODER_SETTINGS))), {})
  longest = limits.get('max_seq_length') or tokenizer_reader.longest_input(encoder)
  require(isinstance(longest, int | float), f'{encoder}: the longest input {longest!r} is '
          'no number')
  prompts, default = settings.get('prompts') or {}, settings.get('default_prompt_name')
  require(isinstance(prompts, dict) and all(isinstance(x, str) for x in prompts.values()),
          f'{directory}/{_SETTINGS}: prompts={prompts!r} is no table of names and texts')
  require(default is None or default in list(prompts), f'{directory}/{_SETTINGS}: '
          f'default_prompt_name={default!r} is none of its prompts')
  dim = settings.get('truncate_dim')
  require(dim is None or isinstance(dim, int) and dim > 0,
          f'{directory}/{_SETTINGS}: truncate_dim={dim!r} is no positive number')
  return SentenceLayout(
      pooling, include_prompt, tuple(steps), prompts, default,
      settings.get('similarity_fn_name') or 'cosine', int(min(longest, positions)),
      bool(limits.get('do_lower_case')) and not tokenizer.lowercase,
      dim)
