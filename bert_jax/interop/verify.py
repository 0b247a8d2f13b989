"""Compares two models: tensors, outputs and tokenization."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
from typing import Any

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.errors import require
from bert_jax.interop import families, layout, tokenizer_checks
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures
from bert_jax.model.heads import BertForPreTraining, ReplacedTokenHead
from bert_jax.tasks import question_answering

# The names of the logits of each head in the outputs of transformers' classes.
_LOGITS = {'mlm': ('prediction_logits', 'logits'),
           'nsp': ('seq_relationship_logits', 'sop_logits', 'logits'),
           'rtd': ('logits',)}
# The largest difference between the outputs of most models. The arithmetic is the same,
# but the order of additions may differ.
TOLERANCE = 2e-5
# Deep models and large weights amplify rounding. The outputs may differ by this factor
# times the change from `last_bits_changed`. On models of 12 and 22 layers with initial
# weights of 0.02 to 0.1, PyTorch's outputs differ by 0.8 to 1.4 times this change.
_FACTOR = 4
# In a model that amplifies rounding even more, a comparison would find no mistake.
_MOST = 1e-2
# The versions whose classes take the arguments that the comparison gives.
_OLDEST = {'torch': 2, 'transformers': 5, 'sentence-transformers': 6}


def whole_float32() -> contextlib.AbstractContextManager[None]:
  """Multiplies float32 as PyTorch and onnxruntime do on a CPU, also on a TPU or GPU."""
  return jax.default_matmul_precision('highest')


def sample(model: Pretrained, rows: int = 3, length: int = 24) -> Tokens:
  """Returns a batch [rows, length] with padding, of ids from the whole vocabulary."""
  rng, length = np.random.default_rng(0), min(length, model.config.max_positions)
  ids = rng.integers(0, model.config.vocab_size, (rows, length)).astype(np.int32)
  # transformers' RoBERTa computes positions from the ids that are not [PAD].
  ids[ids == model.tokenizer.pad_id] = model.tokenizer.unk_id
  used = np.maximum(length - np.arange(rows) * length // 3, 1)
  text_ids = (np.arange(length) < used[:, None]).astype(np.int32)
  type_ids = ((np.arange(length) > length // 3) * text_ids).astype(np.int32)
  type_ids = np.minimum(type_ids, max(model.config.type_vocab_size - 1, 0))
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
  return Tokens(ids, type_ids, positions, text_ids)


def _outputs(model: Pretrained) -> dict[str, np.ndarray]:
  """Computes hidden states and logits of a fixed batch: float32 arrays by name."""
  batch = sample(model)
  config = dataclasses.replace(model.config, dtype='float32')
  first = jnp.zeros((len(batch.ids), 1), jnp.int32)
  is_real = batch.text_ids > 0
  module, heads = architectures.make_encoder(config), BertForPreTraining(config)

  def run(params):
    encoder = {'params': params['params']['bert']}
    hidden = module.apply(encoder, batch, method='encode')
    results = {'hidden states': hidden[is_real]}
    if 'pooler' in model.groups:
      results['pooled output'] = module.apply(encoder, hidden, first, method='pool')
    if 'mlm' in model.groups:
      logits = heads.apply(params, hidden, batch.positions, method='mlm_logits')
      results['MLM logits'] = logits[..., :config.vocab_size][is_real]
    if 'nsp' in model.groups:
      results['NSP logits'] = heads.apply(params, hidden, first, method='nsp_logits')
    if 'rtd' in model.groups:
      results['RTD logits'] = ReplacedTokenHead(config).apply(
          {'params': params['params']['rtd']}, hidden)[is_real]
    return results

  with whole_float32():
    return jax.tree.map(np.asarray, jax.jit(run)(model.params))


def _transformers_outputs(directory: epath.Path,
                          model: Pretrained) -> dict[str, np.ndarray]:
  """Computes the same outputs with the PyTorch class of transformers.

  The pooled output is left out.
  """
  import torch
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  heads = tuple(group for group in model.groups if group in _LOGITS)
  name = families.ALL[model.config.architecture].class_of(heads, '')
  module, loading = getattr(transformers, name).from_pretrained(
      str(directory), output_loading_info=True)
  # transformers initializes missing tensors at random, and only warns. A bare encoder may
  # lack its pooler.
  require(not loading['missing_keys'] or name.endswith('Model'),
          f'{directory}: transformers misses {sorted(loading["missing_keys"])}')
  batch = sample(model)
  ids, types, mask = (torch.tensor(np.array(x), dtype=torch.long)
                      for x in (batch.ids, batch.type_ids, batch.text_ids))
  with torch.no_grad():
    outputs = module.eval()(input_ids=ids, token_type_ids=types, attention_mask=mask,
                            output_hidden_states=True)
  is_real = batch.text_ids > 0
  results = {'hidden states': outputs.hidden_states[-1].numpy()[is_real]}
  for head in heads:
    logits = next(outputs[name] for name in _LOGITS[head] if name in outputs).numpy()
    results[f'{head.upper()} logits'] = (
        logits[:, None] if head == 'nsp' else logits[is_real])
  return results


def last_bits_changed(model: Pretrained) -> Pretrained:
  """Moves each parameter to a neighboring float32, up or down at random.

  The change of the outputs shows how much rounding matters in this model.
  """
  rng = np.random.default_rng(0)

  def moved(x):
    far = np.array([-np.inf, np.inf], np.float32)
    return np.nextafter(np.asarray(x, np.float32), far[rng.integers(0, 2, x.shape, np.int8)])

  return dataclasses.replace(model, params=jax.tree.map(moved, model.params))


def largest_rounding(change: float, tolerance: float) -> float:
  """The largest difference of outputs that rounding explains.

  Args:
    change: the change of the outputs from `last_bits_changed`.
    tolerance: the result for a small change.
  """
  return min(max(tolerance, _FACTOR * change), _MOST)


def compare_outputs(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], source: str,
                    moved: Callable[[], dict[str, np.ndarray]]
                    ) -> Iterator[tuple[str, str]]:
  """Compares `theirs` with our arrays of the same names.

  Args:
    ours: our outputs by name: float32 arrays.
    theirs: the same outputs, or some of them, from another program.
    source: the name of this program.
    moved: computes our outputs with `last_bits_changed`; only called for differences
      above `TOLERANCE`.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: two arrays differ.
  """
  moved = functools.cache(moved)
  for name, expected in theirs.items():
    worst = float(np.max(np.abs(ours[name] - expected)))
    most = TOLERANCE
    if worst > most:
      change = float(np.max(np.abs(ours[name] - moved()[name])))
      most = largest_rounding(change, TOLERANCE)
    require(worst <= most, f'{source}: the {name} differ by {worst:.2g} (at most {most:.2g} '
            'is rounding)')
    yield name, f'differ from {source} by at most {worst:.2g}'


def missing(*packages: str) -> str:
  """Why outputs cannot be compared with packages; '' if they can."""
  absent = [name for name in packages
            if not importlib.util.find_spec(name.replace('-', '_'))]
  if absent:
    return f'{" and ".join(absent)} {"is" if len(absent) == 1 else "are"} not installed'
  versions = {name: importlib.metadata.version(name) for name in packages}
  return next((f'{name} {version} is older than {_OLDEST[name]}'
               for name, version in versions.items()
               if int(version.split('.')[0]) < _OLDEST[name]), '')


def _tensors(model: Pretrained) -> dict[str, np.ndarray]:
  """Returns all tensors by name, even of a head for which transformers has no names."""
  params = jax.device_get(model.params)
  own = {name: params['params'][name] for name in model.groups
         if name not in layout.GROUPS}
  return (layout.to_tensors(params, model.config)
          | traverse_util.flatten_dict(own, sep='.'))


def _compare_tensors(a: Pretrained, b: Pretrained) -> int:
  """Returns the number of tensors; raises UserError for the first one that differs."""
  ours, theirs = (_tensors(m) for m in (a, b))
  require(ours.keys() == theirs.keys(),
          f'only one of the models has {", ".join(sorted(ours.keys() ^ theirs.keys()))}')
  for name, x in ours.items():
    require(x.shape == theirs[name].shape and x.tobytes() == theirs[name].tobytes(),
            f'the tensor {name} differs')
  return len(ours)


def _of_task(model: Pretrained) -> str:
  kind = ' '.join(part for part in (model.task or 'pretraining', model.problem) if part)
  return f'{kind} with the labels {", ".join(model.labels)}' if model.labels else kind


def _fact(model: Pretrained, name: str, default: Any) -> Any:
  """A fact of a run; `default` if the model does not have it."""
  value = default if model.facts.get(name) is None else model.facts[name]
  # Without a doc_stride, question answering limits its windows to WINDOW tokens.
  cuts = (name == 'max_len' and model.task == 'question_answering'
          and 'doc_stride' not in model.facts)
  return min(value, question_answering.WINDOW) if cuts else value


def compare_facts(a: Pretrained, b: Pretrained) -> Iterator[tuple[str, str]]:
  """Yields a note for each fact of a run that changes the answers of one model only."""
  # With the values of a model without these facts.
  facts = {'max_len': a.config.max_positions, 'long': 'head'}
  if a.task == 'question_answering':
    facts |= {'doc_stride': 128, 'n_best': 20, 'max_answer_len': 30,
              'null_threshold': None}
  for name, default in facts.items():
    ours, theirs = (_fact(m, name, default) for m in (a, b))
    if a.task and ours != theirs:
      yield 'note', (f'{name} is {ours} in one model and {theirs} in the other: answers may '
                     'differ')


def compare(a: Pretrained, b: Pretrained,
            directory: epath.Path) -> Iterator[tuple[str, str]]:
  """Compares model `a` with `b`, which was read from `directory`.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: the models differ.
  """
  # All fields must be equal, except four that only change how outputs are computed.
  for field in dataclasses.fields(a.config):
    ours, theirs = (getattr(m.config, field.name) for m in (a, b))
    require(ours == theirs
            or field.name in ('dtype', 'attention', 'remat', 'scan_unroll'),
            f'{field.name} is {ours} in one model and {theirs} in the other')
  require((a.task, a.labels, a.problem) == (b.task, b.labels, b.problem),
          f'one model is for {_of_task(a)}, the other for {_of_task(b)}')
  yield from compare_facts(a, b)
  width = a.config.hidden_size
  require(not a.text_layout or not b.text_layout
          or a.text_layout.files(width) == b.text_layout.files(width),
          'the models differ in pooling, in the modules after it, or in prompts')
  if bool(a.text_layout) != bool(b.text_layout):
    yield 'left out', ('pooling, modules and prompts: only one of the models has them; '
                       '--to=sentence_transformers writes them')
  yield 'tensors', f'{_compare_tensors(a, b)}, all equal to the bit'
  # Equal tensors are not enough: transformers may read the config differently.
  outputs, moved = _outputs(a), lambda: _outputs(last_bits_changed(a))
  yield from compare_outputs(outputs, _outputs(b), 'the source', moved)
  yield from tokenizer_checks.compare(a.tokenizer, b.tokenizer, directory)
  if (directory / 'config.json').exists():
    if obstacle := missing('torch', 'transformers'):
      yield 'note', f'not compared with PyTorch: {obstacle}'
    else:
      yield from compare_outputs(outputs, _transformers_outputs(directory, a), 'PyTorch',
                                 moved)
