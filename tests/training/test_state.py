"""One training step: golden numbers, equal losses on every mesh, microbatches, shardings."""

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.data.rows import Rows
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import objectives
from bert_jax.objectives.losses import total_loss
from bert_jax.objectives.masking import MaskingConfig, Vocabulary
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest

VOCAB = 30_522
GOLDEN_LOSSES = [11.0197868, 11.0600414, 11.0195885]  # ln(30,522) + ln(2) = 11.02 at the start
GOLDEN_GRAD_NORM = 2.043626
CONFIG = BertConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4,
                    intermediate_size=64, max_positions=32)


def make_task(config=CONFIG) -> Pretraining:
  """Masked LM and next sentence prediction with BERT's special ids."""
  vocabulary = Vocabulary(VOCAB, special_ids=(0, 100, 101, 102, 103), mask_id=103)
  return Pretraining(objectives.create('', 'next_sentence', config), MaskingConfig(), vocabulary)


def make_batch(rows=8, length=32, seed=0) -> Rows:
  rng = np.random.default_rng(seed)
  ids = rng.integers(1000, VOCAB, (rows, length)).astype(np.int32)
  n = rng.integers(16, length + 1, rows)[:, None]
  column = np.arange(length)[None]
  ids[:, 0] = 101
  ids[(column == n // 2) | (column == n - 1)] = 102
  real = column < n
  tokens = Tokens(ids=np.where(real, ids, 0).astype(np.int32),
                  type_ids=(real & (column > n // 2)).astype(np.int32),
                  positions=(column * real).astype(np.int32), text_ids=real.astype(np.int32))
  return Rows(tokens, starts=np.zeros((rows, 1), np.int32),
              labels=rng.integers(0, 2, (rows, 1)).astype(np.int32),
              row=np.arange(rows, dtype=np.int32), pair_weights=np.ones((rows, 1), np.float32))


def one_step(mesh, preset='tp', accumulation=1, config=CONFIG, steps=1):
  task = make_task(config)
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 10)
  init, abstract = state_lib.make_init(task, optimizer, mesh, preset)
  step = state_lib.make_train_step(task, optimizer, mesh, preset, abstract, seed=7,
                                   accumulation=accumulation)
  state = init(state_lib.root_key(7))
  losses = []
  for i in range(steps):
    state, metrics = step(state, mesh_lib.put_batch(make_batch(seed=i), mesh))
    losses.append(float(total_loss(metrics, task.loss_weights)))
  return losses, state, metrics


@pytest.fixture(scope='module')
def alone():
  """Three steps on one device, dropout on."""
  return one_step(conftest.sub_mesh(1, 1), steps=3)


def test_three_steps_give_the_golden_numbers(alone):
  """Frozen numbers: they change only with an intended change of the computation."""
  losses, state, metrics = alone
  np.testing.assert_allclose(losses, GOLDEN_LOSSES, rtol=1e-5)
  np.testing.assert_allclose(float(metrics['grad_norm'][0]), GOLDEN_GRAD_NORM, rtol=1e-4)
  assert int(state.step) == 3
  assert int(metrics['tokens'][0]) == int(make_batch(seed=2).tokens.text_ids.sum())


@pytest.mark.parametrize('shape, preset', [
    ((4, 2), 'tp'), ((4, 2), 'fsdp_tp'), ((2, 2, 2), 'fsdp_tp'),  # data, model, replica
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (((8, 1), 'dp'), ((8, 1), 'tp'), ((2, 4), 'tp'), ((8, 1), 'fsdp')))])
def test_the_same_losses_on_every_mesh(alone, shape, preset):
  losses, _, _ = one_step(conftest.sub_mesh(*shape), preset, steps=3)
  np.testing.assert_allclose(losses, alone[0], rtol=1e-5)


@pytest.mark.medium
def test_microbatches_give_the_gradient_of_the_whole_batch():
  config = dataclasses.replace(CONFIG, dropout=0.0, attention_dropout=0.0)
  mesh = conftest.sub_mesh(2, 1)
  whole_losses, whole, whole_metrics = one_step(mesh, config=config)
  losses, micro, metrics = one_step(mesh, config=config, accumulation=4)
  np.testing.assert_allclose(losses, whole_losses, rtol=1e-6)
  np.testing.assert_allclose(metrics['grad_norm'][0], whole_metrics['grad_norm'][0], rtol=1e-5)
  for name in ('mlm_loss', 'mlm_accuracy', 'nsp_loss', 'tokens'):
    np.testing.assert_allclose(metrics[name][0], whole_metrics[name][0], rtol=1e-6)
  moment = lambda state: state.opt_state[1].mu['params']['bert']['embeddings']['token']
  np.testing.assert_allclose(moment(micro), moment(whole), atol=1e-8)


def test_parameters_and_moments_follow_the_sharding_rules():
  mesh = conftest.sub_mesh(4, 2)
  _, state, _ = one_step(mesh, 'fsdp_tp')
  for tree in (state.params, state.opt_state[1].mu, state.opt_state[1].nu):
    bert = tree['params']['bert']
    shards = lambda x: x.sharding.shard_shape(x.shape)
    assert shards(bert['embeddings']['token']) == (30_592 // 2, 32 // 4)
    assert shards(bert['layers']['attention']['qkv_kernel']) == (2, 32 // 4, 3 * 32 // 2)
    assert shards(bert['layers']['feed_forward']['down']['kernel']) == (2, 64 // 2, 32 // 4)
    assert shards(bert['layers']['feed_forward_norm']['scale']) == (2, 32)


def test_logits_stay_split_over_the_vocabulary():
  """Reads the compiled program: with_logical_constraint does nothing without rules in context."""
  mesh = conftest.sub_mesh(2, 4)
  task = make_task()
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(warmup_steps=0), 10)
  _, abstract = state_lib.make_init(task, optimizer, mesh, 'tp')
  step = state_lib.make_train_step(task, optimizer, mesh, 'tp', abstract, seed=0, accumulation=1)
  rows = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh_lib.batch_sharding(mesh)),
      make_batch())
  text = step.lower(abstract, rows).compile().as_text()
  # A device has 4 rows of 5 predictions and 30,592 / 4 entries, never all rows or entries.
  assert 'f32[20,7648]' in text
  assert 'f32[20,30592]' not in text and 'f32[40,30592]' not in text


@pytest.mark.parametrize('name', optimizer_lib.NAMES)
def test_the_moments_of_every_optimizer_are_sharded_like_their_parameters(name):
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(name=name), 100_000)
  _, abstract = state_lib.make_init(make_task(), optimizer, conftest.sub_mesh(4, 2), 'fsdp_tp')
  keystr, leaves = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
  params, compared = leaves(abstract.params), 0
  for path, x in leaves(abstract.opt_state):
    for of_param, y in params:
      if keystr(path).endswith(keystr(of_param)) and x.shape == y.shape:
        assert x.sharding.spec == y.sharding.spec, keystr(path)
        compared += 1
  assert compared >= len(params)


def test_an_unknown_preset_is_refused():
  with pytest.raises(UserError, match="sharding='zero'.*dp, fsdp, tp, fsdp_tp"):
    sharding.rules('zero')


@pytest.mark.medium
def test_evaluation_has_no_dropout_and_fixed_masks():
  mesh = conftest.sub_mesh(1, 1)
  task = make_task()
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(warmup_steps=0), 10)
  init, _ = state_lib.make_init(task, optimizer, mesh, 'tp')
  state = init(state_lib.root_key(0))
  step = state_lib.make_eval_step(task, mesh, 'tp')
  batch = mesh_lib.put_batch(make_batch(), mesh)
  one, two = step(state, batch), step(state, batch)
  jax.tree.map(np.testing.assert_array_equal, one, two)
  mask = lambda step: np.asarray(task.mask(jax.random.fold_in(state_lib.root_key(0), step),
                                           batch).positions)
  assert (mask(0) != mask(1)).any()  # training masks are new in each step
  still = make_task(dataclasses.replace(CONFIG, dropout=0.0, attention_dropout=0.0))
  expected = jax.jit(still.measure)(state.params, {}, batch)
  np.testing.assert_allclose(one['mlm_loss'][0], expected['mlm_loss'][0], rtol=1e-5)
  # In microbatches, so that it needs no more memory than a training step.
  parts = state_lib.make_eval_step(task, mesh, 'tp', accumulation=2)(state, batch)
  assert parts.keys() == one.keys()
  for name, (total, count) in parts.items():
    np.testing.assert_allclose(total, one[name][0], rtol=1e-5)
    assert name == 'tokens' or count == one[name][1]  # of tokens only the total counts


@pytest.mark.medium
@pytest.mark.parametrize('shape, accumulation', [((1, 1), 1), ((4, 2), 2)])
def test_a_step_that_is_not_finite_changes_nothing(shape, accumulation):
  mesh, task = conftest.sub_mesh(*shape), make_task()
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 10)
  init, abstract = state_lib.make_init(task, optimizer, mesh, 'tp')
  step = state_lib.make_train_step(task, optimizer, mesh, 'tp', abstract, seed=7,
                                   accumulation=accumulation)

  def after(spoiled):
    state, skipped = init(state_lib.root_key(7)), []
    for i, is_spoiled in enumerate(spoiled):
      batch = make_batch(seed=i)
      if is_spoiled:
        batch.pair_weights[3, 0] = np.nan
      state, metrics = step(state, mesh_lib.put_batch(batch, mesh))
      skipped.append(float(metrics['skipped'][0]))
    return jax.device_get(state), skipped

  (one, _), (two, skipped) = after([False]), after([False, True])
  assert skipped == [0, 1] and two.step == 2
  *moments, schedule = two.opt_state
  jax.tree.map(np.testing.assert_array_equal, (one.params, one.opt_state[:-1]),
               (two.params, tuple(moments)))
  assert schedule.count == 2  # the schedule moves to the next step
  three, skipped = after([False, True, False])
  assert skipped == [0, 1, 0]
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(three))
  assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (two.params, three.params))))
