"""The kernels compute the same as the plain path; a model uses them where they can run."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model import architectures, attention, attention_kernels, fused_attention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.modern import ModernConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding, topology
from bert_jax.runtime import platforms
from tests import conftest

CONFIG = BertConfig(vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64,
                    max_positions=128, attention_dropout=0.0, initializer_range=0.3)
SAVES = 'it does not store the attention weights'  # the reason for a kernel
SHORT = 'splash is only faster in rows of 512 tokens or more'


def packed_rows() -> Tokens:
  """Four rows of 128: one pair, three, one and padding, padding after two."""
  sizes = [[128], [40, 50, 38], [70], [30, 60]]
  text_ids, positions = np.zeros((2, 4, 128), np.int32)
  for row, pairs in enumerate(sizes):
    start = 0
    for i, size in enumerate(pairs, 1):
      text_ids[row, start:start + size] = i
      positions[row, start:start + size] = np.arange(size)
      start += size
  ids = np.random.default_rng(0).integers(0, 50, (4, 128)).astype(np.int32)
  return Tokens(ids, np.zeros_like(ids), positions, text_ids)


def initial(config, batch):
  init = jax.jit(Encoder(config).init)
  return nn.unbox(init(jax.random.key(0), batch, np.zeros((4, 1), np.int32)))


@pytest.mark.medium
@pytest.mark.parametrize('shape', [None, (2, 2)])
def test_splash_equals_the_plain_path_up_to_rounding(shape):
  batch = packed_rows()
  real = jnp.asarray(batch.text_ids > 0)
  params = initial(CONFIG, batch)

  def loss(config):
    def of(params, batch):
      hidden = Encoder(config).apply(params, batch, method='encode')
      return jnp.sum(jnp.square(hidden) * real[..., None] * jnp.cos(jnp.arange(32))), hidden
    return jax.value_and_grad(of, has_aux=True)

  plain, fast = (
      sharding.with_mesh(f, conftest.sub_mesh(*shape), 'tp') if shape else jax.jit(f)
      for f in (loss(CONFIG), loss(dataclasses.replace(CONFIG, attention='splash'))))
  (_, expected), expected_grads = plain(params, batch)
  (_, actual), grads = fast(params, batch)
  np.testing.assert_allclose(actual[real], expected[real], atol=2e-5)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected_grads))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * scale), grads,
               expected_grads)


@pytest.mark.parametrize('head_size, path', [(64, 'triton'), (96, 'cudnn')])
def test_local_layers_prefer_a_kernel_that_computes_them(head_size, path):
  config = ModernConfig(hidden_size=4 * head_size, num_heads=4, dtype='bfloat16')
  assert attention_kernels.choose_path(config, 1024, 'gpu') == (path, SAVES)


@pytest.mark.parametrize('name, length, platform, fields, expected', [
    ('auto', 128, 'tpu', {'hidden_size': 128}, ('fused', SAVES)),
    ('auto', 512, 'tpu', {'hidden_size': 256, 'attention_dropout': 0.1},
     ('fused', SAVES)),
    ('auto', 128, 'tpu', {'hidden_size': 64}, ('xla', SHORT)),
    ('auto', 512, 'tpu', {'hidden_size': 64}, ('splash', SAVES)),
    ('auto', 1024, 'tpu', {'hidden_size': 128}, ('splash', SAVES)),
    ('auto', 512, 'cpu', {}, ('xla', 'no kernel supports cpu')),
    ('auto', 1024, 'tpu', {'attention_dropout': 0.1},
     ('xla', 'attention_dropout=0.1 (0 allows splash)')),
    ('auto', 520, 'tpu', {}, ('xla', 'rows of 520 tokens are not a multiple of 128')),
    ('auto', 1024, 'gpu', {'dtype': 'bfloat16'}, ('cudnn', SAVES)),
    ('auto', 1024, 'gpu', {}, ('xla', 'heads are 8 wide, not 32 or 64 or 128')),
    ('auto', 128, 'gpu', {'hidden_size': 128, 'attention_dropout': 0.1},
     ('triton', SAVES)),
    ('auto', 512, 'gpu', {'hidden_size': 128, 'dtype': 'bfloat16', 'attention_dropout': 0.1},
     ('triton', SAVES)),
    ('auto', 512, 'cuda', {'hidden_size': 128, 'dtype': 'bfloat16'},
     ('cudnn', SAVES)),
    ('auto', 8, 'gpu', {'hidden_size': 128},
     ('xla', 'rows of 8 tokens are not within [16, 8192]')),
    ('xla', 1024, 'tpu', {}, ('xla', 'asked for')),
    ('splash', 128, 'tpu', {}, ('splash', 'asked for')),
])
def test_the_path_follows_from_config_length_and_platform(name, length, platform, fields, expected):
  config = dataclasses.replace(CONFIG, attention=name, **fields)
  assert attention_kernels.choose_path(config, length, platform) == expected


@pytest.mark.parametrize('length, heads, capability, path', [
    (1024, 8, 9.0, 'cudnn'), (1023, 8, 9.0, 'xla'), (1024, 26, 9.0, 'xla'),
    (1024, 160, 9.0, 'cudnn'), (1024, 160, 8.0, 'xla'), (1024, 8, 7.5, 'xla')])
def test_cudnn_is_not_for_sizes_that_jax_refuses(monkeypatch, length, heads, capability, path):
  monkeypatch.setattr(platforms, 'compute_capability', lambda: capability)
  config = dataclasses.replace(CONFIG, dtype='bfloat16', num_heads=2, hidden_size=2 * heads)
  assert attention_kernels.choose_path(config, length, 'gpu')[0] == path


def test_describe_names_the_path_and_the_reason_for_each_length():
  assert attention_kernels.describe(CONFIG, (128, 512), 'tpu') == (
      f'xla for rows of 128: {SHORT}; splash for rows of 512: {SAVES}')


def test_unavailable_and_unknown_kernels_are_refused():
  config = dataclasses.replace(CONFIG, attention='splash', attention_dropout=0.1)
  with pytest.raises(UserError, match=r'attention=splash is not available: attention_dropout=0.1'):
    attention_kernels.choose_path(config, 512, 'tpu')
  config = dataclasses.replace(CONFIG, attention='fused')
  with pytest.raises(UserError, match='fused is not available: rows of 640 tokens are longer than'):
    attention_kernels.choose_path(config, 640, 'tpu')
  with pytest.raises(UserError, match='3 heads of 20 do not fill blocks of 128'):
    config = dataclasses.replace(config, hidden_size=60, num_heads=3)
    attention_kernels.choose_path(config, 128, 'tpu')
  with pytest.raises(UserError, match='cudnn is not for tpu'):
    attention_kernels.choose_path(dataclasses.replace(CONFIG, attention='cudnn'), 512, 'tpu')
  with pytest.raises(UserError, match="model.attention='flash' is unknown"):
    architectures.make_config({'attention': 'flash'})
  with pytest.raises(UserError, match="model.attention='flash' is unknown"):
    attention_kernels.choose_path(dataclasses.replace(CONFIG, attention='flash'), 512)


def test_heads_that_the_model_axis_does_not_divide_take_xla():
  """The generator of ELECTRA has fewer heads than the model that the mesh is checked for."""
  mesh = jax.make_mesh((1, 1, 4), ('replica', 'data', 'model'))
  config = dataclasses.replace(CONFIG, hidden_size=192, num_heads=6, dtype='bfloat16')
  with sharding.in_context(mesh, 'tp'):
    for platform in ('gpu', 'tpu'):
      assert attention_kernels.choose_path(config, 512, platform) == (
          'xla', '6 heads do not divide among 4 devices (mesh.model)')


@pytest.mark.parametrize('name', ['fused', 'splash', 'cudnn', 'triton'])
def test_init_with_short_rows_works_with_every_named_kernel(name):
  tokens = jnp.zeros((1, 8), jnp.int32)
  shapes = [jax.eval_shape(Encoder(dataclasses.replace(CONFIG, attention=path)).init,
                           jax.random.key(0), Tokens(*[tokens] * 4), tokens[:, :1])
            for path in ('xla', name)]
  assert nn.unbox(shapes[0]) == nn.unbox(shapes[1])


WIDE = dataclasses.replace(CONFIG, hidden_size=256, num_heads=4, attention_dropout=0.1)
RATE = 0.1


def fused_inputs(length=128):
  """qkv [B, L, 3, H, K] of 4 rows and heads, their text ids, and a key."""
  text_ids = jnp.repeat(jnp.asarray(packed_rows().text_ids), length // 128, axis=1)
  return jax.random.normal(jax.random.key(1), (4, length, 3, 4, 64)), text_ids, jax.random.key(7)


@functools.partial(jax.jit, static_argnames=('length', 'rate'))
def kept_weights(key, row, head, length, rate=RATE):
  """The weights that dropout keeps in a row: [L, L] bool."""
  return jnp.concatenate([
      fused_attention.keep_mask(key, row, head, np.int32(part), length, rate)
      for part in range(length // 128)])


def fused_loss(qkv, text_ids, random, rate=RATE):
  flat = jnp.swapaxes(qkv, 2, 3).reshape(*qkv.shape[:2], -1)
  out = fused_attention.attend(flat, text_ids, 64, rate, random).reshape(*qkv.shape[:2], 4, 64)
  return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out


@pytest.mark.parametrize('length, rate', [(128, 0.0), (128, RATE), (384, RATE)])
def test_fused_equals_the_plain_path_with_the_same_dropped_weights(length, rate):
  qkv, text_ids, random = fused_inputs(length)
  words = jax.random.key_data(random)
  keep = jnp.stack([jnp.stack([kept_weights(words, np.uint32(b), np.uint32(h), length, rate)
                               for h in range(4)]) for b in range(4)])

  def plain(qkv):
    out, _ = attention.dot_product_attention(
        *jnp.unstack(qkv, axis=2), attention.attention_bias(Tokens(None, None, None, text_ids)),
        lambda weights: jnp.where(keep, weights / (1 - rate), 0))
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

  (_, expected), expected_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(qkv)
  (_, actual), grad = jax.jit(jax.value_and_grad(fused_loss, has_aux=True), static_argnums=3)(
      qkv, text_ids, random, rate)
  np.testing.assert_allclose(actual, expected, atol=1e-6)
  np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_fused_drops_at_its_rate_and_independently_for_each_row_and_head():
  key = jax.random.key_data(jax.random.key(3))
  keep = np.stack([kept_weights(key, np.uint32(b), np.uint32(h), 256)
                   for b in range(3) for h in range(3)])
  keep = keep.reshape(18, 128, 256)  # each block of queries separately
  assert abs(keep.mean() - 0.9) < 5 * np.sqrt(0.09 / keep.size)
  for axis in (1, 2):  # for each query and each key
    shares = keep.mean(axis)
    assert abs(shares.std() - np.sqrt(0.09 / keep.shape[axis])) < 5e-3
  same = np.array([[np.mean(a == b) for a in keep] for b in keep])
  np.testing.assert_allclose(same[~np.eye(18, dtype=bool)], 0.82, atol=5 * np.sqrt(.15 / 2**15))


def test_fused_drops_the_same_on_every_mesh():
  arguments = fused_inputs()
  loss = jax.value_and_grad(fused_loss, has_aux=True)
  (_, alone), grad = jax.jit(loss)(*arguments)
  for preset, shape in (('dp', (4, 1)), ('tp', (2, 2))):
    split = sharding.with_mesh(loss, conftest.sub_mesh(*shape), preset)
    (_, actual), actual_grad = split(*arguments)
    np.testing.assert_array_equal(actual, alone)
    np.testing.assert_array_equal(actual_grad, grad)


def test_a_model_with_fused_equals_the_plain_one_without_dropout_and_drops_with_it():
  batch = packed_rows()
  real = batch.text_ids > 0
  params = initial(WIDE, batch)
  plain, fused = (
      jax.jit(functools.partial(Encoder(dataclasses.replace(WIDE, attention=name)).apply,
                                method='encode'), static_argnames='deterministic')
      for name in ('xla', 'fused'))

  def encode(apply, seed=None):
    return apply(params, batch, deterministic=seed is None,
                 rngs=None if seed is None else {'dropout': jax.random.key(seed)})

  np.testing.assert_allclose(encode(fused)[real], encode(plain)[real], atol=2e-5)
  first, again, other = encode(fused, 1), encode(fused, 1), encode(fused, 2)
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - other).mean() > 0.1


@pytest.mark.parametrize('fields', [
    {}, {'remat': 'full', 'dtype': 'bfloat16'}, {'architecture': 'albert', 'groups': 2},
    {'architecture': 'modernbert', 'num_layers': 4, 'remat': 'dots', 'dtype': 'bfloat16'}])
def test_states_return_attention_weights_although_the_kernel_stores_none(fields):
  sizes = {'vocab_size': 50, 'hidden_size': 256, 'num_layers': 2, 'num_heads': 4,
           'intermediate_size': 64, 'max_positions': 128, 'attention': 'fused'}
  config = architectures.make_config(sizes | fields)
  encoder, batch = architectures.make_encoder(config), packed_rows()

  def weights(key):
    params = encoder.init(key, batch, jnp.zeros((4, 1), jnp.int32))
    return encoder.apply(params, batch, method='states').attention

  assert jax.eval_shape(weights, jax.random.key(0)).shape == (config.num_layers, 4, 4, 128, 128)


@pytest.mark.parametrize('length', [128, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', ['v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1'])
def test_fused_compiles_for_every_tpu(name, length):
  pytest.importorskip('libtpu')
  mesh = mesh_lib.make_mesh(devices=topology.get(name))
  place = mesh_lib.batch_sharding(mesh)
  qkv = jax.ShapeDtypeStruct((mesh.size, length, 3 * 256), jnp.bfloat16, sharding=place)
  pairs = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32, sharding=place)

  def gradient(qkv, text_ids):
    def total(qkv):
      out = fused_attention.attend(qkv, text_ids, 64, RATE, jax.random.key(0))
      return out.astype(jnp.float32).sum()
    return jax.grad(total)(qkv)

  text = sharding.with_mesh(gradient, mesh, 'dp').lower(qkv, pairs).compile().as_text()
  assert 'tpu_custom_call' in text and f'[1,{length},768]' in text  # each chip gets one row


def test_the_path_is_chosen_for_the_heads_of_one_chip():
  wide = dataclasses.replace(WIDE, attention='fused')
  for preset, shape, fits in (('tp', (1, 2), True), ('tp', (1, 4), False), ('dp', (1, 4), True)):
    with sharding.in_context(conftest.sub_mesh(*shape), preset):
      if fits:
        assert attention_kernels.choose_path(wide, 128) == ('fused', 'asked for')
      else:
        with pytest.raises(UserError, match='1 heads of 64 do not fill blocks of 128'):
          attention_kernels.choose_path(wide, 128)
