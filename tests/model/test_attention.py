import functools

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.tokens import Tokens
from bert_jax.model.attention import attention_bias, dot_product_attention
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import Encoder

# One head of width 3 over the words I / love / machine / learning, computed by hand.
Q = [[1, 0, .5], [.2, 1, .3], [.7, .5, .1], [0, .3, .9]]
K = [[.8, .2, .6], [.3, .9, .1], [.5, .4, .7], [.1, .1, 1]]
V = [[.1, .4, .3], [.9, .5, .2], [.6, .2, .8], [.5, .7, .4]]


def test_attention_by_hand():
  q, k, v = (jnp.array(x)[None, :, None] for x in (Q, K, V))  # [1, 4, 1, 3]
  weights = {}

  def keep(w):
    weights['w'] = w
    return w

  out, _ = dot_product_attention(q, k, v, None, keep)
  np.testing.assert_allclose(weights['w'][0, 0, 1], [.2308, .2993, .2546, .2153], atol=5e-5)
  np.testing.assert_allclose(out[0, 1, 0], [.5528, .4436, .4189], atol=5e-5)
  scores = np.array(Q) @ np.array(K).T / np.sqrt(3)
  np.testing.assert_allclose(scores[1], [.3118, .5716, .4099, .2425], atol=5e-5)


def test_bias_lets_a_token_see_its_own_pair_only():
  bias = attention_bias(Tokens(None, None, None, jnp.array([[1, 1, 2, 0]])))[0, 0]
  assert (bias == 0).tolist() == [[True, True, False, False], [True, True, False, False],
                                  [False, False, True, False], [False, False, False, False]]
  assert float(bias.min()) == -1e9


def test_hidden_tokens_attend_but_are_not_attended_to():
  hidden = jnp.array([[False, True, True, False]])
  bias = attention_bias(Tokens(None, None, None, jnp.array([[1, 1, 1, 2]]), hidden=hidden))[0, 0]
  assert (bias == 0).tolist() == [*[[True, False, False, False]] * 3, [False, False, False, True]]


def test_a_row_of_padding_gives_no_nan():
  q = jnp.ones((1, 4, 1, 2))
  padding = Tokens(None, None, None, jnp.zeros((1, 4), jnp.int32))
  out, _ = dot_product_attention(q, q, q, attention_bias(padding))
  np.testing.assert_allclose(out, 1.0, rtol=1e-6)


def _encode(ids, text_ids, positions=None):
  config = BertConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2,
                      intermediate_size=32, max_positions=16)
  model = Encoder(config)
  ids, text_ids = jnp.array(ids), jnp.array(text_ids)
  positions = jnp.arange(ids.shape[1])[None] if positions is None else jnp.array(positions)
  batch = Tokens(ids, jnp.zeros_like(ids), jnp.broadcast_to(positions, ids.shape), text_ids)
  params = jax.jit(model.init)(jax.random.key(1), batch, jnp.zeros((1, 1), jnp.int32))
  return np.asarray(jax.jit(functools.partial(model.apply, method='encode'))(params, batch))


def test_padding_does_not_change_the_output_of_real_tokens():
  short = _encode([[5, 6, 7, 0, 0, 0, 0, 0]], [[1, 1, 1, 0, 0, 0, 0, 0]])
  other = _encode([[5, 6, 7, 9, 9, 9, 9, 9]], [[1, 1, 1, 0, 0, 0, 0, 0]])
  assert (short[:, :3] == other[:, :3]).all()


def test_packed_pairs_do_not_see_each_other():
  pairs, positions = [[1, 1, 1, 1, 2, 2, 2, 2]], [[0, 1, 2, 3, 0, 1, 2, 3]]
  one = _encode([[5, 6, 7, 8, 9, 10, 11, 12]], pairs, positions)
  two = _encode([[5, 6, 7, 8, 30, 31, 32, 33]], pairs, positions)
  assert (one[:, :4] == two[:, :4]).all()
  assert (one[:, 4:] != two[:, 4:]).any()


def test_gradients_reach_only_tokens_of_the_same_pair():
  """A token's output has a gradient for another's input exactly where the mask allows it."""
  config = BertConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2,
                      intermediate_size=32, max_positions=16)
  model = Encoder(config)
  ids, text_ids = jnp.arange(5, 13)[None], jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])
  batch = Tokens(ids, jnp.zeros_like(ids), jnp.arange(8)[None], text_ids)
  params = jax.jit(model.init)(jax.random.key(1), batch, jnp.zeros((1, 1), jnp.int32))

  def output(table, position):
    changed = jax.tree.map(lambda x: x, params)
    token = changed['params']['embeddings']['token']
    changed['params']['embeddings']['token'] = token.replace_boxed(table)
    return model.apply(changed, batch, method='encode')[0, position, 0]

  table = params['params']['embeddings']['token'].unbox()
  for position, pair in ((0, 1), (4, 2)):
    influence = jnp.abs(jax.jit(jax.grad(output))(table, position)).sum(1)[5:13]
    assert ((influence > 0) == (text_ids[0] == pair)).all()
