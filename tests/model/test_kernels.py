"""The kernels say what the plain path says, and are chosen where they can."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.model import kernels
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Batch
from bert_jax.model.encoder import Bert
from bert_jax.parallel import sharding
from tests import conftest

CONFIG = BertConfig(vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64,
                    max_positions=128, attention_dropout=0.0, initializer_range=0.3)


def packed_rows() -> Batch:
  """Four rows of 128: one pair, three, one and padding, padding after two."""
  sizes = [[128], [40, 50, 38], [70], [30, 60]]
  pair_index, positions = np.zeros((2, 4, 128), np.int32)
  for row, pairs in enumerate(sizes):
    start = 0
    for i, size in enumerate(pairs, 1):
      pair_index[row, start:start + size] = i
      positions[row, start:start + size] = np.arange(size)
      start += size
  ids = np.random.default_rng(0).integers(0, 50, (4, 128)).astype(np.int32)
  return Batch(ids, np.zeros_like(ids), positions, pair_index)


@pytest.mark.parametrize('shape', [None, (2, 2)])
def test_splash_is_the_plain_path_to_rounding(shape):
  batch = packed_rows()
  real = jnp.asarray(batch.pair_index > 0)
  params = nn.unbox(Bert(CONFIG).init(jax.random.key(0), batch, np.zeros((4, 1), np.int32)))

  def loss(config):
    def of(params, batch):
      hidden = Bert(config).apply(params, batch, method='encode')
      return jnp.sum(jnp.square(hidden) * real[..., None] * jnp.cos(jnp.arange(32))), hidden
    return jax.value_and_grad(of, has_aux=True)

  plain, fast = loss(CONFIG), loss(dataclasses.replace(CONFIG, attention='splash'))
  if shape:
    plain, fast = (sharding.with_mesh(f, conftest.sub_mesh(*shape), 'tp') for f in (plain, fast))
  (_, expected), expected_grads = plain(params, batch)
  (_, found), grads = fast(params, batch)
  np.testing.assert_allclose(found[real], expected[real], atol=2e-5)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected_grads))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * scale), grads,
               expected_grads)


@pytest.mark.parametrize('attention, length, platform, fields, expected', [
    ('auto', 512, 'tpu', {}, ('splash', 'it holds no weights')),
    ('auto', 128, 'tpu', {}, ('xla', 'splash gains nothing below 512')),
    ('auto', 512, 'cpu', {}, ('xla', 'there is no kernel for cpu')),
    ('auto', 512, 'tpu', {'attention_dropout': 0.1},
     ('xla', 'attention_dropout=0.1 (0 allows splash)')),
    ('auto', 520, 'tpu', {}, ('xla', '520 is no multiple of 128')),
    ('auto', 1024, 'gpu', {'dtype': 'bfloat16'}, ('cudnn', 'it holds no weights')),
    ('auto', 1024, 'gpu', {}, ('xla', 'dtype=float32 (bfloat16 allows cudnn)')),
    ('xla', 1024, 'tpu', {}, ('xla', 'asked for')),
    ('splash', 128, 'tpu', {}, ('splash', 'asked for')),
])
def test_choice(attention, length, platform, fields, expected):
  config = dataclasses.replace(CONFIG, attention=attention, **fields)
  assert kernels.chosen(config, length, platform) == expected


def test_described():
  assert kernels.describe(CONFIG, (128, 512), 'tpu') == (
      'xla for rows of 128: splash gains nothing below 512; splash for rows of 512: it holds no '
      'weights')


def test_a_kernel_that_cannot_be_had():
  config = dataclasses.replace(CONFIG, attention='splash', attention_dropout=0.1)
  with pytest.raises(UserError, match=r'attention=splash cannot be had: attention_dropout=0.1'):
    kernels.chosen(config, 512, 'tpu')
  with pytest.raises(UserError, match='cudnn is not for tpu'):
    kernels.chosen(dataclasses.replace(CONFIG, attention='cudnn'), 512, 'tpu')
  with pytest.raises(UserError, match="model.attention='flash' is unknown"):
    dataclasses.replace(CONFIG, attention='flash')
