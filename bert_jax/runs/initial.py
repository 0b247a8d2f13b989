"""Where a run starts: the parameters of another model, or word vectors."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.tokenizers import extension
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import require
from bert_jax.fields.run_fields import phases_of
from bert_jax.interop import layout
from bert_jax.interop import load as load_lib
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import task_list
from bert_jax.training import lora
from bert_jax.training import state as state_lib


def load_on_host(folder: str) -> Pretrained:
  """Loads a model into host memory: on a device it would take memory from the run."""
  model = load_lib.load(folder)
  return dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params))


def load(config: ConfigDict) -> Pretrained:
  """Loads the model `init_from`, with its vocabulary extended by `add_tokens`.

  A new entry starts as the mean of the pieces that spelled the word before, in the token
  table and in the bias of the MLM head.

  Raises:
    UserError: `init_from` has no intact model, or a word cannot be added.
  """
  model = load_on_host(config.init_from)
  if not config.add_tokens:
    return model
  tokenizer, notes = extension.add_words(model.tokenizer, config.add_tokens)
  print_summary([('note', note) for note in notes])
  old, new = model.config.vocab_size, tokenizer.vocab_size
  extended_config = dataclasses.replace(model.config, vocab_size=new)
  pieces = model.tokenizer.encode_batch(tokenizer.tokens(range(old, new)))
  params = flatten_dict(model.params, sep='/')
  for name in {'params/bert/embeddings/token', 'params/mlm_bias'} & params.keys():
    table = params[name]
    # The rows after `old` only pad the table, so new entries may take them.
    extended = np.zeros((extended_config.padded_vocab_size, *table.shape[1:]),
                        table.dtype)
    extended[:old] = table[:old]
    for i, ids in enumerate(pieces, old):
      extended[i] = table[ids].mean(0)
    params[name] = extended
  return dataclasses.replace(model, config=extended_config, tokenizer=tokenizer,
                             params=unflatten_dict(params, sep='/'))


def load_teacher(config: ConfigDict) -> Pretrained | None:
  """Loads the model `teacher`, if any, for use without dropout.

  Its config gets the dtype and the attention of the student. Raises UserError if this
  model cannot teach the student.
  """
  if not config.teacher:
    return None
  model = load_on_host(config.teacher)
  require('mlm' in model.groups,
          f'teacher={config.teacher} has no masked LM head to learn from')
  require(model.config.hidden_size == config.model.hidden_size,
          f'teacher={config.teacher} is {model.config.hidden_size} wide, the student '
          f'{config.model.hidden_size}: their hidden states cannot be compared')
  longest = max(phase.max_len for phase in phases_of(config))
  require(longest <= model.config.max_positions,
          f'teacher={config.teacher} reads at most {model.config.max_positions} tokens, '
          f'but rows have up to {longest}: make max_len smaller')
  # Without dropout the teacher may also use attention kernels that do not support it.
  bert = dataclasses.replace(
      model.config, dtype=config.model.dtype, attention=config.model.attention,
      dropout=0.0, attention_dropout=0.0)
  return dataclasses.replace(model, config=bert)


def student(model: Pretrained, config: BertConfig) -> Pretrained | None:
  """Makes a student of evenly spaced layers, embeddings and the MLM head of a teacher.

  A student without segments adds the embedding of the first segment to its positions.
  Returns None if the student has more layers, another size, or an architecture other than
  BERT, RoBERTa and DistilBERT: such a student starts from random parameters.
  """
  theirs, layers = model.config, config.num_layers
  same = ('hidden_size', 'num_heads', 'intermediate_size', 'max_positions')
  if (not {theirs.architecture, config.architecture} <= {'bert', 'roberta', 'distilbert'}
      or layers > theirs.num_layers
      or config.type_vocab_size not in (0, theirs.type_vocab_size)
      or any(getattr(theirs, name) != getattr(config, name) for name in same)):
    return None
  # Arrays of layers are stacked along the first axis.
  chosen = np.arange(layers) * theirs.num_layers // layers
  params = {name: x[chosen] if '/layers/' in name else x
            for name, x in flatten_dict(model.params, sep='/').items()
            if name.startswith(('params/bert/', 'params/mlm_'))
            and '/pooler/' not in name}
  # Without segment embeddings, each position gets the embedding of the first segment.
  if not config.type_vocab_size and theirs.type_vocab_size:
    segments = params.pop('params/bert/embeddings/segment')
    positions = params['params/bert/embeddings/position']
    params['params/bert/embeddings/position'] = positions + segments[0]
  return dataclasses.replace(model, config=config, task='', labels=(),
                             params=unflatten_dict(params, sep='/'))


def boxed(model: Pretrained, groups: Sequence[str] = ()) -> Any:
  """Boxes the parameters of the encoder and of `groups` with their logical axes."""
  boxes = flatten_dict(layout.abstract_params(model.config, groups), sep='/')
  params = flatten_dict(model.params, sep='/')
  return unflatten_dict(
      {name: box.replace_boxed(params[name]) for name, box in boxes.items()}, sep='/')


def teacher_params(model: Pretrained | None) -> Any:
  """The parameters of a teacher that distillation uses; {} without a teacher."""
  if not model:
    return {}
  return boxed(model, [
      group for group in model.groups
      if group == 'mlm' or (group == 'pooler' and model.config.pooler_is_shared)])


def with_head_of(model: Pretrained, task: str, labels: Sequence[str]) -> Pretrained:
  """Drops the classifier of a model unless it is for this task and these labels.

  With a single output the name of the label does not matter.
  """
  if model.task == task and (model.labels == tuple(labels)
                             or len(model.labels) == len(labels) == 1):
    return model
  heads = {group for kind in task_list.ALL.values() for group in kind.parameter_groups}
  tree = {name: x for name, x in model.params['params'].items() if name not in heads}
  return dataclasses.replace(model, params={'params': tree}, task='', labels=())


def _parts(names: set[str]) -> str:
  """Names the parts of a model with these arrays: 'bert/pooler, mlm_dense'."""
  parts = [name.split('/')[1:] for name in names]
  return ', '.join(sorted({'/'.join(part[:2] if part[0] == 'bert' else part[:1])
                           for part in parts}))


def from_model(fresh: Any, model: Pretrained, name: str, reinit_layers: int = 0) -> Any:
  """Replaces fresh parameters with the parameters that `model` has.

  Args:
    fresh: random parameters on the devices of the run.
    model: the model to start from.
    name: the name of the model in messages.
    reinit_layers: number of top layers that stay fresh, together with the pooler (Zhang
      et al. 2021, https://arxiv.org/abs/2006.05987).
  """
  layers = model.config.num_layers
  ours = flatten_dict(fresh, sep='/')
  theirs = {path: x for path, x in flatten_dict(model.params, sep='/').items()
            if not reinit_layers or '/pooler/' not in path}
  factors = set(filter(lora.is_factor, ours))
  unused, new = (_parts(theirs.keys() - ours.keys()),
                 _parts(ours.keys() - theirs.keys() - factors))
  lines = [('initialized', f'{len(ours.keys() & theirs.keys())} arrays from {name}'
                           + ', in addition to its frozen encoder' * bool(factors))]
  # One factor of each LoRA pair starts at zero.
  if factors:
    lines.append(('new', f'{len(factors)} factors on the frozen encoder, which change '
                         'nothing yet'))
  if reinit_layers:
    top = f'the top {reinit_layers} layers'
    lines.append(('new', f'{top}, {new}' if new else top))
  elif new:
    lines.append(('new', f'{new}: not in {name}'))
  if unused:
    lines.append(('left out', f'{unused}: not in this run'))
  print_summary(lines)

  def merge(copy, fresh):
    return jnp.concatenate(
        [copy[:layers - reinit_layers], fresh[layers - reinit_layers:]])

  # All processes must run the same programs in the same order.
  for path, x in ours.items():
    if path not in theirs:
      continue
    ours[path] = state_lib.shard_like(np.asarray(theirs[path]), x)
    if reinit_layers and '/layers/' in path:
      ours[path] = jax.jit(merge, out_shardings=x.sharding)(ours[path], x)
  return unflatten_dict(ours, sep='/')


def from_word_vectors(params: Any, path: str, tokenizer: Tokenizer) -> Any:
  """Puts the vectors of a word2vec text file into the token table.

  One factor scales all vectors to the root mean square of the entries that they replace.
  So the file determines the angles, and the norm stays as the model expects it.

  Raises:
    UserError: the file is malformed, or has no vector for any entry of the vocabulary.
  """
  entries = {token: i
             for i, token in enumerate(tokenizer.tokens(range(tokenizer.vocab_size)))}
  ids, vectors = extension.read_word_vectors(path, entries)
  embeddings = params['params']['bert']['embeddings']
  table = embeddings['token']
  require(vectors.shape[1] == table.shape[1],
          f'embedding_init={path} has vectors of {vectors.shape[1]}, the model '
          f'is {table.shape[1]} wide')
  print_summary([('initialized',
                  f'{len(ids):,} of {len(entries):,} token embeddings from {path}')])

  def put(table):
    new_rms = np.sqrt(np.mean(np.square(vectors)))
    old_rms = jnp.sqrt(jnp.mean(jnp.square(table[ids])))
    return table.at[ids].set(vectors / new_rms * old_rms)

  embeddings['token'] = jax.jit(put, out_shardings=table.sharding)(table)
  return params
