"""What a run starts from: another model's parameters, words new to it, vectors of words."""

from collections.abc import Callable
import dataclasses
from typing import Any

from etils import epath
import jax
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data import dataset
from bert_jax.data import tokenizer as tokenizer_lib
from bert_jax.data import vocabulary
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError
from bert_jax.interop import load as load_lib
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.config import BertConfig
from bert_jax.training.report import print_summary

# Fields of `model` that the parameters do not know: a run may have others than its start.
_FREE = ('dtype', 'remat', 'scan_unroll', 'dropout', 'attention_dropout', 'initializer_range',
         'vocab_size')


def load(config: ConfigDict) -> Pretrained:
  """The model that `init_from` names, its vocabulary extended by `model.add_tokens`.

  New entries start as the mean of the pieces that they were made of before, in the token table and
  in the bias of the MLM head.

  Raises:
    UserError: there is no sound model, or a word that cannot be added.
  """
  model = load_lib.load(config.init_from)
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


def adopt(config: ConfigDict, model: Pretrained, tokenizer: epath.Path):
  """Fills in what the config leaves to `init_from`: sizes that are None, the vocabulary of text.

  The vocabulary is written into the folder `tokenizer`, which the run then reads.
  """
  with config.unlocked():
    for field in dataclasses.fields(BertConfig):
      if config.model[field.name] is None:
        config.model[field.name] = getattr(model.config, field.name)
    if not config.data.vocab and not dataset.is_prepared(config.data.source):
      model.tokenizer.save(tokenizer)
      config.data.vocab = str(tokenizer)
      config.data.lowercase = getattr(model.tokenizer, 'lowercase', config.data.lowercase)


def check(config: ConfigDict, model: Pretrained, corpus: Tokenizer, folder: epath.Path):
  """Raises UserError if a run with this config and corpus cannot start from the model.

  If the vocabulary is another, the model's is left in `folder` for `prepare`.
  """
  if tokenizer_lib.digest(model.tokenizer) != tokenizer_lib.digest(corpus):
    if not jax.process_index():
      model.tokenizer.save(folder)
    raise UserError(
        f'init_from={config.init_from} has another vocabulary than the corpus: leave data.vocab '
        f'out to read text with its own, or prepare records with --vocab={folder}')
  for field in dataclasses.fields(BertConfig):
    ours, theirs = config.model[field.name], getattr(model.config, field.name)
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


def _place(value: np.ndarray, like: jax.Array) -> jax.Array:
  return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])


def from_model(model: Pretrained, name: str) -> Callable[[Any], Any]:
  """A function from fresh parameters to those of the model; what it does not have stays fresh."""
  theirs = {path: np.asarray(x) for path, x in _names(model.params).items()}

  def start(fresh):
    ours = _names(fresh)
    unused, new = (sorted(set(map(_part, a.keys() - b.keys())))
                   for a, b in ((theirs, ours), (ours, theirs)))
    print_summary([
        ('initialised', f'{len(ours.keys() & theirs.keys())} arrays from {name}'),
        *([('new', f'{", ".join(new)}: not in {name}')] if new else []),
        *([('left out', f'{", ".join(unused)}: not in this run')] if unused else [])])
    placed = {path: _place(theirs[path], x) if path in theirs else x for path, x in ours.items()}
    return jax.tree.unflatten(jax.tree.structure(fresh), list(placed.values()))

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
      old = jax.numpy.sqrt(jax.numpy.mean(jax.numpy.square(table[ids])))
      return table.at[ids].set(vectors / size * old)

    params['params']['bert']['embeddings']['token'] = jax.jit(
        put, out_shardings=table.sharding)(table)
    return params

  return start
