"""Takes unset config fields and initial parameters from another model."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import dataset
from bert_jax.data.late_inputs import DOCUMENT
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import extension
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import UserError, require
from bert_jax.fields.run_fields import phases_of
from bert_jax.interop import layout
from bert_jax.interop import load as load_lib
from bert_jax.interop.late_layout import DOCUMENT_PROMPTS, LateLayout
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model.bert_config import VOCAB_MULTIPLE, BertConfig
from bert_jax.runtime import sealed
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import late_interaction, task_list
from bert_jax.training import lora
from bert_jax.training import state as state_lib

# Fields of `model` in which a run may differ from `init_from`: the parameters still fit.
_FREE = ('dtype', 'attention', 'remat', 'scan_unroll', 'dropout', 'attention_dropout',
         'initializer_range', 'vocab_size')


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
    # Tables are padded to a multiple, so the rows after `old` are padding, not entries.
    extended = np.zeros((extended_config.padded_vocab_size, *table.shape[1:]),
                        table.dtype)
    extended[:old] = table[:old]
    for i, ids in enumerate(pieces, old):
      extended[i] = table[ids].mean(0)
    params[name] = extended
  return dataclasses.replace(model, config=extended_config, tokenizer=tokenizer,
                             params=unflatten_dict(params, sep='/'))


def load_teacher(config: ConfigDict) -> Pretrained | None:
  """Loads the model `teacher`, if any, to compute like the student but without dropout.

  Raises UserError if it cannot teach this student.
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
  """Copies evenly spaced layers of a teacher, and its other arrays, into a student.

  A student without segments adds the embedding of the first segment to its positions.
  Returns None if the sizes differ in more than the number of layers: such a student
  starts from random parameters.
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


def frozen(model: Pretrained | None) -> Any:
  """The parameters of a teacher that distillation uses; {} without a teacher."""
  if not model:
    return {}
  return boxed(model, [
      group for group in model.groups
      if group == 'mlm' or (group == 'pooler' and model.config.pooler_is_shared)])


def sizes_if_unset(config: ConfigDict, sizes: Mapping[str, Any]) -> dict[str, Any]:
  """The unset fields of the group `model`, with their values in `sizes`."""
  return {f'model.{name}': value for name, value in sizes.items()
          if config.model.get(name) is None}


def _pooling_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                      model: Pretrained | None) -> dict[str, str]:
  """data.pooling, if the config leaves it to the model: the model's own, else the mean.

  A resumed run takes it from its run.json.

  Raises:
    UserError: the model has several poolings at once, or is a SparseEncoder with another
      pooling than the task.
  """
  own = model and model.sentence
  if config.task == 'sparse_embedding' and isinstance(own, SparseLayout):
    require((own.pooling, own.activation) == ('max', 'relu'),
            f'init_from={config.init_from} pools the {own.pooling} of {own.activation}, '
            'but sparse_embedding pools the max of relu: python -m bert_jax.convert '
            '--to=huggingface writes the model without its pooling')
  # The task has no such field (None), or the user has chosen a value.
  if config.data.get('pooling') != '':
    return {}
  if earlier:
    return {'data.pooling': earlier['data']['pooling']}
  own = own if isinstance(own, SentenceLayout) else SentenceLayout()
  require(len(own.pooling) <= 1,
          f'init_from={config.init_from} concatenates {" and ".join(own.pooling)}, but a '
          'run uses one of them: give data.pooling (evaluate: --fields=pooling=mean)')
  return {'data.pooling': own.pooling[0]}


def _print_left_out(config: ConfigDict, model: Pretrained | None):
  """Prints what the answers of a model have and a run from it does not."""
  own = model and model.sentence
  if not own:
    return
  # Modules after the pooling, such as a Dense layer.
  steps = [module.kind for module in getattr(own, 'modules', ()) if module.tensors]
  if isinstance(own, LateLayout):
    length = own.texts.document_length
    steps += [f'the length {length} of documents (max_len={config.max_len})'] * (
        length not in (None, config.max_len))
  else:
    steps += [title for title, exists in (
        ('prompts', any(own.prompts.values())), ('truncate_dim', getattr(own, 'dim', None)),
        ('max_active_dims', getattr(own, 'most', None))) if exists]
  if steps:
    print_summary([('left out', f'{", ".join(steps)} of {config.init_from}')])


def layout_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                    model: Pretrained | None) -> dict[str, Any]:
  """The fields about the layout that the config leaves to the model.

  A resumed run takes them from the config of the `earlier` run. Raises UserError if a run
  has no field for a part of the layout.
  """
  fields = _pooling_if_unset(config, earlier, model) | _late_if_unset(config, earlier, model)
  _print_left_out(config, model)
  return fields


def _late_if_unset(config: ConfigDict, earlier: Mapping[str, Any],
                   model: Pretrained | None) -> dict[str, Any]:
  """The fields of late interaction."""
  if config.task != late_interaction.LateKind.name:
    return {}
  earlier = earlier.get('data', {})
  own = model.sentence if model and isinstance(model.sentence, LateLayout) else None
  if not own:
    return late_interaction.fields_if_unset(config.data, earlier, None, {}, 0,
                                            config.max_len, config.model.architecture)
  texts = own.texts
  require((own.normalizes, texts.only, texts.skipped_in) == (True, (), (DOCUMENT,)),
          f'init_from={config.init_from}: a run has no field for its keep_only_token_ids or '
          'skiplist_tasks, or for vectors without a Normalize')
  document = own.first_prompt(DOCUMENT_PROMPTS)
  prompts = dict(own.prompts) | {DOCUMENT: own.prompts[document] if document else ''}
  return late_interaction.fields_if_unset(config.data, earlier, texts, prompts,
                                          len(model.labels), config.max_len,
                                          config.model.architecture)


def check_named(config: ConfigDict, has_started: bool = False):
  """Raises UserError if the config needs a model but names none, unless resumed."""
  unset = [name for name, value in config.model.items() if value is None]
  require(not unset, f'model.{min(unset, default="")} is not set: this config takes it '
                     'from a model, give its folder as init_from')
  require(config.task == 'pretrain' or config.init_from or has_started,
          'init_from is not set: fine-tuning starts from a pretrained model')
  require(not config.add_tokens or config.init_from,
          f'add_tokens={config.add_tokens} extends the vocabulary of another '
          'model: give its folder as init_from')


def vocabulary_if_unset(config: ConfigDict, model: Pretrained | None,
                        workdir: epath.Path) -> dict[str, Any]:
  """The fields for reading text with the model's vocabulary, if the config has no other.

  Saves the vocabulary in the workdir, where a resumed run (model=None) finds it. The
  intact vocabulary of an earlier run stays, because the run may yet be refused.
  """
  folder, run_file = workdir / 'tokenizer', workdir / 'run.json'
  if config.data.vocab or dataset.is_prepared(config.data.source):
    return {}
  run_json = sealed.read(run_file) if run_file.exists() else {}
  if model and run_json.get('tokenizer') != sealed.digests(folder):
    model.tokenizer.save(folder)
  # A tokenizer without this setting gives None.
  lowercase = tokenizer_reader.load(folder).lowercase
  return {'data.vocab': str(folder),
          'data.lowercase': config.data.lowercase if lowercase is None else lowercase}


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


def check_vocabulary(what: str, name: str, model: Pretrained, corpus: Tokenizer,
                     folder: epath.Path, of_the_run: bool):
  """Raises UserError if a model and the corpus have different vocabularies.

  `of_the_run` says that the corpus is read with the vocabulary of an earlier run in this
  workdir. Otherwise the model's vocabulary is first saved in `folder`, because the remedy
  in the message uses it.
  """
  if tokenizer_base.digest(model.tokenizer) != tokenizer_base.digest(corpus):
    require(not of_the_run,
            f'{what}={name} has another vocabulary than the run in {folder.parent}: give '
            f'the {what} of that run, or use another --workdir')
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(f'{what}={name} has another vocabulary than the corpus: leave out '
                    'data.vocab to use the vocabulary of the model, or prepare records '
                    f'with --vocab={folder}')
  # The digest leaves out the rows of the table without an entry. A run from `model` may
  # drop them, if its table has the same padding; a teacher scores them.
  rows, ours = model.config.vocab_size, corpus.vocab_size
  if (-(-rows // VOCAB_MULTIPLE) != -(-ours // VOCAB_MULTIPLE)
      or what == 'teacher' and rows != ours):
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(f'{what}={name} has a table of {rows:,} rows, the vocabulary of the '
                    f'corpus {ours:,} entries: prepare records with --vocab={folder}')


def check_same_sizes(config: ConfigDict, model: Pretrained):
  """Raises UserError unless the config has the architecture and the sizes of `model`."""
  for field in dataclasses.fields(model.config):
    ours, theirs = config.model.get(field.name), getattr(model.config, field.name)
    require(field.name in _FREE or ours == theirs,
            f'init_from={config.init_from} holds a model with {field.name}={theirs}, '
            f'this config has model.{field.name}={ours}: they must be the same')


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
    lines.append(('new', f'the top {reinit_layers} layers, {new}'))
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
