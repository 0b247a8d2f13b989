"""Short convolutions: by hand, at the borders of texts, with fresh taps, and in files."""

import dataclasses

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.tokenizers import older
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, layout, native
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model.attention import Attend
from bert_jax.model.modern import Modern
from bert_jax.model.short_convolution import ShortConvolution
from tests.model import test_modern

PLAIN = dataclasses.replace(test_modern.CONFIG, initializer_range=0.3)
CONFIG = dataclasses.replace(PLAIN, conv_reach=2)


def test_a_convolution_by_hand_stays_within_its_text():
  x = jnp.asarray([[[1.0], [2.0], [3.0], [10.0], [20.0], [100.0]]])
  texts = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
  taps = jnp.asarray([[0.1], [1.0], [10.0]])  # for the token before, itself, the token after
  mask = Attend().mask(Tokens(None, None, None, texts))
  y = ShortConvolution(1).apply({'params': {'taps': taps}}, x, mask)
  expected = [1 + 1 + 20, 2 + 0.1 + 2 + 30, 3 + 0.2 + 3, 10 + 10 + 200, 20 + 1 + 20]
  np.testing.assert_allclose(y[0, :5, 0], expected, rtol=1e-6)


def with_taps(variables, make):
  """The variables of an encoder with the taps that `make` returns for their shape."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: make(x.shape) if path[-1].key == 'taps' else x, variables)


def encode(variables, batch):
  return Modern(CONFIG).apply(variables, batch, method='encode')


def fresh():
  return nn.unbox(jax.jit(Modern(CONFIG).init)(jax.random.key(0), test_modern.packed(),
                                               np.zeros((2, 1), np.int32)))


def test_a_fresh_encoder_equals_a_modernbert_without_convolutions():
  variables, batch = fresh(), test_modern.packed()
  taps = [x for path, x in jax.tree_util.tree_leaves_with_path(variables)
          if path[-1].key == 'taps']
  # Two in the first layer, two in each of the three of a group.
  assert [x.shape for x in taps] == [(5, 16)] * 2 + [(1, 5, 16)] * 6
  plain = jax.tree.map(jnp.asarray, variables)
  for layer in (plain['params']['first'], *plain['params']['layers'].values()):
    del layer['attention_convolution'], layer['feed_forward_convolution']
  np.testing.assert_array_equal(encode(variables, batch),
                                Modern(PLAIN).apply(plain, batch, method='encode'))


def test_a_text_does_not_see_its_neighbors_in_the_row():
  rng, batch = np.random.default_rng(0), test_modern.packed()
  variables = with_taps(fresh(), lambda shape: rng.normal(0, 0.5, shape).astype(np.float32))
  other = batch.ids.copy()
  other[:, :22] = (other[:, :22] + 7) % 50 + 5
  a, b = (encode(variables, batch._replace(ids=ids)) for ids in (batch.ids, other))
  assert np.array_equal(a[:, 22:33], b[:, 22:33]) and not np.array_equal(a[:, :22], b[:, :22])
  unchanged = encode(with_taps(variables, np.zeros), batch)
  assert np.abs(a - unchanged).max() > 0.01


def test_native_files_keep_the_taps_and_an_export_is_refused(tmp_path):
  abstract = nn.unbox(layout.abstract_params(CONFIG, {'mlm', 'pooler'}, 0, ''))
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), abstract)
  tensors = layout.to_tensors(params, CONFIG)
  assert tensors['encoder.layer.3.mlp_convolution.weight'].shape == (5, 16)
  params = layout.from_tensors(tensors, CONFIG, {'mlm', 'pooler'}, '')
  jax.tree.map(np.testing.assert_array_equal, layout.to_tensors(params, CONFIG), tensors)
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *map(chr, range(97, 97 + 55))]
  model = Pretrained(CONFIG, params, older.wordpiece(words))
  native.save(model, epath.Path(tmp_path / 'ours'))
  again = native.load(epath.Path(tmp_path / 'ours'))
  assert again.config.conv_reach == 2
  jax.tree.map(np.testing.assert_array_equal, again.params, params)
  with pytest.raises(UserError, match='no short convolutions .model.conv_reach=2.: convert it'):
    huggingface.save(model, epath.Path(tmp_path / 'theirs'))
  assert not (tmp_path / 'theirs').exists()
