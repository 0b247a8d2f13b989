"""Models in the Hugging Face layout: config.json, safetensors, vocabulary; both ways.

What is read and written is what transformers' PyTorch classes have (`modeling_bert.py` and those of
the other families), under every prefix and every old name that the hub has used.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import json

from etils import epath
import numpy as np
import safetensors
from safetensors.numpy import save_file

from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.errors import UserError
from bert_jax.interop import families
from bert_jax.interop import layout
from bert_jax.interop.card import model_card
from bert_jax.interop.families import Family
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.pretrained import check_vocabulary
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime import storage
from bert_jax.tasks import task_list

_ACTIVATIONS = {'gelu': 'gelu', 'gelu_python': 'gelu', 'gelu_new': 'gelu_tanh',
                'gelu_pytorch_tanh': 'gelu_tanh', 'relu': 'relu'}
_NEEDED = ('vocab_size', 'hidden_size', 'num_layers', 'num_heads', 'intermediate_size')
_PROBLEMS = {'single_label': 'single_label_classification',
             'multi_label': 'multi_label_classification', 'regression': 'regression'}
# Copies of other tensors, and a buffer that older versions saved.
_TIED = {'cls.predictions.decoder.weight': 'embeddings.word_embeddings.weight',
         'cls.predictions.decoder.bias': 'cls.predictions.bias'}
_BUFFERS = ('embeddings.position_ids', 'embeddings.token_type_ids')
_POSITIONS = 'embeddings.position_embeddings.weight'


def config_from(theirs: Mapping, path: epath.Path, family: Family = families.BERT) -> BertConfig:
  """The config of a config.json, or of google-research/bert's bert_config.json.

  Raises:
    UserError: a field is missing, or asks for something that the family does not have.
  """
  theirs = family.read(theirs)
  missing = [name for name, ours in family.fields.items() if ours in _NEEDED and name not in theirs]
  if missing:
    raise UserError(f'{path} has no {", ".join(missing)}: it is no config of a {family.title}')
  for name, published in family.published.items():
    if theirs.get(name, published) != published:
      raise UserError(f'{path}: {name}={theirs[name]!r} is not what {family.title} has '
                      f'({published!r})')
  fields = {ours: theirs[name] for name, ours in family.fields.items() if name in theirs}
  activation = fields.pop('activation', 'gelu')
  if not isinstance(activation, str) or activation not in _ACTIVATIONS:
    name = next(name for name, ours in family.fields.items() if ours == 'activation')
    raise UserError(f'{path}: {name}={activation!r} is unknown: known are '
                    f'{", ".join(_ACTIVATIONS)}')
  known = architectures.ALL[family.name].config.__dataclass_fields__
  for name, value in fields.items():
    kind = type(known[name].default)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
      raise UserError(f'{path}: the value {value!r} for {name} is no {kind.__name__}')
  return architectures.make_config(
      {**fields, **family.constants, 'activation': _ACTIVATIONS[activation],
       'architecture': family.name})


def _read_config(directory: epath.Path) -> tuple[dict, Family, str]:
  """(config.json, family, architecture)."""
  path = directory / 'config.json'
  theirs = storage.read_json(path)
  model_type = theirs.get('model_type', 'bert')
  family = families.ALL.get(model_type) if isinstance(model_type, str) else None
  if not family:
    raise UserError(f'{path}: model_type={model_type!r} is unknown: known are '
                    f'{", ".join(families.ALL)}')
  classes = theirs.get('architectures') or [f'{family.title}Model']
  architecture = str(classes[0] if isinstance(classes, list) else classes)
  if architecture not in family.architectures:
    raise UserError(f'{path}: the architecture {architecture} of {model_type} is unknown: known '
                    f'are {", ".join(family.architectures)}')
  return theirs, family, architecture


def _weight_files(directory: epath.Path) -> list[epath.Path]:
  index = directory / 'model.safetensors.index.json'
  if (directory / 'model.safetensors').exists():
    return [directory / 'model.safetensors']
  if index.exists():
    weight_map = storage.read_json(index).get('weight_map')
    if not isinstance(weight_map, dict):
      raise UserError(f'{index} has no weight_map')
    names = sorted(set(map(str, weight_map.values())))
    elsewhere = [name for name in names if epath.Path(name).name != name]
    if elsewhere:
      raise UserError(f'{index} names {elsewhere[0]!r}, which is no file of its folder')
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
      raise UserError(f'{directory} lacks {", ".join(missing)}, which {index.name} names')
    return [directory / name for name in names]
  if list(directory.glob('*.bin')):
    raise UserError(
        f'{directory} holds its weights as a pickle (.bin), which runs code when it is read; in an '
        'environment with torch and transformers convert it: python -c "from transformers import '
        f"AutoModelForPreTraining as A; A.from_pretrained('{directory}').save_pretrained('NEW')\"")
  raise UserError(f'{directory} holds no weights: neither model.safetensors nor '
                  'model.safetensors.index.json')


@contextlib.contextmanager
def _tensors(files: list[epath.Path], canonical: Callable[[str], str]) -> Iterator[dict]:
  """Readers of the tensors, by canonical name; nothing is read before it is asked for."""
  with contextlib.ExitStack() as stack:
    found = {}
    for path in files:
      try:
        file = stack.enter_context(safetensors.safe_open(str(path), 'numpy'))
      except (safetensors.SafetensorError, OSError) as e:
        raise UserError(f'{path} is corrupt or no safetensors file: {e}') from e
      for name in file.keys():  # noqa: SIM118, it is no dict
        if canonical(name) in found:
          raise UserError(f'{path}: {name} is there twice, under two names')
        found[canonical(name)] = (file, name)
    yield found


def _shorten(names: list[str]) -> str:
  return ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')


def groups_of(names: Collection[str], needed: Collection[str] = ()) -> tuple[str, ...]:
  """The groups that some of these tensors belong to, and those that are needed."""
  return tuple(group for group, start in layout.GROUPS.items()
               if group in needed or any(name.startswith(start) for name in names))


def check_shapes(shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]],
                 directory: epath.Path):
  """Raises UserError, naming them, if tensors are missing, surplus or of another shape."""
  missing = sorted(expected.keys() - shapes.keys())
  surplus = sorted(shapes.keys() - expected.keys())
  if missing:
    raise UserError(f'{directory} lacks tensors: {_shorten(missing)}')
  if surplus:
    raise UserError(f'{directory} has tensors that its architecture does not: {_shorten(surplus)}')
  for name, shape in expected.items():
    if shapes[name] != shape:
      raise UserError(f'{directory}: {name} has shape {list(shapes[name])}, its config asks for '
                      f'{list(shape)}')


def load(directory: epath.Path) -> Pretrained:
  """Reads a model in the Hugging Face layout.

  Raises:
    UserError: something is missing, surplus, of another shape, corrupt, or no BERT.
  """
  theirs, family, architecture = _read_config(directory)
  config = config_from(theirs, directory / 'config.json', family)
  unused = family.unused_positions(theirs)
  if unused:
    config = dataclasses.replace(config, max_positions=config.max_positions - unused)
  with _tensors(_weight_files(directory),
                lambda name: family.canonical(name, architecture)) as found:
    def get(name):
      file, theirs = found[name]
      tensor = file.get_tensor(theirs)
      return tensor[unused:] if name == _POSITIONS else tensor

    shapes = {name: tuple(file.get_slice(theirs).get_shape())
              for name, (file, theirs) in found.items()}
    if unused and shapes.get(_POSITIONS):
      rows, *width = shapes[_POSITIONS]
      shapes[_POSITIONS] = (rows - unused, *width)
    if 'cls.predictions.bias' not in found and 'cls.predictions.decoder.bias' in found:
      found['cls.predictions.bias'] = found['cls.predictions.decoder.bias']
      shapes['cls.predictions.bias'] = shapes['cls.predictions.decoder.bias']
    for name in _BUFFERS:
      shapes.pop(name, None)
    for copy, of in _TIED.items():
      if shapes.pop(copy, None) and not (of in found and np.array_equal(get(copy), get(of))):
        raise UserError(f'{directory}: {copy} differs from {of}: BERT has one tensor for both')
    needed, task = family.architectures[architecture]
    groups = groups_of(shapes.keys(), needed)
    outputs = shapes.get('classifier.bias', (0,))[0] if 'classifier' in groups else 0
    check_shapes(shapes, layout.expected_shapes(config, groups, outputs), directory)
    params = layout.from_tensors(get, config, groups)
  tokenizer = tokenizer_lib.load(directory)
  check_vocabulary(config, tokenizer, directory)
  try:
    names = {int(i): str(label) for i, label in (theirs.get('id2label') or {}).items()}
  except (AttributeError, ValueError) as e:
    raise UserError(f'{directory}/config.json: id2label is no table of numbers and names') from e
  labels = tuple(names.get(i, f'LABEL_{i}') for i in range(outputs))
  return Pretrained(
      config, params, tokenizer, task=task,
      labels=(task and task_list.ALL[task].labels) or labels,
      problem=_problem(theirs, outputs) if task == 'sequence_classification' else '',
      facts={'source': str(directory)})


def _problem(theirs: dict, outputs: int) -> str:
  """The kind of sequence classification; where it is not said, as transformers guesses it."""
  known = {name: ours for ours, name in _PROBLEMS.items()}
  return known.get(theirs.get('problem_type'), 'regression' if outputs == 1 else 'single_label')


def architecture_of(model: Pretrained, family: Family) -> str:
  """The smallest of transformers' classes that holds all that the model has."""
  for name, (needed, task) in family.architectures.items():
    if task == model.task and set(model.groups) - {'pooler'} == set(needed) - {'pooler'}:
      return name
  raise UserError(f'no {family.title} class of transformers has the heads '
                  f'{", ".join(model.groups)} together')


def save(model: Pretrained, directory: epath.Path):
  """Writes a model in the Hugging Face layout into a folder, which is made if it is not there."""
  directory.mkdir(parents=True, exist_ok=True)
  family, c = families.ALL[model.config.architecture], model.config
  architecture = architecture_of(model, family)
  activation = next(name for name, ours in _ACTIVATIONS.items()
                    if ours == c.activation)
  theirs = {
      'architectures': [architecture], 'model_type': family.name,
      **{name: activation if ours == 'activation' else getattr(c, ours)
         for name, ours in family.fields.items()},
      **family.published, **family.settings(model.tokenizer), 'dtype': 'float32'}
  unused = family.unused_positions(theirs)
  theirs['max_position_embeddings'] += unused
  if model.labels:
    theirs |= {'id2label': {str(i): label for i, label in enumerate(model.labels)},
               'label2id': {label: i for i, label in enumerate(model.labels)}}
  if model.problem:
    theirs['problem_type'] = _PROBLEMS[model.problem]
  (directory / 'config.json').write_text(json.dumps(theirs, indent=2) + '\n')
  tensors = layout.to_tensors(model.params, c)
  if unused:
    tensors[_POSITIONS] = np.pad(tensors[_POSITIONS], ((unused, 0), (0, 0)))
  tensors = {family.original(name, architecture): np.ascontiguousarray(x)
             for name, x in tensors.items()}
  save_file(tensors, str(directory / 'model.safetensors'), metadata={'format': 'pt'})
  (directory / 'README.md').write_text(model_card(model, architecture))
  model.tokenizer.save(directory)
  path = directory / 'tokenizer_config.json'
  if path.exists():
    settings = json.loads(path.read_text()) | {'model_max_length': c.max_positions}
    path.write_text(json.dumps(settings, indent=2) + '\n')
