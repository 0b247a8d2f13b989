"""Writes a model as ONNX, in the layout that optimum and sentence-transformers read.

The folder has `onnx/model.onnx`, config.json, the tokenizer, and the modules of an
embedder. Any runtime of ONNX reads the file; `functions` says what it computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import importlib.util
from typing import Any

from etils import epath
import jax
import numpy as np

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.interop import (
  huggingface,
  sentence_transformers,
  tokenizer_checks,
  verify,
)
from bert_jax.interop.onnx_export import functions
from bert_jax.interop.pretrained import Pretrained
from bert_jax.tasks.late_interaction import LateKind

FILE, QUANTIZED = 'onnx/model.onnx', 'onnx/model_quantized.onnx'
OPSET = 18  # the default; older operators take the axes of a reduction as attributes
# The largest difference between the outputs of onnxruntime and of JAX, for most models.
TOLERANCE = 1e-4
# In bytes. The weights of a larger model get their own file: protobuf's limit is 2 GiB.
_LARGEST_FILE = 1_500_000_000
_LONGEST_COMPARED = 1024  # tokens: the attention weights of longer rows need gigabytes

# Runs a function of a model: takes its inputs by name, int64; returns its outputs.
_Run = Callable[[Mapping[str, np.ndarray]], Sequence[Any]]

_README = """# {title} as ONNX

```python
import numpy as np
import onnxruntime
import tokenizers

tokenizer = tokenizers.Tokenizer.from_file('tokenizer.json')
session = onnxruntime.InferenceSession('onnx/model.onnx')
encoding = tokenizer.encode('A text.')
arrays = {{'input_ids': encoding.ids, 'token_type_ids': encoding.type_ids,
          'attention_mask': encoding.attention_mask}}
outputs = session.run(None, {{
    x.name: np.array({array}) for x in session.get_inputs()}})
```

Inputs: {inputs}, int64. Outputs: {outputs}, float32. Batch and length are dynamic, up to
{longest} tokens.
"""


def check_installed():
  """Raises UserError if a package of the extra `onnx` is missing."""
  for package in ('onnx', 'onnxruntime'):
    require(importlib.util.find_spec(package) is not None,
            f'--to=onnx needs {package}, which is not installed: '
            'pip install onnx onnxruntime')


def exported(model: Pretrained) -> Pretrained:
  """Returns the part of the model that the folder holds: an embedder loses unused heads.

  Raises:
    UserError: the model is a late-interaction model.
  """
  # The graph has one mask for padding. It cannot hide the [MASK] tokens of an expanded
  # query from the other tokens, as training does.
  require(model.task != LateKind.name,
          f'--to=onnx is not for {LateKind.name}: use --to=sentence_transformers')
  return sentence_transformers.exported(model) if model.text_layout else model


def save(model: Pretrained, directory: epath.Path, opset: int | None = None):
  """Writes a model that `exported` returned, and creates the folder.

  Raises:
    UserError: a package is missing, the opset is too old or too new, or a part of the
      model has no node in ONNX.
  """
  check_installed()
  import onnx  # an extra, and slow to import

  from bert_jax.interop.onnx_export import trace

  opset, newest = OPSET if opset is None else opset, onnx.defs.onnx_opset_version()
  require(OPSET <= opset <= newest,
          f'--opset={opset} must lie in [{OPSET}, {newest}]: older operators lack what '
          'the graph needs')
  function = functions.function(model)
  try:
    graph = trace.convert(function.run, function.inputs, function.outputs,
                               longest=model.config.max_positions, opset=opset)
  except NotImplementedError as e:
    raise UserError(
        f'this {model.config.architecture} cannot be written as ONNX: {e}') from e
  huggingface.save_settings(model, directory)
  if model.text_layout:
    model.text_layout.write(directory, model.config.hidden_size)
  (directory / 'README.md').write_text(_README.format(
      title=f'BERT, {model.config.num_layers} layers of {model.config.hidden_size},',
      # A batch of one text; with choices, of one list of one text.
      array='[[arrays[x.name]]]' if 'b, c, l' in function.inputs.values() else '[arrays[x.name]]',
      inputs=', '.join(function.inputs), outputs=', '.join(function.outputs),
      longest=model.config.max_positions))
  path = directory / FILE
  path.parent.mkdir(parents=True, exist_ok=True)
  # Newer protobuf refuses to count the bytes of a graph above 2 GiB.
  large = sum(len(x.raw_data) for x in graph.graph.initializer) > _LARGEST_FILE
  onnx.save(graph, str(path), save_as_external_data=large,
            location=path.name + '_data')


def session(path: epath.Path) -> Any:
  """Opens a file in onnxruntime, on the CPU; raises UserError if that fails."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # errors
  try:
    return onnxruntime.InferenceSession(str(path), options,
                                        providers=['CPUExecutionProvider'])
  except Exception as e:  # the package has no base class for its errors
    raise UserError(f'onnxruntime {onnxruntime.__version__} cannot run {path}: {e}') from e


def _samples(model: Pretrained, axes: str) -> Iterator[Mapping[str, np.ndarray]]:
  """Yields inputs: random and extreme ids, one token, the longest row, much padding."""
  rng, most = np.random.default_rng(0), model.config.vocab_size
  longest = min(model.config.max_positions, _LONGEST_COMPARED)
  for rows, length in ((1, 1), (3, min(24, longest)), (2, longest)):
    ids = rng.integers(0, most, (rows, length))
    ids[0, ::2], ids[-1, 1::2] = most - 1, 0
    used = np.maximum(length - np.arange(rows) * length * 3 // 4, 1)
    mask = (np.arange(length) < used[:, None]).astype(np.int64)
    types = ((np.arange(length) > length // 3) * mask).astype(np.int64)
    types = np.minimum(types, max(model.config.type_vocab_size - 1, 0))
    arrays = {'input_ids': ids, 'token_type_ids': types, 'attention_mask': mask}
    yield {name: np.stack([x, x[::-1]], axis=1) if 'c' in axes else x
           for name, x in arrays.items()}


def _in_jax(function: functions.Function) -> _Run:
  """Returns a program that runs the function in JAX."""
  run = jax.jit(function.run)

  def compute(inputs):
    with verify.whole_float32():
      return run(*(x.astype(np.int32) for x in inputs.values()))

  return compute


def _differences(model: Pretrained, other: _Run) -> dict[str, float]:
  """Compares the model with another program; returns the largest difference by output."""
  function = functions.function(model)
  run, worst = _in_jax(function), dict.fromkeys(function.outputs, 0.0)
  for sample in _samples(model, function.inputs['input_ids']):
    inputs = {name: sample[name] for name in function.inputs}
    is_token = inputs['attention_mask'] > 0
    for name, ours, theirs in zip(worst, run(inputs), other(inputs), strict=True):
      difference = np.abs(np.asarray(ours) - np.asarray(theirs))
      if functions.has_tokens(model, name):
        difference = difference[is_token]
      # `max` would lose a NaN.
      worst[name] = float(np.maximum(worst[name], np.max(difference)))
  return worst


def compare(model: Pretrained, directory: epath.Path) -> Iterator[tuple[str, str]]:
  """Compares the outputs of the file in onnxruntime with the outputs of the model.

  Yields:
    (name, result) lines for the user.

  Raises:
    UserError: the outputs differ.
  """
  if most := getattr(model.text_layout, 'most', None):
    yield 'left out', f'max_active_dims={most}: sentence_embedding has all weights'
  if not getattr(model.text_layout, 'include_prompt', True):
    yield 'left out', 'include_prompt=False: sentence_embedding counts the prompt too'
  # The file has no place for the facts of a run; the tokenizer has its maximum length.
  kept = {'max_len': model.facts['max_len']} if 'max_len' in model.facts else {}
  yield from verify.compare_facts(model, dataclasses.replace(model, facts=kept))
  opened = session(directory / FILE)
  worst = _differences(model, lambda inputs: opened.run(None, inputs))
  change = {}
  if np.max([*worst.values()]) > TOLERANCE:
    # Much rounding, or a mistake: the change from other last bits tells them apart.
    change = _differences(model, _in_jax(functions.function(verify.last_bits_changed(model))))
  for name, difference in worst.items():
    most = verify.largest_rounding(change.get(name, 0), TOLERANCE)
    require(difference <= most,
            f'{directory / FILE}: the {name} differ by {difference:.2g} (at most '
            f'{most:.2g} is rounding)')
    yield 'outputs', f'{name}: onnxruntime differs by at most {difference:.2g}'
  yield from tokenizer_checks.compare(
      model.tokenizer, tokenizer_reader.load(directory), directory)
