"""DeBERTa v3's objective: the paths of gradients, and the sum of the tables on export."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model.deberta import DebertaConfig
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import objectives, replaced_tokens
from bert_jax.objectives.disentangled_sharing import DisentangledSharing
from tests.objectives.test_replaced_tokens import CONFIG as ELECTRA
from tests.objectives.test_replaced_tokens import KEYS, initial, make_example

CONFIG = DebertaConfig(vocab_size=300, hidden_size=32, num_layers=1, num_heads=2,
                       intermediate_size=48, max_positions=32, position_buckets=8, dropout=0.0,
                       attention_dropout=0.0)


def size(tree):
  return sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))


@pytest.mark.medium
@pytest.mark.parametrize('config', [
    pytest.param(CONFIG, id='deberta'),
    pytest.param(ELECTRA, id='electra', marks=pytest.mark.slow)])
def test_each_loss_trains_its_own_table(config):
  objective = DisentangledSharing(BertForPreTraining(config))
  params = initial(objective)
  assert size(params['params']['token_delta']) == 0 and size(params) > 0

  @jax.jit
  @jax.grad
  def gradient(params, weights):
    metrics = objective.loss(params, {}, *make_example(), KEYS)
    return weights[0] * metrics['mlm_loss'][0] + weights[1] * metrics['rtd_loss'][0]

  mlm, rtd = (gradient(params, weights)['params'] for weights in ((1.0, 0.0), (0.0, 1.0)))
  # The discriminator: no gradient reaches the shared table or any part of the generator.
  assert size(rtd['bert']['embeddings']['token']) == size(rtd['generator']) == 0
  assert size(rtd['token_delta']) > 0 and size(rtd['bert']['embeddings']['norm']) > 0
  assert size(rtd['rtd']) > 0 and size(rtd['bert']['layers']) > 0
  # The generator: nothing but the shared table and its own parts.
  assert size(mlm['bert']['embeddings']['token']) > 0 and size(mlm['generator']) > 0
  others = dict(mlm['bert'], embeddings=dict(mlm['bert']['embeddings'], token=0))
  assert size(others) == size(mlm['rtd']) == size(mlm['token_delta']) == 0


def test_discriminator_and_export_use_the_sum_of_the_tables(monkeypatch):
  objective, (rows, masked) = DisentangledSharing(BertForPreTraining(CONFIG)), make_example()
  params = initial(objective)
  rng = np.random.default_rng(0)
  shape = params['params']['token_delta'].shape
  delta = rng.normal(size=shape, scale=0.1).astype(np.float32)
  params['params']['token_delta'] = jnp.asarray(delta)
  exported = objective.exported(params)['params']
  assert set(exported) == {'bert'}
  table = params['params']['bert']['embeddings']['token']
  np.testing.assert_array_equal(exported['bert']['embeddings']['token'], table + delta)

  # The rtd loss equals the loss of the exported encoder with the same head, on the drawn tokens.
  drawn = rng.integers(5, 300, (4, 3))
  monkeypatch.setattr(replaced_tokens, 'sample', lambda *_: jnp.asarray(drawn, jnp.int32))
  metrics = jax.jit(objective.loss)(params, {}, rows, masked, KEYS)
  ids = replaced_tokens.replace(rows.tokens.ids, masked.positions, masked.weights, drawn)
  score = jax.jit(functools.partial(objective.model.apply, method='rtd_logits'))
  scores = score({'params': {**exported, 'rtd': params['params']['rtd']}},
                 rows.tokens._replace(ids=ids))
  original = rows.tokens.ids.copy()
  for row, slot in zip(*np.nonzero(masked.weights)):
    original[row, masked.positions[row, slot]] = masked.targets[row, slot]
  real = rows.tokens.text_ids > 0
  expected = (np.logaddexp(0, scores) - scores * (ids != original))[real].sum()
  np.testing.assert_allclose(metrics['rtd_loss'][0], expected, rtol=1e-5)


def test_electra_is_exported_with_its_head():
  objective = DisentangledSharing(BertForPreTraining(ELECTRA))
  params = initial(objective)
  exported = objective.exported(params)['params']
  assert set(exported) == {'bert', 'rtd'}
  assert exported['rtd'] is params['params']['rtd']


def test_the_generator_is_as_wide_and_half_as_deep_as_the_discriminator():
  generator = dataclasses.replace(CONFIG, num_layers=6, conv_kernel_size=3).generator()
  assert generator == dataclasses.replace(CONFIG, num_layers=3)
  assert objectives.create('', 'full_sentences', CONFIG) == objectives.create(
      'mlm', 'full_sentences', CONFIG)  # only its name selects this objective


@pytest.mark.parametrize('objective, architecture', [
    ('replaced_tokens', 'deberta-v2'), ('replaced_tokens_gdes', 'bert'), ('mlm', 'electra')])
def test_an_objective_of_another_architecture_is_refused(objective, architecture):
  with pytest.raises(UserError, match=f'objective={objective} is not for model.architecture='):
    objectives.name_of(objective, 'full_sentences', architecture)
