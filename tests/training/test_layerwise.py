"""Layer-wise rates and frozen layers, by hand and through the optimizer."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.errors import UserError
from bert_jax.interop import layout
from bert_jax.model import architectures
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import transforms

SIZES = dict(vocab_size=100, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=64,
             max_positions=32)


def tree(value=1.0):
  return {'params': {'bert': {'embeddings': {'token': jnp.full((5, 2), value)},
                              'projection': {'kernel': jnp.full((2, 2), value)},
                              'layers': {'attention': {'kernel': jnp.full((3, 2, 2), value)},
                                         'norm': {'scale': jnp.full((3, 2), value)}},
                              'pooler': {'kernel': jnp.full((2, 2), value)}},
                     'projection': {'kernel': jnp.full((2, 2), value)},  # late interaction
                     'classifier': {'kernel': jnp.full((2, 2), value)}}}


def apply(transformation, updates):
  return transformation.update(updates, transformation.init(updates), updates)[0]['params']


def test_the_rate_falls_towards_the_embeddings():
  scaled = apply(transforms.scale_by_depth(0.5), tree())
  np.testing.assert_allclose(scaled['bert']['layers']['attention']['kernel'][:, 0, 0],
                             [0.0625, 0.125, 0.25])  # depths 1, 2, 3; the head has 5
  np.testing.assert_allclose(scaled['bert']['layers']['norm']['scale'][:, 1], [0.0625, 0.125, 0.25])
  assert (scaled['bert']['embeddings']['token'] == 0.03125).all()
  assert (scaled['bert']['projection']['kernel'] == 0.03125).all()
  assert (scaled['bert']['pooler']['kernel'] == 1).all()
  for head in ('classifier', 'projection'):
    assert (scaled[head]['kernel'] == 1).all()


@pytest.mark.parametrize('layers, expected', [(0, [1, 1, 1]), (2, [0, 0, 1]), (3, [0, 0, 0])])
def test_frozen_layers_and_embeddings_get_no_update(layers, expected):
  updates = apply(transforms.freeze(layers), tree())
  assert updates['bert']['layers']['attention']['kernel'][:, 0, 0].tolist() == expected
  assert (updates['bert']['embeddings']['token'] == 0).all()
  assert (updates['bert']['projection']['kernel'] == 0).all()
  for head in ('classifier', 'projection'):
    assert (updates[head]['kernel'] == 1).all()


@pytest.mark.parametrize('name', ['mpnet', 'electra', 'deberta-v2'])
def test_freezing_every_layer_freezes_everything_below_the_heads(name):
  """Also the tables of relative positions."""
  config = architectures.ALL[name].config(**SIZES)
  params = jax.tree.map(lambda x: jnp.ones(x.shape), nn.unbox(
      layout.abstract_params(config, {'mlm', 'pooler'})))
  updates = apply(transforms.freeze(SIZES['num_layers']), params)
  moving = {jax.tree_util.keystr(path) for path, x in
            jax.tree_util.tree_leaves_with_path(updates['bert']) if x.any()}
  paths = [jax.tree_util.keystr(path) for path, _ in
           jax.tree_util.tree_leaves_with_path(params['params']['bert'])]
  assert moving == {path for path in paths if 'pooler' in path}


def test_frozen_parameters_do_not_move_and_do_not_count_in_the_norm():
  config = optimizer_lib.OptimizerConfig(learning_rate=0.1, warmup_steps=0, frozen_layers=2,
                                         weight_decay=0.5, clip_norm=1.0)
  optimizer = optimizer_lib.make_optimizer(config, 10)
  params, grads = tree(2.0), tree(1.0)
  grads['params']['bert']['embeddings']['token'] += 1e6
  state = optimizer.init(params)
  updates, state = optimizer.update(grads, state, params)
  new = optax.apply_updates(params, updates)['params']
  assert (new['bert']['embeddings']['token'] == 2).all()
  assert (new['bert']['projection']['kernel'] == 2).all()
  assert (new['bert']['layers']['attention']['kernel'][:2] == 2).all()
  assert (new['bert']['layers']['attention']['kernel'][2] < 2).all()
  # The clipping norm counts only the trained entries: 2 * 2 + 2 + 3 * 4, each with gradient 1.
  (_, _, adam, *_) = state
  expected = 0.1 / np.sqrt(4 + 2 + 12)
  np.testing.assert_allclose(adam.mu['params']['classifier']['kernel'], expected, rtol=1e-5)


def test_warmup_ratio_sets_the_warmup_and_excludes_warmup_steps():
  config = optimizer_lib.OptimizerConfig(learning_rate=1.0, warmup_steps=0, warmup_ratio=0.1)
  rate = optimizer_lib.learning_rate(config, 100)
  assert [float(rate(t)) for t in (0, 5, 10, 55, 100)] == pytest.approx([0, 0.5, 1, 0.5, 0])
  with pytest.raises(UserError, match='give one of them'):
    optimizer_lib.OptimizerConfig(warmup_steps=3, warmup_ratio=0.1)
  with pytest.raises(UserError, match=r'layer_decay=1.5 must lie in \[0, 1\]'):
    optimizer_lib.OptimizerConfig(layer_decay=1.5)
