"""Rules that map the parameter tree to the tensors of checkpoints, and back.

A rule names leaves of the tree and the tensors that hold the same numbers. Tensors have
canonical names: the names in transformers' PyTorch BERT, without the prefix "bert.".
Layers of ModernBERT keep ModernBERT's names. Weights are [out, in].
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.model.bert_config import BertConfig

Arrays = Sequence[np.ndarray]


class Rule(NamedTuple):
  """Leaves of the parameter tree, and the tensors that hold the same numbers."""

  leaves: Sequence[str]  # paths below 'params'
  tensors: Sequence[str]  # names; {} = the index of the layer
  read: Callable[..., Arrays]  # tensors -> leaves
  write: Callable[..., Arrays]  # leaves -> tensors
  layers: Sequence[int] = (0,)  # the indices of the layers with this rule
  stacked: bool = False  # True = a leaf stacks these layers along its first axis


# The rules by group: 'encoder', 'pooler' and 'mlm', which differ between architectures.
Rules = dict[str, list[Rule]]


def copy(leaf: str, tensor: str) -> Rule:
  """The leaf and the tensor are the same array."""
  return Rule([leaf], [tensor], read=lambda x: [x], write=lambda x: [x])


def transpose(leaf: str, tensor: str) -> Rule:
  """A kernel [in, out], whose tensor is [out, in]."""
  return Rule([leaf], [tensor], read=lambda x: [x.T], write=lambda x: [x.T])


def linear(leaf: str, tensor: str) -> list[Rule]:
  """A dense layer."""
  return [transpose(f'{leaf}/kernel', f'{tensor}.weight'),
          copy(f'{leaf}/bias', f'{tensor}.bias')]


def norm(leaf: str, tensor: str) -> list[Rule]:
  """A LayerNorm with a bias."""
  return [copy(f'{leaf}/scale', f'{tensor}.weight'),
          copy(f'{leaf}/bias', f'{tensor}.bias')]


def per_entry(leaf: str, tensor: str, config: BertConfig) -> Rule:
  """An array with one row per entry of the vocabulary. The leaf is padded."""
  def pad(x):
    padding = config.padded_vocab_size - config.vocab_size
    return [np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))]

  return Rule([leaf], [tensor], read=pad, write=lambda x: [x[:config.vocab_size]])


def qkv(leaf: str, tensors: Sequence[str], config: BertConfig) -> Rule:
  """Query, key and value: tensors [H * K, ...], one leaf [..., H * 3 * K].

  They are three tensors, or one tensor that concatenates them along its first axis. The
  leaf has query, key and value of a head next to each other, so that it can be sharded by
  heads.
  """
  h, k, is_one = config.num_heads, config.head_size, len(tensors) == 1

  def read(*parts):
    parts = np.split(parts[0], 3) if is_one else parts
    heads = [x.T.reshape(*x.T.shape[:-1], h, k) for x in parts]
    return [np.stack(heads, -2).reshape(*parts[0].T.shape[:-1], -1)]

  def write(x):
    heads = x.reshape(*x.shape[:-1], h, 3, k)
    parts = [heads[..., i, :].reshape(*x.shape[:-1], -1).T for i in range(3)]
    return [np.concatenate(parts)] if is_one else parts

  return Rule([leaf], tensors, read, write)


def in_layer(rules: Iterable[Rule], leaf: str, tensor: str = 'encoder.layer.{}',
             **layers: Any) -> list[Rule]:
  """Adds the path of a layer to the leaves and tensors of its rules."""
  return [rule._replace(leaves=[f'{leaf}/{name}' for name in rule.leaves],
                        tensors=[f'{tensor}.{name}' for name in rule.tensors], **layers)
          for rule in rules]


def bert_layer(config: BertConfig) -> list[Rule]:
  """The rules of a layer of most architectures."""
  parts = [f'attention.self.{name}' for name in ('query', 'key', 'value')]
  return [
      qkv('attention/qkv_kernel', [f'{name}.weight' for name in parts], config),
      qkv('attention/qkv_bias', [f'{name}.bias' for name in parts], config),
      transpose('attention/out_kernel', 'attention.output.dense.weight'),
      copy('attention/out_bias', 'attention.output.dense.bias'),
      *norm('attention_norm', 'attention.output.LayerNorm'),
      *linear('feed_forward/up', 'intermediate.dense'),
      *linear('feed_forward/down', 'output.dense'),
      *norm('feed_forward_norm', 'output.LayerNorm')]


def bert(config: BertConfig) -> Rules:
  """The rules of most architectures."""
  encoder = [
      per_entry('bert/embeddings/token', 'embeddings.word_embeddings.weight', config),
      copy('bert/embeddings/position', 'embeddings.position_embeddings.weight'),
      *norm('bert/embeddings/norm', 'embeddings.LayerNorm'),
      *in_layer(bert_layer(config), 'bert/layers', layers=range(config.stacked_layers),
                stacked=True)]
  if config.type_vocab_size:
    encoder.append(
        copy('bert/embeddings/segment', 'embeddings.token_type_embeddings.weight'))
  if config.projects:
    encoder += linear('bert/projection', 'embeddings.projection')
  return {
      'encoder': encoder, 'pooler': linear('bert/pooler', 'pooler.dense'),
      'mlm': [*linear('mlm_dense', 'cls.predictions.transform.dense'),
              *norm('mlm_norm', 'cls.predictions.transform.LayerNorm'),
              per_entry('mlm_bias', 'cls.predictions.bias', config)]}
