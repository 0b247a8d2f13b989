"""DeBERTa's parts, by hand and against transformers for each option."""

import dataclasses
import functools

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.deberta_v2 import modeling_deberta_v2 as reference

from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, verify
from bert_jax.model import attention_kernels, heads, parameters
from bert_jax.model.deberta import Deberta, DebertaConfig, skew, table_rows
from tests.interop import test_family, torch_bert
from tests.model.test_modern import packed

CONFIG = DebertaConfig(vocab_size=60, hidden_size=16, num_layers=3, num_heads=2,
                       intermediate_size=24, max_positions=64, position_buckets=8,
                       conv_kernel_size=3, dropout=0.0, attention_dropout=0.0,
                       initializer_range=0.1)


@functools.cache
def variables(config=CONFIG):
  init = jax.jit(Deberta(config).init)
  return nn.unbox(init(jax.random.key(0), packed(), np.zeros((2, 1), np.int32)))


def encode(batch, config=CONFIG, **more):
  return jax.jit(functools.partial(Deberta(config).apply, method='encode', **more))(
      variables(), batch)


@pytest.mark.parametrize('buckets, farthest, length', [
    (256, 512, 512), (256, -1, 700), (256, 120, 100), (8, 64, 64), (32, 40, 100),
    (-1, -1, 64), (-1, 20, 64)])
def test_table_rows_of_distances_equal_the_reference(buckets, farthest, length):
  config = dataclasses.replace(CONFIG, position_buckets=buckets, max_relative_positions=farthest,
                               max_positions=min(512, max(farthest, length)))
  at = torch.zeros(1, length + 1, 1)
  theirs = reference.build_relative_position(at, at, buckets, config.farthest)[0]
  theirs = torch.clamp(theirs + config.span, 0, 2 * config.span - 1).numpy()
  rows = table_rows(config, length)
  np.testing.assert_array_equal(rows[length:], theirs[:, 0])  # from each query to the first key
  np.testing.assert_array_equal(rows[length::-1], theirs[0])


def test_table_rows_of_distances_by_hand():
  # Half of 8 buckets: distances up to 4 are exact; log(63/4) is three steps of log(2.507).
  rows = table_rows(dataclasses.replace(CONFIG, max_positions=64), 64) - 8
  assert rows[64:71].tolist() == [0, 1, 2, 3, 4, 5, 5]
  assert [rows[64 + d] for d in (10, 11, 25, 26, 63, 64)] == [5, 6, 6, 7, 7, 7]
  assert [rows[64 - d] for d in (1, 4, 5, 11, 26, 63)] == [-1, -4, -5, -6, -7, -7]


def test_scores_by_distance_become_scores_by_token():
  x = np.random.default_rng(0).normal(size=(2, 5, 10)).astype(np.float32)
  expected = [[[row[i, j - i + 4] for j in range(5)] for i in range(5)] for row in x]
  np.testing.assert_array_equal(skew(jnp.asarray(x)), expected)


def test_two_small_models_have_the_layers_of_a_generator_in_proportion():
  """`plan` extrapolates the FLOPs of a run with a generator from two smaller models."""
  fewest, more = (dataclasses.replace(DebertaConfig(), num_layers=n)
                  for n in DebertaConfig().fewest_layers)
  slope = ((more.generator().num_layers - fewest.generator().num_layers)
           / (more.num_layers - fewest.num_layers))
  assert (DebertaConfig().generator().num_layers
          == fewest.generator().num_layers + slope * (12 - fewest.num_layers) == 6)


@pytest.mark.parametrize('options', [
    {'pos_att_type': 'c2p', 'position_buckets': -1, 'max_relative_positions': 12},
    {'pos_att_type': ['p2c'], 'share_att_key': False},
    {'conv_kernel_size': 5, 'share_att_key': False, 'pos_att_type': 'c2p'}])
def test_every_option_gives_the_states_of_transformers(tmp_path, options):
  fields = {'num_hidden_layers': 2, 'share_att_key': True, 'position_buckets': 8,
            'norm_rel_ebd': 'layer_norm', 'pos_att_type': 'c2p|p2c', **options}
  torch.manual_seed(0)
  theirs = transformers.DebertaV2Model(transformers.DebertaV2Config(
      vocab_size=200, hidden_size=32, num_attention_heads=2, intermediate_size=48,
      max_position_embeddings=64, relative_attention=True, position_biased_input=False,
      initializer_range=0.2, **fields)).eval()
  with torch.no_grad():
    for name, tensor in theirs.named_parameters():
      if name.endswith('bias'):
        tensor.add_(0.1 * torch.randn(tensor.shape))
  theirs.save_pretrained(str(tmp_path))
  torch_bert.write_vocab(tmp_path, 200)
  model = huggingface.load(epath.Path(tmp_path))
  batch = verify.sample(model, 2, 40)
  real = batch.text_ids > 0
  expected = theirs(**torch_bert.inputs(batch), output_hidden_states=True, output_attentions=True)
  ours = jax.jit(functools.partial(Deberta(model.config).apply, method='states'))(
      {'params': model.params['params']['bert']}, batch)
  assert len(ours.hidden) == len(expected.hidden_states) == 3
  for a, b in zip(ours.hidden, expected.hidden_states):
    test_family.close(np.asarray(a)[real], b[torch.tensor(real)], 2e-5)
  assert len(ours.attention) == 2
  for a, b in zip(ours.attention, expected.attentions, strict=True):
    test_family.close(np.asarray(a)[0], b[0], 2e-6)  # the row without padding


def test_a_published_checkpoint_loads_with_its_head_and_exports(tmp_path):
  theirs = test_family.make('DebertaV2ForMaskedLM', tmp_path, legacy=False)
  tensors = {**theirs.state_dict(), 'mask_predictions.dense.weight': torch.zeros(2, 2),
             'deberta.embeddings.position_embeddings.weight': torch.zeros(64, 64)}
  theirs.save_pretrained(str(tmp_path), state_dict=tensors)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.groups == ('mlm',)
  batch = verify.sample(model)
  logits = jax.jit(heads.BertForPreTraining(model.config).apply)(
      model.params, batch, batch.positions, None)[0]
  real = batch.text_ids > 0
  expected = theirs(**torch_bert.inputs(batch)).logits[torch.tensor(real)]
  test_family.close(np.asarray(logits)[..., :700][real], expected, 2e-5)
  huggingface.save(model, epath.Path(tmp_path / 'again'))  # with the names of transformers
  again, loading = transformers.DebertaV2ForMaskedLM.from_pretrained(
      str(tmp_path / 'again'), output_loading_info=True)
  assert not loading['missing_keys'] and not loading['unexpected_keys']
  torch.testing.assert_close(again.eval()(**torch_bert.inputs(batch)).logits[torch.tensor(real)],
                             expected, atol=2e-6, rtol=0)


def test_the_output_of_a_text_does_not_depend_on_its_place_or_neighbors():
  batch = packed()
  other = batch.ids.copy()
  other[:, :22] = (other[:, :22] + 7) % 50 + 5
  a, b = (encode(batch._replace(ids=ids)) for ids in (batch.ids, other))
  assert np.array_equal(a[:, 22:33], b[:, 22:33]) and not np.array_equal(a[:, :22], b[:, :22])
  alone = jax.tree.map(lambda x: x[:, 22:33],
                       batch._replace(text_ids=(batch.text_ids > 0) * 1))
  np.testing.assert_allclose(encode(alone), a[:, 22:33], atol=2e-5)


@pytest.mark.medium
def test_remat_and_bfloat16_agree_with_the_plain_path():
  batch = packed()
  real = batch.text_ids > 0

  def value_and_gradient(config):
    def loss(params):
      return jnp.sum(jnp.sin(Deberta(config).apply(params, batch, method='encode'))[real])

    return jax.jit(jax.value_and_grad(loss))(variables())

  whole = value_and_gradient(CONFIG)
  again = value_and_gradient(dataclasses.replace(CONFIG, remat='full'))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-3), whole, again)
  half = encode(batch, dataclasses.replace(CONFIG, dtype='bfloat16'))
  assert np.max(np.abs(np.asarray(half, np.float32) - encode(batch))[real]) < 0.1


@pytest.mark.parametrize('fields', [{}, {'conv_kernel_size': 3, 'share_att_key': False}])
def test_the_parameter_count_equals_transformers(fields):
  config = DebertaConfig(**fields)
  with torch.device('meta'):
    theirs = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        relative_attention=True, position_biased_input=False, pos_att_type='p2c|c2p',
        norm_rel_ebd='layer_norm', position_buckets=256, **({'share_att_key': True} | fields)))
  tokens = jnp.zeros((1, 8), jnp.int32)
  tree = jax.eval_shape(heads.BertForPreTraining(config).init, jax.random.key(0),
                        Tokens(*[tokens] * 4), tokens, None)
  assert parameters.count_parameters(tree, config) == sum(
      x.numel() for x in theirs.parameters())
  # BERT's products, and two terms that each cost as much at 512 as queries times keys.
  convolution = 6 * fields.get('conv_kernel_size', 0) * 768**2
  assert config.flops_per_token(512, 0) == (
      6 * 12 * (12 * 768**2) + 12 * 12 * 768 * 512 * 2 + convolution)


@pytest.mark.parametrize('wrong, message', [
    ({'pos_att_type': 'p2p'}, "pos_att_type='p2p' is unknown: use c2p, p2c"),
    ({'pos_att_type': 'c2p|c2p'}, 'is unknown'), ({'pos_att_type': ''}, 'is unknown'),
    ({'norm_rel_ebd': 'rms'}, "norm_rel_ebd='rms' is unknown"),
    ({'position_buckets': 2}, 'position_buckets=2: give at least 4'),
    ({'max_relative_positions': 5}, 'position_buckets=8: give at least 4, and less than'),
    ({'conv_kernel_size': 2}, 'conv_kernel_size=2 must be 0, or odd and positive'),
    ({'conv_kernel_size': -1}, 'conv_kernel_size=-1 must be 0, or odd and positive'),
    ({'num_layers': 1}, 'in a model of at least 2 layers'),
    ({'conv_act': 'swish'}, "conv_act='swish' is unknown")])
def test_wrong_choices_are_refused(wrong, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(CONFIG, **wrong)


@pytest.mark.medium
def test_one_exported_program_runs_at_every_length():
  """With a symbolic length, the program looks up the rows of relative positions as it runs."""
  config = dataclasses.replace(CONFIG, attention='xla')
  encoder = Deberta(config)
  variables = nn.unbox(encoder.init(jax.random.key(0), packed(), np.zeros((2, 1), np.int32)))
  encode = jax.jit(functools.partial(encoder.apply, variables, method='encode'))
  rows, length = jax.export.symbolic_shape('b, l', constraints=['l <= 64'])
  shape = jax.ShapeDtypeStruct((rows, length), np.int32)
  program = jax.export.export(encode)(Tokens(*[shape] * 4))
  for length in (1, 9, 40, 64):
    tokens = packed(length=length)
    np.testing.assert_allclose(program.call(tokens), encode(tokens), atol=2e-6)


def test_deberta_uses_no_attention_kernel():
  reason = 'deberta-v2 adds scores of relative positions'
  assert attention_kernels.choose_path(CONFIG, 512, 'tpu') == ('xla', reason)
  for kernel in ('fused', 'splash'):
    with pytest.raises(UserError, match=f'attention={kernel} is not available: {reason}'):
      attention_kernels.choose_path(dataclasses.replace(CONFIG, attention=kernel), 512, 'tpu')


@pytest.mark.parametrize('fields, message', [
    ({'relative_attention': False}, 'relative_attention=False is not what DebertaV2 has'),
    ({'position_biased_input': True}, 'position_biased_input=True is not what DebertaV2 has'),
    ({'pooler_dropout': 0.1}, 'pooler_dropout=0.1 is not what DebertaV2 has'),
    ({'pos_att_type': None}, "pos_att_type='' is unknown"),
    ({'pos_att_type': [1]}, "pos_att_type='1' is unknown"),
    ({'pos_att_type': 1}, 'the value 1 for pos_att_type is not of type str'),
    ({'share_att_key': 1}, 'the value 1 for share_att_key is not of type bool'),
    ({'num_hidden_layers': True}, 'the value True for num_layers is not of type int')])
def test_unsupported_fields_of_config_json_are_refused(fields, message):
  config = test_family.FAMILIES['DebertaV2'](2, 64).to_dict() | fields
  with pytest.raises(UserError, match=message):
    huggingface.config_from(config, epath.Path('config.json'),
                            huggingface.families.ALL['deberta-v2'])
