"""Compiled forward passes of packed texts.

R rows of L tokens hold up to P texts each. Positions [R, P] point at the first tokens of
the texts.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.tokens import Tokens
from bert_jax.model import architectures, pooling
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import BertForPreTraining


def _apply(module: nn.Module, *arguments: Any, **options: Any) -> Any:
  """Runs a module. The type of `Module.apply` also allows (output, changed variables)."""
  return module.apply(*arguments, **options)


@functools.partial(jax.jit, static_argnames=('config', 'layers'))
def hidden_states(config: BertConfig, params: Any, tokens: Tokens, starts: jax.Array,
                  layers: tuple[int, ...]) -> jax.Array:
  """Returns the hidden states of some layers, concatenated: [R, L, D * len(layers)]."""
  encoder = architectures.make_encoder(config)
  variables = {'params': params['params']['bert']}
  # Keeping the states of all layers takes N times the memory of the last one.
  if layers == (-1,):
    return _apply(encoder, variables, tokens, method='encode')
  hidden = _apply(encoder, variables, tokens, method='states').hidden  # [N + 1, R, L, D]
  return jnp.concatenate([hidden[i] for i in layers], axis=-1)


@functools.partial(jax.jit, static_argnames=('config', 'layers'))
def hidden_and_pooled(config: BertConfig, params: Any, tokens: Tokens, starts: jax.Array,
                      layers: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns (hidden states [R, L, D * len(layers)], pooled outputs [R, P, D])."""
  # The pooler reads the last layer, whichever layers the caller wants.
  computed = layers if layers == (-1,) else (*layers, -1)
  states = hidden_states(config, params, tokens, starts, computed)
  pooled = _apply(architectures.make_encoder(config), {'params': params['params']['bert']},
                  states[..., -config.hidden_size:], starts, method='pool')
  return states[..., :config.hidden_size * len(layers)], pooled


@functools.partial(jax.jit, static_argnames=('config', 'layers', 'poolings'))
def vectors(config: BertConfig, params: Any, tokens: Tokens, starts: jax.Array,
            layers: tuple[int, ...], poolings: tuple[str, ...]) -> jax.Array:
  """Pools the states of each text from its start on: [R, P, D * layers * poolings].

  Layers and poolings are concatenated.
  """
  hidden = hidden_states(config, params, tokens, starts, layers)
  # Tokens before the start, such as a prompt, become padding for the pooling. [R, L]
  start = jnp.take_along_axis(starts, jnp.maximum(tokens.text_ids - 1, 0), axis=1)
  pooled = jnp.where(jnp.arange(start.shape[1]) >= start, tokens.text_ids, 0)
  pool = functools.partial(pooling.pool, hidden, pooled, jnp.asarray(tokens.positions),
                           starts)
  return jnp.concatenate([pool(how) for how in poolings], axis=-1)


@functools.partial(jax.jit, static_argnames=('config',))
def mlm_logits(config: BertConfig, params: Any, tokens: Tokens,
               positions: jax.Array) -> jax.Array:
  """Returns the MLM logits at some positions: [R, P, padded V]."""
  return _apply(BertForPreTraining(config), params, tokens, positions,
                method=lambda m, b, p: m.mlm_logits(m.bert.encode(b), p))


@functools.partial(jax.jit, static_argnames=('config',))
def surprisals(config: BertConfig, params: Any, tokens: Tokens, positions: jax.Array,
               targets: jax.Array) -> jax.Array:
  """Returns -log softmax(logits)[target] at some positions: [R, P]."""
  logits = mlm_logits(config, params, tokens, positions)
  of_targets = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
  return jax.nn.logsumexp(logits, axis=-1) - of_targets


@functools.partial(jax.jit, static_argnames=('config',))
def nsp_logits(config: BertConfig, params: Any, tokens: Tokens,
               starts: jax.Array) -> jax.Array:
  """Returns the next-sentence logits of each text: [R, P, 2]."""
  return _apply(BertForPreTraining(config), params, tokens, starts,
                method=lambda m, b, p: m.nsp_logits(m.bert.encode(b), p))
