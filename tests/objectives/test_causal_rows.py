"""Causal rows: their choice, predictions and attention, on every mesh and after a resume."""

import dataclasses
import functools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model import architectures
from bert_jax.model.attention import (
  Attend,
  attention_bias,
  dot_product_attention,
  local_attention,
)
from bert_jax.objectives import causal_rows, masking, objectives
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest
from tests.model import test_modern
from tests.training import test_state

SIZES = dict(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
             max_positions=40, initializer_range=0.5)
MEMBERS = {
    'bert': {}, 'roberta': {}, 'distilbert': {}, 'albert': {}, 'mpnet': {},
    'deberta-v2': dict(conv_kernel_size=3),
    # Local layers in blocks, and short convolutions.
    'modernbert': dict(num_layers=4, local_window=8, conv_reach=2)}


def test_causal_rows_lie_at_even_distances():
  number = np.arange(16)
  assert np.flatnonzero(causal_rows.are_causal(number, 0.25)).tolist() == [3, 7, 11, 15]
  assert np.flatnonzero(causal_rows.are_causal(number, 1 / 16)).tolist() == [15]
  assert causal_rows.are_causal(number, 1.0).all()
  assert not causal_rows.are_causal(number, 0.0).any()
  assert causal_rows.are_causal(np.arange(10**6), 0.3).sum() == 300_000
  far = 2**31 * 4096 + np.arange(1000)  # the last rows of the longest run
  assert causal_rows.are_causal(far, 0.125).sum() == 125


def test_only_the_first_part_of_the_steps_has_causal_rows():
  shares = [causal_rows.share_at(0.5, 0.3, step, 10) for step in range(10)]
  assert shares == [0.5] * 3 + [0.0] * 7
  assert causal_rows.share_at(0.25, 1.0, 9, 10) == 0.25
  assert causal_rows.share_at(0.25, 0.01, 0, 10) == 0.25  # at least one step
  assert causal_rows.share_at(0.25, 0.07, 7, 100) == 0.0  # 0.07 * 100 is above 7 in floats


def test_a_causal_row_predicts_each_target_from_the_token_before():
  tokens = Tokens(*np.array([[[2, 7, 8, 9, 3, 0]] * 2] * 4), np.array([True, False]))
  masked = masking.Masked(np.array([[2, 4, 4, 9, 3, 0]] * 2), np.array([[1, 2, 0]] * 2),
                          np.array([[7, 8, 0]] * 2), np.array([[1.0, 1.0, 0.0]] * 2))
  predicted = causal_rows.predict_next(tokens, masked)
  # No token of the causal row is masked: [CLS] predicts 7, and 7 predicts 8.
  assert predicted.ids.tolist() == [[2, 7, 8, 9, 3, 0], [2, 4, 4, 9, 3, 0]]
  assert predicted.positions.tolist() == [[0, 1, 0], [1, 2, 0]]
  assert predicted.targets.tolist() == masked.targets.tolist()


@pytest.mark.parametrize('length, reach', [(40, 4), (40, 7), (9, 0)])
def test_attention_of_causal_rows_is_lower_triangular(length, reach):
  tokens = test_modern.packed(length=length)._replace(causal=np.array([True, False]))
  text_ids = tokens.text_ids
  query, key, value = (jax.random.normal(jax.random.key(i), (2, length, 2, 8)) for i in range(3))
  at = np.arange(length)
  visible = (text_ids[:, :, None] == text_ids[:, None]) & (text_ids[:, None] > 0)
  visible[0] &= np.tril(np.ones((length, length), bool))
  bias = np.where(visible, 0, -1e9)[:, None]
  np.testing.assert_array_equal(attention_bias(tokens), bias)
  near = np.abs(at[:, None] - at) <= reach
  plain, _ = dot_product_attention(query, key, value, np.where(near, bias, -1e9))
  actual = jax.jit(local_attention, static_argnames='reach')(
      query, key, value, Attend().mask(tokens), reach)
  real = text_ids > 0
  np.testing.assert_allclose(actual[real], plain[real], atol=2e-6)


@functools.cache
def encode(member):
  config = architectures.ALL[member].config(
      **{**SIZES, **MEMBERS[member]}, architecture=member, dropout=0.0, attention_dropout=0.0)
  encoder = architectures.make_encoder(config)
  tokens = test_modern.packed()
  variables = nn.unbox(jax.jit(encoder.init)(jax.random.key(0), tokens,
                                             np.zeros((2, 1), np.int32)))
  # Taps of zero would hide the neighbors.
  variables = jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.ones_like(x) if path[-1].key == 'taps' else x, variables)
  return jax.jit(functools.partial(encoder.apply, variables, method='encode'))


@pytest.mark.medium
@pytest.mark.parametrize('member', MEMBERS)
def test_no_architecture_sees_later_tokens_of_a_causal_row(member):
  tokens = test_modern.packed()
  causal = tokens._replace(causal=np.array([True, False]))
  changed = np.array(tokens.ids)
  changed[:, 15] = (changed[:, 15] + 1) % 60
  plain, before, after = (np.asarray(encode(member)(x)) for x in (
      tokens, causal, causal._replace(ids=changed)))
  # The first row does not see later tokens, the second row does.
  np.testing.assert_array_equal(before[0, :15], after[0, :15])
  assert (np.abs(before[0, 15:22] - after[0, 15:22]).max(-1) > 1e-4).all()
  assert (np.abs(before[1, :22] - after[1, :22]).max(-1) > 1e-5).any()
  np.testing.assert_allclose(before[1, :33], plain[1, :33], atol=2e-5)
  # A causal token has the same output if all tokens after it are cut off.
  cut = tokens._replace(text_ids=np.where(np.arange(40) < 10, tokens.text_ids, 0),
                        causal=np.array([True, True]))
  np.testing.assert_allclose(encode(member)(cut)[0, :10], before[0, :10], atol=2e-5)


def make_task(share=0.5, config=test_state.CONFIG):
  vocabulary = masking.Vocabulary(test_state.VOCAB, special_ids=(0, 100, 101, 102, 103),
                                  mask_id=103)
  return Pretraining(objectives.create('mlm', 'full_sentences', config),
                     masking.MaskingConfig(causal_rows=share), vocabulary)


@pytest.mark.medium
def test_the_loss_follows_its_formula():
  config = dataclasses.replace(test_state.CONFIG, dropout=0.0, attention_dropout=0.0)
  task, rows = make_task(config=config), test_state.make_batch(rows=2)
  params = nn.unbox(task.init(jax.random.key(0)))
  causal = rows._replace(tokens=rows.tokens._replace(causal=np.array([True, True])))
  total, count = task.loss(params, {}, causal, jax.random.key(1))['mlm_loss']
  masked = task.mask(jax.random.split(jax.random.key(1))[0], rows)
  everywhere = jnp.broadcast_to(jnp.arange(32), (2, 32))
  logits, _ = task.model.apply(params, causal.tokens, everywhere, None)
  surprisal = -jax.nn.log_softmax(logits)
  expected = [surprisal[i, p - 1, rows.tokens.ids[i, p]]
              for i in range(2) for p in np.array(masked.positions[i][masked.weights[i] > 0])]
  assert count == len(expected) > 4
  assert float(total) == pytest.approx(float(sum(expected)), rel=1e-5)


@functools.cache
def losses(shape, preset='tp', accumulation=1):
  mesh, task = conftest.sub_mesh(*shape), make_task()
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 10)
  init, abstract = state_lib.make_init(task, optimizer, mesh, preset)
  step = state_lib.make_train_step(task, optimizer, mesh, preset, abstract, seed=7,
                                   accumulation=accumulation)
  state, out = init(state_lib.root_key(7)), []
  for i in range(3):
    rows = test_state.make_batch(seed=i)
    causal = causal_rows.are_causal(8 * i + rows.row, 0.5)
    rows = rows._replace(tokens=rows.tokens._replace(causal=causal))
    state, metrics = step(state, mesh_lib.put_batch(rows, mesh))
    out.append(float(metrics['mlm_loss'][0] / metrics['mlm_loss'][1]))
  return out


@pytest.mark.medium
@pytest.mark.parametrize('shape, preset', [((4, 2), 'fsdp_tp'), ((8, 1), 'dp')])
def test_the_same_losses_on_every_mesh(shape, preset):
  np.testing.assert_allclose(losses(shape, preset), losses((1, 1)), rtol=1e-5)


@pytest.mark.medium
def test_a_resumed_run_has_the_same_bits(corpus_file, tmp_path):
  def train():
    config = conftest.tiny_config(corpus_file, batch_size=16, **{
        'data.sequences': 'full_sentences', 'masking.causal_rows': 0.5,
        'masking.causal_steps': 0.8, 'optimizer.accumulation': 2})
    run.run(config, str(tmp_path / 'run'))

  conftest.check_resume(train, tmp_path / 'run')
  rows = [json.loads(line)
          for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  losses = [row['mlm_loss'] for row in rows if 'mlm_loss' in row]
  assert losses[-1] < losses[0]


@pytest.mark.parametrize('overrides, message', [
    ({'masking.causal_rows': 1.5}, 'masking.causal_rows=1.5 must lie in [0, 1]'),
    ({'masking.causal_rows': 1.0}, 'masking.causal_rows=1.0 leaves no masked rows'),
    ({'masking.causal_rows': 0.5, 'masking.causal_steps': 0.0}, 'masking.causal_steps=0.0 in (0,'),
    ({'masking.causal_rows': 0.5, 'data.sequences': 'next_sentence'},
     'masking.causal_rows=0.5 is for objective=mlm, but the objective is mlm_nsp'),
    ({'masking.causal_rows': 0.5, 'model.attention': 'fused'},
     'model.attention=fused does not compute causal rows (masking.causal_rows=0.5)'),
])
def test_wrong_settings_are_refused(overrides, message, corpus_file, tmp_path):
  config = conftest.tiny_config(corpus_file, **{'data.sequences': 'full_sentences', **overrides})
  with pytest.raises(UserError) as error:
    run.run(config, str(tmp_path / 'run'))
  assert message in str(error.value)
  assert not (tmp_path / 'run').exists()
