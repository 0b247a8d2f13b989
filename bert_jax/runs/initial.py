"""What a run starts from: another model's parameters, words new to it, vectors of words."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import dataset
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data import vocabulary
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.interop import load as load_lib
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import task_list
from bert_jax.training import state as state_lib

# Fields of `model` that the parameters do not know: a run may have others than its start.
_FREE = ('dtype', 'attention', 'remat', 'scan_unroll', 'dropout', 'attention_dropout',
         'initializer_range', 'vocab_size')


def _on_the_host(model: Pretrained) -> Pretrained:
  """Nothing of it stays on a device, where it would take room from the run."""
  return dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params))


def load(config: ConfigDict) -> Pretrained:
  """The model that `init_from` names, its vocabulary extended by `model.add_tokens`.

  New entries start as the mean of the pieces that they were made of before, in the token table and
  in the bias of the MLM head.

  Raises:
    UserError: there is no sound model, or a word that cannot be added.
  """
  model = _on_the_host(load_lib.load(config.init_from))
  if not config.model.add_tokens:
    return model
  extended, notes = vocabulary.add_words(model.tokenizer, config.model.add_tokens)
  print_summary([('note', note) for note in notes])
  return _grown(model, extended)


def _grown(model: Pretrained, tokenizer: Tokenizer) -> Pretrained:
  """The model with the vocabulary of `tokenizer`, whose first entries are the model's own."""
  old, new = model.config.vocab_size, tokenizer.vocab_size
  config = dataclasses.replace(model.config, vocab_size=new)
  pieces = model.tokenizer.encode_batch(tokenizer.tokens(range(old, new)))

  def grow(table):
    table = np.asarray(table)
    grown = np.zeros((config.padded_vocab_size, *table.shape[1:]), table.dtype)
    grown[:old] = table[:old]
    for i, ids in enumerate(pieces, old):
      grown[i] = table[ids].mean(0)
    return grown

  tree = dict(model.params['params'])
  tree['bert'] = dict(tree['bert'])
  tree['bert']['embeddings'] = dict(tree['bert']['embeddings'])
  tree['bert']['embeddings']['token'] = grow(tree['bert']['embeddings']['token'])
  if 'mlm_bias' in tree:
    tree['mlm_bias'] = grow(tree['mlm_bias'])
  return dataclasses.replace(model, config=config, params={'params': tree}, tokenizer=tokenizer)


def teacher(config: ConfigDict) -> Pretrained | None:
  """The model that `teacher` names, if any.

  Raises:
    UserError: there is none, or it has no masked LM head or another width.
  """
  if not config.teacher:
    return None
  model = _on_the_host(load_lib.load(config.teacher))
  if 'mlm' not in model.groups:
    raise UserError(f'teacher={config.teacher} has no masked LM head to learn from')
  if model.config.hidden_size != config.model.hidden_size:
    raise UserError(f'teacher={config.teacher} is {model.config.hidden_size} wide, the student '
                    f'{config.model.hidden_size}: their hidden states cannot be compared')
  return model


def student(model: Pretrained, config: BertConfig) -> Pretrained | None:
  """What a smaller model begins with: every second layer of its teacher's, say, and all the rest.

  A student without segments adds the row of the first one to its positions. None where the sizes
  differ in more than the number of layers: such a student begins with random parameters.
  """
  theirs, cut = model.config, config.num_layers
  same = ('hidden_size', 'num_heads', 'intermediate_size', 'max_positions')
  if (not {theirs.architecture, config.architecture} <= {'bert', 'roberta', 'distilbert'}
      or cut > theirs.num_layers or config.type_vocab_size not in (0, theirs.type_vocab_size)
      or any(getattr(theirs, name) != getattr(config, name) for name in same)):
    print_summary([('student', 'begins at random: the teacher is of another kind or size')])
    return None
  tree, chosen = dict(model.params['params']), np.arange(cut) * theirs.num_layers // cut
  bert, embeddings = dict(tree['bert']), dict(tree['bert']['embeddings'])
  bert.pop('pooler', None)
  if not config.type_vocab_size and theirs.type_vocab_size:
    embeddings['position'] = embeddings['position'] + embeddings.pop('segment')[0]
  layers = jax.tree.map(lambda x: np.asarray(x)[chosen], bert['layers'])
  kept = {name: tree[name] for name in ('mlm_bias', 'mlm_dense', 'mlm_norm')}
  return dataclasses.replace(
      model, config=config, task='', labels=(),
      params={'params': kept | {'bert': bert | {'embeddings': embeddings, 'layers': layers}}})


def frozen(model: Pretrained | None) -> Any:
  """The parameters of a teacher that are used, boxed with their logical axes."""
  if not model:
    return {}
  groups = tuple(group for group in model.groups
                 if group == 'mlm' or (group == 'pooler' and model.config.pooler_is_shared))
  boxes = layout.abstract_params(model.config, groups)
  return jax.tree.map(lambda box, value: box.replace_boxed(value), boxes,
                      _like(boxes, model.params), is_leaf=lambda x: not isinstance(x, dict))


def _like(tree: Any, other: Any) -> Any:
  """The leaves of `other` that `tree` has, on the host."""
  if not isinstance(tree, dict):
    return np.asarray(other)
  return {name: _like(x, other[name]) for name, x in tree.items()}


def adopt_sizes(config: ConfigDict, model: Pretrained):
  """Fills in the sizes that the config leaves to `init_from`."""
  with config.unlocked():
    for field in dataclasses.fields(model.config):
      if config.model.get(field.name) is None:
        config.model[field.name] = getattr(model.config, field.name)


def adopt_vocabulary(config: ConfigDict, model: Pretrained | None, workdir: epath.Path):
  """Has text read with the vocabulary of `init_from`, where the config names no other.

  It is kept in the workdir, from where a run that goes on takes it: model is None then.
  """
  folder = workdir / 'tokenizer'
  if config.data.vocab or dataset.is_prepared(config.data.source):
    return
  if model:
    model.tokenizer.save(folder)
  with config.unlocked():
    config.data.vocab = str(folder)
    config.data.lowercase = getattr(tokenizer_lib.load(folder), 'lowercase', config.data.lowercase)


def with_head_of(model: Pretrained, task: str, labels: Sequence[str]) -> Pretrained:
  """The model without a classifier that is for another task or other labels."""
  if (model.task, model.labels) == (task, tuple(labels)):
    return model
  heads = {part for kind in task_list.ALL.values() for part in kind.parts}
  tree = {name: x for name, x in model.params['params'].items() if name not in heads}
  return dataclasses.replace(model, params={'params': tree}, task='', labels=())


def check_vocabulary(what: str, name: str, model: Pretrained, corpus: Tokenizer,
                     folder: epath.Path):
  """Raises UserError if a model's vocabulary is not the corpus's; it is left in `folder` then."""
  if tokenizer_lib.digest(model.tokenizer) != tokenizer_lib.digest(corpus):
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(
        f'{what}={name} has another vocabulary than the corpus: leave data.vocab out to read text '
        f'with its own, or prepare records with --vocab={folder}')


def check_sizes(config: ConfigDict, model: Pretrained):
  """Raises UserError if the config has a model of other sizes, or with other functions in it."""
  for field in dataclasses.fields(model.config):
    ours, theirs = config.model.get(field.name), getattr(model.config, field.name)
    if field.name not in _FREE and ours != theirs:
      raise UserError(f'init_from={config.init_from} holds a model with {field.name}={theirs}, '
                      f'this config has model.{field.name}={ours}: they must be the same')


def _names(tree: Any) -> dict[str, Any]:
  return {'/'.join(str(key.key) for key in path): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _part(path: str) -> str:
  """What a reader knows an array by: mlm_dense, bert/pooler."""
  _, part, *rest = path.split('/')
  return f'{part}/{rest[0]}' if part == 'bert' else part


def from_model(model: Pretrained, name: str,
               reinit_layers: int = 0) -> Callable[[Any], Any]:
  """A function from fresh parameters to those of the model; what it does not have stays fresh.

  Args:
    model: to start from.
    name: of it, for messages.
    reinit_layers: that many top layers, and the pooler, stay fresh (Zhang et al. 2021,
      https://arxiv.org/abs/2006.05987).

  Raises:
    UserError: more layers than there are.
  """
  layers = model.config.num_layers
  if not 0 <= reinit_layers <= layers:
    raise UserError(f'model.reinit_layers={reinit_layers}: {name} has {layers} layers')
  theirs = {path: np.asarray(x) for path, x in _names(model.params).items()
            if not reinit_layers or '/pooler/' not in path}

  def start(fresh):
    ours = _names(fresh)
    unused, new = (sorted(set(map(_part, a.keys() - b.keys())))
                   for a, b in ((theirs, ours), (ours, theirs)))
    print_summary([
        ('initialised', f'{len(ours.keys() & theirs.keys())} arrays from {name}'),
        *([('new', f'{", ".join(new)}: not in {name}')] if new and not reinit_layers else []),
        *([('new', f'the top {reinit_layers} layers, {", ".join(new)}')] if reinit_layers else []),
        *([('left out', f'{", ".join(unused)}: not in this run')] if unused else [])])
    kept = layers - reinit_layers

    def placed(path, x):
      if path not in theirs:
        return x
      if reinit_layers and '/layers/' in path:
        merge = jax.jit(lambda a, b: jnp.concatenate([a[:kept], b[kept:]]),
                        out_shardings=x.sharding)
        return merge(state_lib.place(theirs[path], x), x)
      return state_lib.place(theirs[path], x)

    return jax.tree.unflatten(jax.tree.structure(fresh),
                              [placed(path, x) for path, x in ours.items()])

  return start


def from_word_vectors(path: str, tokenizer: Tokenizer) -> Callable[[Any], Any]:
  """A function that puts a word2vec text file's vectors into the token table.

  All are scaled by one factor, to the root mean square of the entries that they replace: the angles
  are the file's, the size is what the rest of the model expects.

  Raises:
    UserError: the file is malformed, or has vectors for no entry of the vocabulary.
  """
  entries = {token: i for i, token in enumerate(tokenizer.tokens(range(tokenizer.vocab_size)))}
  ids, vectors = vocabulary.read_word_vectors(path, entries)

  def start(params):
    table = params['params']['bert']['embeddings']['token']
    if vectors.shape[1] != table.shape[1]:
      raise UserError(f'model.embedding_init={path} has vectors of {vectors.shape[1]}, the model '
                      f'is {table.shape[1]} wide')
    print_summary([('initialised', f'{len(ids):,} of {len(entries):,} token embeddings from '
                                   f'{path}')])

    def put(table):
      size = np.sqrt(np.mean(np.square(vectors)))
      old = jnp.sqrt(jnp.mean(jnp.square(table[ids])))
      return table.at[ids].set(vectors / size * old)

    params['params']['bert']['embeddings']['token'] = jax.jit(
        put, out_shardings=table.sharding)(table)
    return params

  return start
