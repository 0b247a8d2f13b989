"""MultiVectorEncoder of sentence-transformers 6, and ColBERT of PyLate.

Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832: a text has a vector for each
token, and MaxSim compares the tokens of a query with the tokens of a document. A folder
has a projection of the hidden states, the words that MaxSim skips, and the rule that
expands queries with [MASK].
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from etils import epath
import numpy as np
from safetensors.numpy import save

from bert_jax.data.inputs import Input
from bert_jax.data.late_inputs import (
  DOCUMENT,
  EXPANSIONS,
  HIDING,
  PUNCTUATION,
  QUERY,
  LateInputs,
)
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import require, require_choice
from bert_jax.interop import text_layout
from bert_jax.runtime import storage
from bert_jax.tasks import late_interaction

# The model_type in SETTINGS; the last is PyLate's.
KINDS = ('MultiVectorEncoder', 'ColBERT')
PYLATE = 'pylate'  # the package of its modules
DOCUMENT_PROMPTS = ('document', 'passage', 'corpus')  # the first that exists
_IDENTITY = 'torch.nn.modules.linear.Identity'
_OF_TOKENS = 'token_embeddings'
# The modules that may follow the encoder; the last one marks the tokens that count.
MODULES = ('Dense', 'Normalize', 'MultiVectorMask')
_BASE, _MULTI = 'base.modules', 'multi_vector_encoder.modules'


@dataclasses.dataclass(frozen=True)
class LateLayout(text_layout.TextLayout):
  """How a model turns a text into vectors of its tokens, as its folder describes.

  Attributes:
    texts: how queries and documents become inputs.
    normalizes: whether the vectors have length 1.
    marks: the tokens that PyLate puts before queries and documents.
    projection: [D, D'] float32, set only while a folder is read or written. At other
      times the projection is among the parameters of the model.
  """

  texts: LateInputs = LateInputs()
  normalizes: bool = True
  marks: tuple[str, ...] = dataclasses.field(default=(), compare=False)
  projection: np.ndarray | None = dataclasses.field(default=None, compare=False)

  def inputs(self, texts: Sequence[str], tokenizer: Tokenizer, role: str,
             positions: int) -> tuple[list[Input], list[np.ndarray]]:
    """Makes the inputs of queries or documents, with their prompts: see `LateInputs`."""
    names = (role,) if role == QUERY else DOCUMENT_PROMPTS
    prompt = self.prompt(self.first_prompt(names))
    return self.texts.make(self.prepared([(text,) for text in texts], prompt), tokenizer,
                           role, min(positions, self.max_len or positions), positions)

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """Returns the vectors unchanged: no step is left for the host."""
    return outputs

  def files(self, width: int) -> dict[str, bytes]:
    texts, contents = self.texts, {}
    modules = [('', f'{_BASE}.transformer.Transformer')]
    if self.projection is not None:
      modules.append(('1_Dense', f'{_BASE}.dense.Dense'))
      contents['1_Dense/config.json'] = {
          'in_features': width, 'out_features': self.projection.shape[1], 'bias': False,
          'activation_function': _IDENTITY, 'module_input_name': _OF_TOKENS,
          'module_output_name': _OF_TOKENS}
    modules.append(('2_MultiVectorMask', f'{_MULTI}.multi_vector_mask.MultiVectorMask'))
    contents['2_MultiVectorMask/config.json'] = {
        'skiplist_words': list(texts.skipped), 'skiplist_tasks': list(texts.skipped_in),
        'keep_only_token_ids': list(texts.only) or None}
    if self.normalizes:
      modules.append(('3_Normalize', f'{_BASE}.normalize.Normalize'))
      contents['3_Normalize/config.json'] = {'module_input_name': _OF_TOKENS,
                                             'module_output_name': _OF_TOKENS}
    expansion = None if texts.expansion == 'none' else {
        'strategy': texts.expansion.removesuffix('_visible'),
        'attend': texts.expansion not in HIDING, 'length': texts.expanded}
    lengths = {'query_length': texts.query_length,
               'document_length': texts.document_length}
    files = self._files(
        modules=modules, contents=contents, settings={'model_type': KINDS[0]},
        encoder={'query_expansion': expansion,
                 **{name: x for name, x in lengths.items() if x is not None}})
    if self.projection is not None:
      weight = np.ascontiguousarray(self.projection.T)
      files[f'1_Dense/{text_layout.WEIGHTS}'] = save({'linear.weight': weight})
    return files


def _linear(folder: epath.Path, x: np.ndarray) -> np.ndarray:
  """Combines the projection so far with a Dense without a bias: [D, A] -> [D, B]."""
  config = storage.read_json_if_any(folder / 'config.json')
  places = [config.get(f'module_{end}_name') for end in ('input', 'output')]
  require(all(place in (None, _OF_TOKENS) for place in places)
          and config.get('activation_function', _IDENTITY) == _IDENTITY,
          f'{folder} is not a linear Dense of the tokens: it has an activation_function, or '
          'other names for its input and output')
  tensors = text_layout.tensors(folder)
  weight = tensors.pop('linear.weight', None)
  residual = tensors.pop('residual.weight', None)
  is_known = not tensors and weight is not None and weight.shape[1:] == x.shape[1:]
  require(is_known, f'{folder}: its projection must have no bias and take vectors of '
                    f'{x.shape[1]}')
  y = x @ weight.T
  if config.get('use_residual'):
    fits = y.shape == x.shape if residual is None else residual.shape == weight.shape
    require(fits, f'{folder}: its residual must turn vectors of {x.shape[1]} into '
                  f'vectors of {y.shape[1]}')
    y += x if residual is None else x @ residual.T
  return y


def _expansion(settings: Mapping[str, Any], limits: Mapping[str, Any],
               path: epath.Path) -> dict[str, Any]:
  """Returns the fields `expansion`, `expanded` and `query_length`.

  sentence-transformers writes query_expansion among the settings of the encoder, `limits`.
  PyLate writes its own field names into `settings`. It expands unless its field
  do_query_expansion is false.
  """
  length = limits.get('query_length') or settings.get('query_length')
  expansion = limits.get('query_expansion', settings.get('query_expansion'))
  is_pylate = settings.get('model_type') == KINDS[1] or 'query_prefix' in settings
  if expansion is None and is_pylate and settings.get('do_query_expansion') is not False:
    attend = settings.get('attend_to_expansion_tokens')
    expansion = {'strategy': 'fixed', 'attend': bool(attend), 'length': length or 32}
  if not expansion:
    return {'query_length': length}
  is_known = (isinstance(expansion, dict) and not expansion.get('token')
              and type(expansion.get('length')) is int)
  require(is_known, f'{path}: query_expansion={expansion!r}: it must have a length, and '
                    'no token: bert_jax expands with [MASK]')
  name = str(expansion.get('strategy')) + '_visible' * bool(expansion.get('attend'))
  require_choice(f'{path}: query_expansion', name, EXPANSIONS)
  return {'expansion': name, 'expanded': expansion['length'], 'query_length': length}


def read(directory: epath.Path, modules: Sequence[tuple[str, str]], width: int,
         settings: Mapping[str, Any], texts: Mapping[str, Any]) -> LateLayout:
  """Reads the layout of a folder, with its projection.

  Args:
    directory: the folder.
    modules: (kind, folder) of each module.
    width: D, the size of the hidden states.
    settings: the content of the file SETTINGS.
    texts: the result of `text_layout.read`.

  Raises:
    UserError: a module is unknown, or has an option that bert_jax lacks.
  """
  path = directory / text_layout.SETTINGS
  is_pylate = settings.get('model_type') == KINDS[1]
  limits = text_layout.encoder_settings(directory / modules[0][1])
  # PyLate normalizes without a Normalize module. In other folders Dense must come before
  # Normalize.
  projection, mask, normalizes = None, {}, is_pylate
  for kind, folder in modules[1:]:
    require(kind in MODULES
            and not (kind == 'Dense' and normalizes and not is_pylate),
            f'{directory / text_layout.FILE}: the module {kind} is unknown in a '
            f'{settings["model_type"]}')
    if kind == 'Dense':
      before = np.eye(width, dtype=np.float32) if projection is None else projection
      projection = _linear(directory / folder, before)
    elif kind == 'MultiVectorMask':
      mask = storage.read_json_if_any(directory / folder / 'config.json')
    normalizes |= kind == 'Normalize'
  # PyLate's marks of queries and documents come before their prompts.
  prompts, marks = dict(texts['prompts']), []
  for role in (QUERY, DOCUMENT):
    mark = settings.get(f'{role}_prefix')
    if mark:
      prompts[role] = mark + prompts.get(role, '').removeprefix(mark)
      marks.append(mark)
  skipped = mask.get('skiplist_words', settings.get('skiplist_words'))
  if skipped is None:
    skipped = PUNCTUATION if is_pylate else ()
  # As in sentence-transformers: null means documents, and a string is a single role.
  roles = mask.get('skiplist_tasks')
  roles = DOCUMENT if roles is None else roles
  inputs = LateInputs(
      document_length=limits.get('document_length') or settings.get('document_length'),
      skipped=tuple(skipped), skipped_in=(roles,) if isinstance(roles, str) else tuple(roles),
      only=tuple(mask.get('keep_only_token_ids') or ()),
      **_expansion(settings, limits, path))
  return LateLayout(
      inputs, normalizes, tuple(marks), projection,
      **{**texts, 'prompts': prompts, 'similarity': texts['similarity'] or 'maxsim'})


def of_run(data: Mapping[str, Any], max_len: int) -> LateLayout:
  """Returns the layout of a run with these fields of `data`."""
  return LateLayout(late_interaction.inputs_of(data), max_len=max_len, similarity='maxsim',
                    prompts={role: prompt for role in (QUERY, DOCUMENT)
                             if (prompt := data[f'{role}_prompt'])})


def with_projection(model: Any) -> Any:
  """Moves the projection of a `Pretrained` from its layout to its parameters."""
  kernel = model.text_layout.projection
  if kernel is None:  # the folder leaves the hidden states as they are
    kernel = np.eye(model.config.hidden_size, dtype=np.float32)
  params = {**model.params['params'], 'projection': {'kernel': kernel}}
  return dataclasses.replace(
      model, params={'params': params}, task=late_interaction.LateKind.name,
      labels=late_interaction.entries(kernel.shape[1]),
      text_layout=dataclasses.replace(model.text_layout, projection=None))


def without_projection(model: Any) -> Any:
  """Moves the projection of a `Pretrained` from its parameters to its layout."""
  params = dict(model.params['params'])
  kernel = np.asarray(params.pop('projection')['kernel'])
  return dataclasses.replace(
      model, params={'params': params}, task='', labels=(),
      text_layout=dataclasses.replace(model.text_layout, projection=kernel))
