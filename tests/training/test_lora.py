"""Low-rank factors: gradients by hand, the base at step 0, trained and frozen parameters."""

import functools

from flax import linen as nn
from flax import traverse_util
import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model import modern
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import losses
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.tasks.sequence_classification import (
  BertForSequenceClassification,
  SequenceClassification,
)
from bert_jax.training import lora
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest
from tests.test_family import MEMBERS
from tests.training import test_state

flat = functools.partial(traverse_util.flatten_dict, sep='/')
CONFIG = lora.LoraConfig(rank=3, alpha=6.0, targets=('qkv', 'down'))
# all-MiniLM-L6-v2
MINI_LM = BertConfig(vocab_size=30_522, hidden_size=384, num_layers=6, num_heads=12,
                     intermediate_size=1536, max_positions=512)


def noisy(tree, key, scale=0.05):
  """The tree with normal noise in every array."""
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(key, len(leaves))
  return structure.unflatten([x + scale * jax.random.normal(k, x.shape)
                              for k, x in zip(keys, leaves)])


@pytest.fixture(scope='module')
def small():
  """(task, its whole parameters, its LoRA task, the trained part with B not zero, batch)."""
  task = test_state.make_task()
  key = state_lib.root_key(0)
  params = jax.jit(task.init)(key)
  task_with = lora.Lora(task, CONFIG, lora.base_of(params))
  trained = nn.unbox(jax.jit(task_with.init)(key))
  return task, nn.unbox(params), task_with, noisy(trained, key), test_state.make_batch(4)


def total(task, params, frozen, batch):
  metrics = task.loss(params, frozen, batch, None)
  return losses.total_loss(metrics, task.loss_weights)


@pytest.mark.medium
def test_the_gradients_of_the_factors_by_hand(small):
  task, params, task_with, trained, batch = small
  frozen = nn.unbox(task_with.frozen)
  ours = flat(jax.jit(jax.grad(functools.partial(total, task_with)))(trained, frozen, batch))
  merged = lora.merge(trained, frozen['base'], CONFIG)
  of_model = flat(jax.jit(jax.grad(functools.partial(total, task)))(merged, {}, batch))
  factors, kernels = flat(trained), 0
  for path, x in ours.items():
    if not path.endswith('lora_a'):
      continue
    kernel = path.removesuffix('/lora_a')
    a, b, dw = (np.asarray(tree[name], np.float64) for tree, name in (
        (factors, path), (factors, kernel + '/lora_b'), (of_model, kernel)))
    for layer in range(2):  # W + 2 A B, in each layer: dA = 2 dW B', dB = 2 A' dW
      da, db = 2 * dw[layer] @ b[layer].T, 2 * a[layer].T @ dw[layer]
      np.testing.assert_allclose(x[layer], da, atol=2e-6 * np.abs(da).max())
      np.testing.assert_allclose(ours[kernel + '/lora_b'][layer], db, atol=2e-6 * np.abs(db).max())
    np.testing.assert_allclose(
        flat(merged)[kernel], flat(params)[kernel] + 2 * np.einsum('nir,nro->nio', a, b), atol=1e-6)
    kernels += 1
  assert kernels == 2
  heads = of_model.keys() & ours.keys()
  assert heads
  for path in heads:  # they have the gradients of the whole model
    np.testing.assert_array_equal(ours[path], of_model[path])


def test_fresh_factors_do_not_change_the_base(small):
  task, params, task_with, _, batch = small
  frozen = nn.unbox(task_with.frozen)
  fresh = nn.unbox(jax.jit(task_with.init)(state_lib.root_key(0)))
  jax.tree.map(np.testing.assert_array_equal, jax.jit(task_with.measure)(fresh, frozen, batch),
               jax.jit(task.measure)(params, {}, batch))
  a = np.asarray(flat(fresh)['params/bert/layers/attention/qkv_kernel/lora_a'])  # [2, 32, 3]
  assert a.shape == (2, 32, 3) and len(np.unique(a)) == a.size
  np.testing.assert_allclose(a.std(), 32**-0.5, rtol=0.15)


def test_steps_train_the_factors_and_not_the_base(small):
  _, _, task_with, _, batch = small
  mesh, preset = conftest.sub_mesh(2, 2), 'fsdp_tp'
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)
  init, abstract = state_lib.make_init(task_with, optimizer, mesh, preset)
  step = state_lib.make_train_step(task_with, optimizer, mesh, preset, abstract, seed=0,
                                   accumulation=1)
  state = init(state_lib.root_key(0))
  before = jax.device_get(nn.unbox(task_with.frozen))
  state = state._replace(frozen=state_lib.shard_like(before, abstract.frozen))
  start = jax.device_get(state.params)
  for _ in range(2):
    state, _ = step(state, mesh_lib.put_batch(batch, mesh))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), before)
  changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), jax.device_get(state.params), start)
  assert all(flat(changed).values())
  # A keeps the axis of its rows, B the axis of its columns: [N, D, r] and [N, r, H * 3 * K].
  factors = flat(abstract.params)
  assert factors['params/bert/layers/attention/qkv_kernel/lora_a'].sharding.spec[1] == 'data'
  assert factors['params/bert/layers/attention/qkv_kernel/lora_b'].sharding.spec[2] == 'model'
  moments = {x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim}
  assert moments == {x.shape for x in jax.tree.leaves(state.params)}


def bytes_of(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_lora_needs_a_small_part_of_the_moments_of_mini_lm():
  task = SequenceClassification(BertForSequenceClassification(MINI_LM, 2))
  every = ('attention', 'feed_forward')
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(), 100_000)

  def moments(task):
    return bytes_of(jax.eval_shape(lambda: optimizer.init(task.init(jax.random.key(0)))))

  full = moments(task)
  # With the 70 padding rows of the token table; two counts of 4 bytes.
  assert full == 2 * 4 * (22_713_216 + 70 * 384 + 2 * 384 + 2) + 8
  heads = 384 * 384 + 384 + 2 * 384 + 2
  for targets, per_layer in ((('qkv', 'out'), 384 + 3 * 384 + 384 + 384),
                             (every, 6 * 384 + 2 * (384 + 1536))):
    part = moments(lora.Lora(task, lora.LoraConfig(rank=8, targets=targets)))
    assert part == 2 * 4 * (6 * 8 * per_layer + heads) + 8
    assert part < 0.03 * full


KERNELS = {  # (kernels of these targets, rows and columns of all their layers)
    **dict.fromkeys(('roberta', 'mpnet', 'electra', 'deberta-v2'), (
        {'layers/attention/qkv_kernel', 'layers/feed_forward/up/kernel'},
        2 * (32 + 96 + 32 + 64))),
    'albert': ({'layers/attention/qkv_kernel', 'layers/feed_forward/up/kernel'},
               2 * (32 + 96 + 32 + 64)),  # two groups for four layers
    'distilbert': ({'layers/attention/qkv_kernel', 'layers/feed_forward/up/kernel'},
                   32 + 96 + 32 + 64),
    'modernbert': ({f'{layers}/{kernel}' for layers in ('first', *(
        f'layers/{name}' for name in modern.group_names(MEMBERS['modernbert'][0])))
        for kernel in ('attention/qkv_kernel', 'feed_forward/up/kernel')},
                   4 * (32 + 96 + 32 + 64))}


@pytest.mark.parametrize('member', MEMBERS)
def test_every_architecture_has_factors(member):
  task = SequenceClassification(BertForSequenceClassification(MEMBERS[member][0], 2))
  task_with = lora.Lora(task, lora.LoraConfig(rank=1, targets=('qkv', 'up')))
  whole = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  trained = nn.unbox(jax.eval_shape(task_with.init, jax.random.key(0)))
  factors = {path: x for path, x in flat(trained).items() if 'lora' in path}
  kernels, rows_and_columns = KERNELS[member]
  assert {path.rpartition('/')[0] for path in factors} == {f'params/bert/{x}' for x in kernels}
  assert sum(x.size for x in factors.values()) == rows_and_columns
  merged = jax.eval_shape(lambda a, b: lora.merge(a, b, task_with.config), trained,
                          nn.unbox(task_with.frozen)['base'])
  assert merged == whole  # paths, shapes and types


@pytest.mark.parametrize('fields, line', [
    ({'rank': -1}, 'lora.rank=-1 must not be negative'),
    ({'rank': 4, 'alpha': 0.0}, 'lora.alpha=0.0 must be positive'),
    ({'rank': 4, 'targets': ()}, 'lora.targets is empty, and lora.rank=4: name the kernels'),
])
def test_wrong_fields_are_refused(fields, line):
  with pytest.raises(UserError, match=line):
    lora.LoraConfig(**fields)


def test_a_target_that_matches_nothing_is_refused_with_the_existing_targets():
  task = lora.Lora(test_state.make_task(), lora.LoraConfig(rank=2, targets=('qkv', 'query')))
  line = ("lora.targets: 'query' matches no kernel of this model, it has attention, down, "
          'feed_forward, out, qkv, up')
  with pytest.raises(UserError, match=line):
    jax.eval_shape(task.init, jax.random.key(0))
