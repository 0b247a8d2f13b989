"""The functions that an ONNX file computes: one for each task and kind of embedder.

Inputs and outputs have the names of optimum's exports. An embedder also returns
`sentence_embedding`: the result of its pooling and all its modules. So a program that
runs the file needs no code for them.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.interop.pretrained import Pretrained
from bert_jax.interop.sentence_layout import Module, SentenceLayout
from bert_jax.interop.sparse_layout import SparseLayout
from bert_jax.model import architectures, pooling
from bert_jax.model.heads import BertForPreTraining, ReplacedTokenHead
from bert_jax.model.layers import activation
from bert_jax.tasks import task_list


class Function(NamedTuple):
  """A function for the graph.

  Attributes:
    run: takes int32 arrays, and returns a tuple of float32 arrays.
    inputs: the axes of each input by its name: 'b, l', or 'b, c, l' with c choices.
    outputs: the names of the results.
  """

  run: Callable[..., tuple[jax.Array, ...]]
  inputs: dict[str, str]
  outputs: tuple[str, ...]


def _dense(module: Module, x: jax.Array) -> jax.Array:
  name = module.config['activation_function'].rsplit('.', 1)[-1].lower()
  x = x @ module.tensors['linear.weight'].T + module.tensors.get('linear.bias', 0)
  return x if name == 'identity' else activation(name)(x)


def _layer_norm(module: Module, x: jax.Array) -> jax.Array:
  x = x - x.mean(-1, keepdims=True)
  x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
  return x * module.tensors['norm.weight'] + module.tensors['norm.bias']


def _normalize(module: Module | None, x: jax.Array) -> jax.Array:
  return x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)), 1e-12)


_MODULES = {'Dense': _dense, 'LayerNorm': _layer_norm, 'Normalize': _normalize,
            'Dropout': lambda module, x: x}


def _sentence_vectors(layout: SentenceLayout, hidden: jax.Array, tokens: Tokens,
                      first: jax.Array) -> jax.Array:
  """Pools and applies the modules, as `SentenceLayout.finished`: [B, L, D] -> [B, D']."""
  x = jnp.concatenate([
      pooling.pool(hidden, tokens.text_ids, tokens.positions, first, how)[:, 0]
      for how in layout.pooling], axis=-1)
  for module in layout.modules:
    x = _MODULES[module.kind](module, x)
  return x[:, :layout.dim]


def _sparse_vectors(layout: SparseLayout, logits: jax.Array, tokens: Tokens) -> jax.Array:
  """Weights of the vocabulary, like `BertForSparseEmbedding`: [B, L, V] -> [B, V]."""
  is_token = tokens.text_ids[:, :, None] > 0

  def weight(x):
    x = jnp.log1p(jax.nn.relu(x))
    return jnp.log1p(x) if layout.activation == 'log1p_relu' else x

  if layout.pooling == 'sum':
    return jnp.sum(jnp.where(is_token, weight(logits), 0), axis=1)
  # Weights grow with the logits, so the largest logit has the largest weight.
  return weight(jnp.max(jnp.where(is_token, logits, -jnp.inf), axis=1))


def _run(model: Pretrained, tokens: Tokens) -> tuple[jax.Array, ...]:
  """Computes the outputs of a model for texts that begin in place 0 of their rows."""
  config = dataclasses.replace(model.config, attention='xla', dtype='float32')
  params, layout = jax.tree.map(jnp.asarray, model.params), model.text_layout
  first = jnp.zeros_like(tokens.ids[:, :1])
  if model.task:
    kind = task_list.WITH_HEAD[model.task]
    logits = kind.head(config, len(model.labels)).apply(params, tokens, first)
    if len(kind.outputs) > 1:
      return tuple(logits[..., i] for i in range(len(kind.outputs)))
    return (logits if kind.scores_tokens else logits[:, 0],)
  hidden = architectures.make_encoder(config).apply(
      {'params': params['params']['bert']}, tokens, method='encode')
  if isinstance(layout, SentenceLayout):
    return hidden, _sentence_vectors(layout, hidden, tokens, first)
  if 'rtd' in model.groups:
    head = ReplacedTokenHead(config)
    return (head.apply({'params': params['params']['rtd']}, hidden),)
  heads, outputs = BertForPreTraining(config), (hidden,)
  if 'mlm' in model.groups:
    logits = heads.apply(params, hidden, tokens.positions, method='mlm_logits')
    outputs = (logits[..., :config.vocab_size],)
  if isinstance(layout, SparseLayout):
    return *outputs, _sparse_vectors(layout, outputs[0], tokens)
  if 'nsp' in model.groups:
    outputs += (heads.apply(params, hidden, first, method='nsp_logits')[:, 0],)
  return outputs


def _outputs(model: Pretrained) -> tuple[str, ...]:
  """The names of the outputs, as in optimum's exports."""
  if model.task:
    return task_list.WITH_HEAD[model.task].outputs
  if isinstance(model.text_layout, SentenceLayout):
    return 'last_hidden_state', 'sentence_embedding'
  if 'rtd' in model.groups:
    return ('logits',)
  if isinstance(model.text_layout, SparseLayout):
    return 'logits', 'sentence_embedding'
  has_pairs = 'nsp' in model.groups
  name = 'prediction_logits' if has_pairs else 'logits'
  tokens = name if 'mlm' in model.groups else 'last_hidden_state'
  return (tokens, 'seq_relationship_logits') if has_pairs else (tokens,)


def has_tokens(model: Pretrained, output: str) -> bool:
  """Returns True if an output has a value for each token, arbitrary at padding."""
  if model.task:
    return task_list.WITH_HEAD[model.task].scores_tokens
  return output not in ('sentence_embedding', 'seq_relationship_logits')


def function(model: Pretrained) -> Function:
  """Returns the function of a model; its task, layout and heads decide the outputs."""
  c = model.config
  has_types = c.has_segments and c.type_vocab_size > 1

  def run(ids, *others):
    # A model without segments has no input token_type_ids, as in transformers.
    *types, mask = others
    shape, arrays = ids.shape, (ids, types[0] if types else jnp.zeros_like(ids), mask)
    ids, type_ids, mask = (x.reshape(-1, shape[-1]) if len(shape) == 3 else x
                           for x in arrays)
    positions = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), ids.shape)
    outputs = _run(model, Tokens(ids, type_ids, positions, mask))
    return (outputs[0].reshape(shape[:2]),) if len(shape) == 3 else outputs

  names = ('input_ids', *(['token_type_ids'] if has_types else []), 'attention_mask')
  has_choices = model.task and task_list.WITH_HEAD[model.task].scores_choices
  axes = 'b, c, l' if has_choices else 'b, l'
  return Function(run, dict.fromkeys(names, axes), _outputs(model))
