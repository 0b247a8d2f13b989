"""MultiVectorEncoder of sentence-transformers 6, and ColBERT of PyLate.

Khattab and Zaharia 2020, https://arxiv.org/abs/2004.12832: a text has a vector for each
token, and a query meets a document token by token. A folder has a projection of the hidden
states, the words that do not count, and how queries are expanded by [MASK].
"""

from collections.abc import Mapping, Sequence
import dataclasses
import string
from typing import Any

from etils import epath
import numpy as np
from safetensors.numpy import save

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import require, require_choice
from bert_jax.interop import text_layout
from bert_jax.runtime import storage

KINDS = ('MultiVectorEncoder', 'ColBERT')  # the model_type in SETTINGS; the last is PyLate's
PYLATE = 'pylate'  # the package of its modules
QUERY, DOCUMENT = 'query', 'document'
DOCUMENT_PROMPTS = ('document', 'passage', 'corpus')  # the first one counts
# The ways to expand a query. fixed: to exactly `expanded` tokens; min: to at least so many.
# Without _visible, no other token sees the added [MASK] tokens.
HIDING = ('fixed', 'min')
EXPANSIONS = ('none', *HIDING, *(f'{name}_visible' for name in HIDING))
PUNCTUATION = tuple(string.punctuation)
_IDENTITY = 'torch.nn.modules.linear.Identity'
_OF_TOKENS = 'token_embeddings'
# The modules that may follow the encoder; the last one marks the tokens that count.
MODULES = ('Dense', 'Normalize', 'MultiVectorMask')
_BASE, _MULTI = 'base.modules', 'multi_vector_encoder.modules'


@dataclasses.dataclass(frozen=True)
class LateLayout(text_layout.TextLayout):
  """How a model turns a text into vectors of its tokens, as its folder describes.

  Attributes:
    expansion: one of EXPANSIONS.
    expanded: tokens of an expanded query; 0 = no expansion.
    query_length: the most tokens of a query, unless it is expanded to a fixed length; None
      = `max_len`.
    document_length: the most tokens of a document; None = `max_len`.
    skipped: entries of the vocabulary that do not count.
    skipped_in: the texts in which they do not count: QUERY, DOCUMENT or both.
    only: ids of the only tokens of documents that count; () = all tokens.
    normalizes: whether the vectors have length 1.
    marks: the tokens that PyLate puts before queries and documents.
    projection: [D, D'] float32, only while a folder is read or written: the parameters of
      a model have the projection.
  """

  expansion: str = 'none'
  expanded: int = 0
  query_length: int | None = None
  document_length: int | None = None
  skipped: tuple[str, ...] = ()
  skipped_in: tuple[str, ...] = (DOCUMENT,)
  only: tuple[int, ...] = ()
  normalizes: bool = True
  marks: tuple[str, ...] = dataclasses.field(default=(), compare=False)
  projection: np.ndarray | None = dataclasses.field(default=None, compare=False)

  def inputs(self, texts: Sequence[str], tokenizer: Tokenizer, role: str,
             longest: int) -> tuple[list[inputs_lib.Input], list[np.ndarray]]:
    """Makes the inputs of queries or documents.

    Args:
      texts: the texts.
      tokenizer: the tokenizer of the model.
      role: QUERY or DOCUMENT.
      longest: the most tokens of an input.

    Returns:
      (inputs, [tokens] bool of each: True on tokens that count in MaxSim).
    """
    longest, is_query = min(longest, self.max_len or longest), role == QUERY
    least = self.expanded if is_query else 0
    most = (self.query_length if is_query else self.document_length) or longest
    most = least if least and self.expansion.startswith('fixed') else max(most, least)
    prompt = self.prompt(self.first_prompt((role,) if is_query else DOCUMENT_PROMPTS))
    prepared = self.prepared([(text,) for text in texts], prompt)
    inputs, _ = inputs_lib.text_inputs(prepared, tokenizer, min(most, longest))
    if least:
      inputs = [self._expanded(x, min(least, longest), tokenizer) for x in inputs]
    # Words that are no entry count: as unknown tokens they would take others along.
    skipped = [i for i, entry in enumerate(tokenizer.vocab) if entry in self.skipped]
    counts = []
    for ids in (np.array(x.ids) for x in inputs):
      counts.append(~np.isin(ids, skipped) if role in self.skipped_in
                    else np.ones(len(ids), bool))
      if self.only and not is_query:
        counts[-1] &= np.isin(ids, self.only)
    return inputs, counts

  def _expanded(self, text: inputs_lib.Input, length: int,
                tokenizer: Tokenizer) -> inputs_lib.Input:
    missing = max(length - len(text.ids), 0)
    return inputs_lib.Input([*text.ids, *[tokenizer.mask_id] * missing],
                            [*text.type_ids, *[0] * missing],
                            missing if self.expansion in HIDING else 0)

  def finished(self, outputs: np.ndarray) -> np.ndarray:
    """Returns the vectors of tokens: the model computes them to the end."""
    return outputs

  def files(self, width: int) -> dict[str, bytes]:
    modules, contents = [('', f'{_BASE}.transformer.Transformer')], {}
    if self.projection is not None:
      modules.append(('1_Dense', f'{_BASE}.dense.Dense'))
      contents['1_Dense/config.json'] = {
          'in_features': width, 'out_features': self.projection.shape[1], 'bias': False,
          'activation_function': _IDENTITY, 'module_input_name': _OF_TOKENS,
          'module_output_name': _OF_TOKENS}
    modules.append(('2_MultiVectorMask', f'{_MULTI}.multi_vector_mask.MultiVectorMask'))
    contents['2_MultiVectorMask/config.json'] = {
        'skiplist_words': list(self.skipped), 'skiplist_tasks': list(self.skipped_in),
        'keep_only_token_ids': list(self.only) or None}
    if self.normalizes:
      modules.append(('3_Normalize', f'{_BASE}.normalize.Normalize'))
      contents['3_Normalize/config.json'] = {'module_input_name': _OF_TOKENS,
                                             'module_output_name': _OF_TOKENS}
    expansion = None if self.expansion == 'none' else {
        'strategy': self.expansion.removesuffix('_visible'),
        'attend': self.expansion not in HIDING, 'length': self.expanded}
    lengths = {'query_length': self.query_length,
               'document_length': self.document_length}
    files = self._files(
        modules=modules, contents=contents, settings={'model_type': KINDS[0]},
        encoder={'query_expansion': expansion,
                 **{name: x for name, x in lengths.items() if x is not None}})
    if self.projection is not None:
      weight = np.ascontiguousarray(self.projection.T)
      files[f'1_Dense/{text_layout.WEIGHTS}'] = save({'linear.weight': weight})
    return files


def _linear(folder: epath.Path, x: np.ndarray) -> np.ndarray:
  """Applies a Dense of tokens without a bias to the projection so far: [D, A] -> [D, B]."""
  config = storage.read_json_if_any(folder / 'config.json')
  places = [config.get(f'module_{end}_name') for end in ('input', 'output')]
  require(all(place in (None, _OF_TOKENS) for place in places)
          and config.get('activation_function', _IDENTITY) == _IDENTITY,
          f'{folder} is not a linear Dense of the tokens: it has an activation_function, or '
          'other names for its input and output')
  tensors = text_layout.tensors(folder)
  weight, residual = tensors.pop('linear.weight', None), tensors.pop('residual.weight', None)
  is_known = not tensors and weight is not None and weight.shape[1:] == x.shape[1:]
  require(is_known, f'{folder}: a projection without a bias, from {x.shape[1]} numbers, is '
                    'needed')
  y = x @ weight.T
  if config.get('use_residual'):
    y += x if residual is None else x @ residual.T
  return y


def _expansion(settings: Mapping[str, Any], limits: Mapping[str, Any],
               path: epath.Path) -> dict[str, Any]:
  """Returns the fields `expansion`, `expanded` and `query_length`.

  sentence-transformers writes query_expansion among the settings of the encoder, `limits`.
  PyLate writes its own names into `settings`, and expands unless they say otherwise.
  """
  length = limits.get('query_length') or settings.get('query_length')
  expansion = limits.get('query_expansion', settings.get('query_expansion'))
  is_pylate = settings.get('model_type') == KINDS[1] or 'query_prefix' in settings
  if expansion is None and is_pylate and settings.get('do_query_expansion') is not False:
    attend = settings.get('attend_to_expansion_tokens')
    expansion = {'strategy': 'fixed', 'attend': bool(attend), 'length': length or 32}
  if not expansion:
    return {'query_length': length}
  require(isinstance(expansion, dict) and not expansion.get('token'),
          f'{path}: query_expansion={expansion!r}: bert_jax expands with [MASK]')
  name = str(expansion.get('strategy')) + '_visible' * bool(expansion.get('attend'))
  require_choice(f'{path}: query_expansion', name, EXPANSIONS)
  return {'expansion': name, 'expanded': int(expansion['length']), 'query_length': length}


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
  path, is_pylate = directory / text_layout.SETTINGS, settings.get('model_type') == KINDS[1]
  limits = text_layout.encoder_settings(directory / modules[0][1])
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
  return LateLayout(
      document_length=limits.get('document_length') or settings.get('document_length'),
      skipped=tuple(skipped), skipped_in=tuple(mask.get('skiplist_tasks') or (DOCUMENT,)),
      only=tuple(mask.get('keep_only_token_ids') or ()), normalizes=normalizes,
      marks=tuple(marks), projection=projection,
      **_expansion(settings, limits, path),
      **{**texts, 'prompts': prompts, 'similarity': texts['similarity'] or 'maxsim'})
