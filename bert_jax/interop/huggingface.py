"""Reads and writes models in the Hugging Face layout: config.json, weights, vocabulary.

The tensors have the names of transformers' PyTorch classes (`modeling_bert.py` and
others). The reader accepts every prefix and every old name on the hub.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
from typing import Any

from etils import epath
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError, require
from bert_jax.interop import cross_layout, families, layout, torch_pickle
from bert_jax.interop.family import Family
from bert_jax.interop.pretrained import Pretrained, fitted
from bert_jax.model import architectures
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.parameters import count_parameters
from bert_jax.runtime import console, storage
from bert_jax.tasks import task_list

_ACTIVATIONS = {'gelu': 'gelu', 'gelu_python': 'gelu', 'gelu_new': 'gelu_tanh',
                'gelu_pytorch_tanh': 'gelu_tanh', 'relu': 'relu', 'silu': 'silu',
                'swish': 'silu'}
_NEEDED = ('vocab_size', 'hidden_size', 'num_layers', 'num_heads', 'intermediate_size')
_PROBLEMS = {'single_label_classification': 'single_label',
             'multi_label_classification': 'multi_label',
             'regression': 'regression'}
# Copies of other tensors, and buffers that older versions of transformers saved.
_TIED = {'cls.predictions.decoder.weight': 'embeddings.word_embeddings.weight',
         'cls.predictions.decoder.bias': 'cls.predictions.bias'}
_BUFFERS = ('embeddings.position_ids', 'embeddings.token_type_ids')
_POSITIONS = 'embeddings.position_embeddings.weight'
_SEGMENTS = 'embeddings.token_type_embeddings.weight'
PLACEHOLDER = 'THIS_FOLDER'


def _key(table: Mapping[str, str], value: str) -> str:
  """Returns the first key with this value."""
  return next(key for key, other in table.items() if other == value)


def config_from(fields: Mapping, path: epath.Path,
                family: Family = families.BERT) -> BertConfig:
  """Converts the fields of config.json, or of Google's bert_config.json, to our config.

  Raises:
    UserError: a field is missing, or has an unsupported value.
  """
  try:
    return _config_from(family.read(fields), path, family)
  except UserError as e:
    raise UserError(str(e) if str(path) in str(e) else f'{path}: {e}') from e


def _config_from(fields: Mapping, path: epath.Path, family: Family) -> BertConfig:
  missing = [name for name, ours in family.fields.items()
             if ours in _NEEDED and name not in fields]
  require(not missing,
          f'{path} has no {", ".join(missing)}: it is not a config of a {family.title}')
  # Other values mean a computation that our model does not have.
  for name, published in family.published.items():
    value = fields.get(name, published)
    require(value == published,
            f'{path}: {name}={value!r} is not what {family.title} has ({published!r})')
  values = {ours: fields[name] for name, ours in family.fields.items() if name in fields}
  activation = values.pop('activation', 'gelu')
  require(isinstance(activation, str) and activation in _ACTIVATIONS,
          f'{path}: {_key(family.fields, "activation")}={activation!r} is unknown: '
          f'expected one of {", ".join(_ACTIVATIONS)}')
  known = architectures.ALL[family.name].config.__dataclass_fields__
  # In Python a bool is an int, but not in a config.
  for name, value in values.items():
    kind = type(known[name].default)
    require(isinstance(value, bool) == (kind is bool)
            and isinstance(value, (int, float) if kind is float else kind),
            f'{path}: the value {value!r} for {name} is not of type {kind.__name__}')
  return architectures.make_config(
      {**values, 'activation': _ACTIVATIONS[activation], 'architecture': family.name})


def _read_config(directory: epath.Path) -> tuple[dict, Family, str]:
  """Returns (fields of config.json, family, architecture, which may be unknown)."""
  path = directory / 'config.json'
  fields = storage.read_json(path)
  model_type = fields.get('model_type', 'bert')
  family = families.ALL.get(model_type) if isinstance(model_type, str) else None
  require(bool(family),
          f'{path}: model_type={model_type!r} is unknown: expected one of '
          f'{", ".join(families.ALL)}')
  classes = fields.get('architectures') or [f'{family.title}Model']
  architecture = str(classes[0] if isinstance(classes, list) else classes)
  return fields, family, architecture


def _weight_files(directory: epath.Path) -> list[epath.Path]:
  for whole in ('model.safetensors', 'pytorch_model.bin'):
    index = directory / f'{whole}.index.json'
    if (directory / whole).exists():
      return [directory / whole]
    if not index.exists():
      continue
    weight_map = storage.read_json(index).get('weight_map')
    require(isinstance(weight_map, dict), f'{index} has no weight_map')
    names = sorted(set(map(str, weight_map.values())))
    # An index may come from the hub: no path in it may lead out of the folder.
    elsewhere = [name for name in names if epath.Path(name).name != name]
    require(not elsewhere,
            f'{index} names {", ".join(elsewhere)}, which is not in its folder')
    missing = [name for name in names if not (directory / name).exists()]
    require(not missing,
            f'{directory} lacks {", ".join(missing)}, which {index.name} names')
    return [directory / name for name in names]
  raise UserError(f'{directory} holds no weights: neither model.safetensors nor '
                  'pytorch_model.bin, in one file or in parts with an index.json')


def _read_weights(directory: epath.Path) -> dict[str, np.ndarray]:
  """Reads all tensors of a folder, by the names in its files."""
  tensors = {}
  for path in _weight_files(directory):
    try:
      content = (torch_pickle.load_file(path) if path.suffix == '.bin' else
                 load_file(str(path)))
    except (safetensors.SafetensorError, OSError) as e:
      raise UserError(f'{path} is corrupt or not a safetensors file: {e}') from e
    except (AttributeError, KeyError, TypeError) as e:  # NumPy lacks the dtype
      raise UserError(f'{path} has numbers of an unknown dtype ({e}): save the model in '
                      'float32, float16 or bfloat16') from e
    # Whole numbers of a quantized model would become weights.
    whole = sorted(name for name, x in content.items()
                   if name.endswith('.weight') and x.dtype.kind in 'iub')
    require(not whole, f'{path}: {"".join(whole[:1])} has whole numbers: the model is '
                       'quantized, save it in float32, float16 or bfloat16')
    twice = sorted(content.keys() & tensors.keys())
    require(not twice, f'{path}: {", ".join(twice[:1])} is also in another file')
    tensors |= content
  return tensors


def _canonical(content: Mapping[str, np.ndarray], directory: epath.Path, family: Family,
               architecture: str) -> dict[str, np.ndarray]:
  """Returns the tensors by canonical name."""
  tensors = {}
  for theirs, x in content.items():
    name = family.canonical(theirs, architecture)
    if name.startswith(family.ignored):
      continue
    require(name not in tensors, f'{directory}: {theirs} exists twice, under two names')
    tensors[name] = x
  return tensors


def _of_encoder(content: Mapping[str, np.ndarray], directory: epath.Path, family: Family,
                architecture: str, config: BertConfig) -> dict[str, np.ndarray]:
  """Returns the encoder's tensors of a class that transformers lacks, by canonical name.

  Like transformers it takes the tensors with the prefix of the encoder, or all tensors if
  none has the prefix. A note names the tensors that the encoder does not have.
  """
  start, encoder = f'{family.prefix or family.name}.', f'{family.title}Model'
  named = {name: x for name, x in content.items() if name.startswith(start)} or content
  tensors = _canonical(named, directory, family, encoder)
  known = {*layout.shapes(config, ('pooler',)), *_BUFFERS}
  own = sorted({*(content.keys() - named.keys()), *(tensors.keys() - known)})
  more = f' and {len(own) - 5} more' if len(own) > 5 else ''
  head = f', without its other tensors {", ".join(own[:5])}{more}' if own else ''
  console.note(f'{directory}/config.json: the architecture {architecture} is unknown: it '
               f'is read as {encoder}{head}')
  return {name: x for name, x in tensors.items() if name in known}


def _one_segment(config: BertConfig, tensors: dict[str, np.ndarray],
                 directory: epath.Path) -> BertConfig:
  """Keeps only segment A if the tokenizer gives no segments; returns the config.

  A tokenizer that gives no segments leaves both texts of a pair in segment A. A model
  with one segment reads them in the same way.
  """
  if (not config.has_segments or config.type_vocab_size == 1
      or tokenizer_reader.gives_segments(directory)):
    return config
  console.note(f'{directory}: its tokenizer gives the model no segments '
               '(token_type_ids), so both texts of a pair are in segment A, and segment '
               'B is left out')
  if np.ndim(tensors.get(_SEGMENTS)):
    tensors[_SEGMENTS] = tensors[_SEGMENTS][:1]
  return dataclasses.replace(config, type_vocab_size=1)


def load(directory: epath.Path) -> Pretrained:
  """Reads a model in the Hugging Face layout.

  Raises:
    UserError: the folder lacks a file or tensor, a file is damaged, or the model is not
      supported.
  """
  fields, family, architecture = _read_config(directory)
  config = config_from(fields, directory / 'config.json', family)
  # RoBERTa's table has rows that no token uses. Ours leaves them out.
  unused = family.unused_positions(fields)
  config = dataclasses.replace(config, max_positions=config.max_positions - unused)
  content = _read_weights(directory)
  if architecture in family.architectures:
    needed, task = family.architectures[architecture]
    tensors = _canonical(content, directory, family, architecture)
  else:
    needed, task = (), ''
    tensors = _of_encoder(content, directory, family, architecture, config)
  # Some versions of transformers save this bias only under the name of its copy.
  if 'cls.predictions.decoder.bias' in tensors:
    tensors.setdefault('cls.predictions.bias', tensors['cls.predictions.decoder.bias'])
  if unused and np.ndim(tensors.get(_POSITIONS)):
    tensors[_POSITIONS] = tensors[_POSITIONS][unused:]
  if task:
    config = _one_segment(config, tensors, directory)
  for name in _BUFFERS:
    tensors.pop(name, None)
  for copy, of in _TIED.items():
    require(copy not in tensors or np.array_equal(tensors.pop(copy), tensors.get(of)),
            f'{directory}: {copy} differs from {of}: BERT has one tensor for both')
  params = layout.from_tensors(tensors, config, needed, directory)
  outputs = layout.num_labels(tensors)
  tokenizer_reader.check_cut(directory)
  tokenizer = fitted(tokenizer_reader.load(directory), config, directory)
  try:
    names = {int(i): str(label) for i, label in (fields.get('id2label') or {}).items()}
  except (AttributeError, ValueError) as e:
    raise UserError(f'{directory}/config.json: id2label is not a table of numbers and '
                    'names') from e
  labels = tuple(names.get(i, f'LABEL_{i}') for i in range(outputs))
  if task:
    labels = task_list.ALL[task].files.labels or labels
  facts = {'source': str(directory)}
  longest = tokenizer_reader.longest_input(directory)
  # The length of fine-tuning changes the answers to long texts.
  if task and longest < config.max_positions:
    facts['max_len'] = int(longest)
  problem = ''
  cross = None
  if task == 'sequence_classification':
    # Without the field problem_type, transformers makes the same guess.
    problem = 'regression' if outputs == 1 else 'single_label'
    problem = _PROBLEMS.get(str(fields.get('problem_type')), problem)
    cross = cross_layout.of_config(fields, directory / 'config.json',
                                   facts.get('max_len', config.max_positions))
  return Pretrained(config, params, tokenizer, task, labels, problem, facts, cross)


def card(model: Pretrained, header: Sequence[str], usage: Sequence[str]) -> str:
  """Returns a model card for the hub: the model, its training, and how to load it.

  Args:
    model: the model.
    header: the lines of the metadata; the tags are last.
    usage: the lines of Python, with PLACEHOLDER for the name of the model.
  """
  c, facts = model.config, model.facts
  counted = layout.GROUPS.keys() & set(model.groups)
  parameters = count_parameters(layout.abstract_params(c, counted, len(model.labels)), c)
  rows = {'Data': facts.get('data'), 'Steps': facts.get('steps'),
          'Parts': model.parts, 'Labels': ', '.join(model.labels),
          'Command': facts.get('command') and f'`{facts["command"]}`'}
  table = console.markdown_table([('', ''), *(row for row in rows.items() if row[1])])
  # A run that diverged has scores such as NaN, and a file may hold anything.
  scores = [(name, f'{value:.4f}') for name, value in (facts.get('scores') or {}).items()
            if isinstance(value, (int, float)) and math.isfinite(value)]
  held_out = (['Held-out scores:', '', console.markdown_table([('', ''), *scores]), '']
              if scores else [])
  return '\n'.join([
      '---', *header, '- bert', '- bert_jax', '---', '',
      f'# BERT, {c.num_layers} layers of {c.hidden_size}', '',
      f'{parameters:,} parameters, {c.vocab_size:,} vocabulary entries '
      f'({model.tokenizer.kind}), inputs of up to {c.max_positions} tokens. Exported '
      f'from `{facts.get("source", "bert_jax")}` by bert_jax; every tensor, the outputs '
      'and the tokenization were compared with the source.', '',
      table, '', *held_out,
      '```python', *usage, '```', ''])


def save_settings(model: Pretrained, directory: epath.Path) -> dict[str, Any]:
  """Writes config.json and the tokenizer, and creates the folder; returns the config."""
  family, c = families.ALL[model.config.architecture], model.config
  directory.mkdir(parents=True, exist_ok=True)
  architecture = family.class_of(model.groups, model.task)
  fields = {'architectures': [architecture], 'model_type': family.name,
            **{name: getattr(c, ours) for name, ours in family.fields.items()},
            **family.published,
            **family.settings(model.tokenizer),
            'dtype': 'float32'}
  fields[_key(family.fields, 'activation')] = _key(_ACTIVATIONS, c.activation)
  fields['max_position_embeddings'] += family.unused_positions(fields)
  if model.labels:
    fields |= {'id2label': {str(i): label for i, label in enumerate(model.labels)},
               'label2id': {label: i for i, label in enumerate(model.labels)}}
  if model.problem:
    fields['problem_type'] = _key(_PROBLEMS, model.problem)
  if isinstance(model.text_layout, cross_layout.CrossLayout):
    fields |= model.text_layout.config_fields
    # config.json has no field for prompts. The files of sentence-transformers have one.
    if model.text_layout.prompts:
      model.text_layout.write(directory, c.hidden_size)
  (directory / 'config.json').write_text(json.dumps(fields, indent=2) + '\n')
  model.tokenizer.save(directory, segments=c.has_segments and c.type_vocab_size > 1)
  path = directory / 'tokenizer_config.json'
  if path.exists():
    # transformers truncates inputs to this length: it must be the length of fine-tuning.
    longest = model.facts.get('max_len') if model.task else None
    settings = json.loads(path.read_text()) | {
        'model_max_length': longest or c.max_positions}
    path.write_text(json.dumps(settings, indent=2) + '\n')
  return fields


def save(model: Pretrained, directory: epath.Path):
  """Writes a model in the Hugging Face layout, and creates the folder.

  Raises:
    UserError: transformers has no class for this model.
  """
  family, c = families.ALL[model.config.architecture], model.config
  lacks = family.lacks(c)
  require(not lacks,
          f"transformers' {family.title} has no {lacks}: convert it to bert_jax")
  fields = save_settings(model, directory)
  architecture, = fields['architectures']
  tensors = layout.to_tensors(model.params, c)
  # Zeros for the rows that `load` removed.
  unused = fields['max_position_embeddings'] - c.max_positions
  if unused:
    tensors[_POSITIONS] = np.pad(tensors[_POSITIONS], ((unused, 0), (0, 0)))
  tensors = {family.original(name, architecture): np.ascontiguousarray(x)
             for name, x in tensors.items()}
  save_file(tensors, str(directory / 'model.safetensors'), metadata={'format': 'pt'})
  usage = (f'from transformers import AutoTokenizer, {architecture}', '',
           f"tokenizer = AutoTokenizer.from_pretrained('{PLACEHOLDER}')",
           f"model = {architecture}.from_pretrained('{PLACEHOLDER}')")
  (directory / 'README.md').write_text(
      card(model, ('library_name: transformers', 'tags:'), usage))
