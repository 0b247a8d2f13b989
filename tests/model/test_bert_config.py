import dataclasses
import types

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model import architectures, attention_kernels, heads, parameters
from bert_jax.model.bert_config import BertConfig
from bert_jax.runtime import platforms

# Parameters with the vocabulary of 30,522. The counts of base and large are published. The count of
# tiny is their sum by hand: embeddings (30522 + 512 + 2) * 128 + 256, each layer 198,272, pooler
# 16,512.
COUNTS = {'tiny': 31036 * 128 + 256 + 2 * 198_272 + 16_512, 'base': 109_482_240,
          'large': 335_141_888}
WITH_HEADS = {'base': 110_106_428, 'large': 336_226_108}


@pytest.mark.parametrize('platform, is_fast, dtype', [
    ('cpu', False, 'float32'), ('cpu', True, 'bfloat16'), ('gpu', False, 'bfloat16'),
    ('tpu', False, 'bfloat16')])
def test_auto_dtype_follows_the_devices(monkeypatch, platform, is_fast, dtype):
  monkeypatch.setattr('bert_jax.runtime.host.has_fast_bfloat16', lambda: is_fast)
  mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
  for given, expected in (('auto', dtype), ('float32', 'float32'), ('bfloat16', 'bfloat16')):
    c = config_lib.pretraining('tiny')
    c.model.dtype = given
    c = config_fields.changed(c, config_lib.dtype_on(c, mesh))
    assert c.model.dtype == expected


@pytest.mark.parametrize('capability, dtype', [
    (7.5, 'float32'), (8.0, 'bfloat16'), (8.9, 'bfloat16'), (9.0, 'bfloat16')])
def test_old_gpus_do_not_multiply_bfloat16(monkeypatch, capability, dtype):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  device = types.SimpleNamespace(compute_capability=str(capability))
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  assert platforms.compute_capability() == capability
  assert platforms.fast_dtype('gpu') == dtype


def test_a_gpu_of_amd_gets_no_kernel_of_nvidia(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'local_devices',
                      lambda: [types.SimpleNamespace(compute_capability='gfx942')])
  assert platforms.fast_dtype('gpu') == 'bfloat16'
  assert platforms.triton_obstacle() == 'the kernels are for NVIDIA GPUs'
  config = BertConfig(hidden_size=128, num_heads=2, dtype='bfloat16')
  assert attention_kernels.choose_path(config, 512, 'gpu')[0] == 'xla'


@pytest.mark.parametrize('size', config_lib.SIZES)
def test_parameters_are_counted_without_the_padding(size):
  config = architectures.make_config(config_lib.model(size))
  tokens = jnp.zeros((1, 8), jnp.int32)
  boxed = jax.eval_shape(heads.BertForPreTraining(config).init, jax.random.key(0),
                         Tokens(*[tokens] * 4), tokens, tokens)
  stored = sum(x.size for x in jax.tree.leaves(nn.unbox(boxed)))
  padding = (config.padded_vocab_size - config.vocab_size) * (config.hidden_size + 1)
  counted = parameters.count_parameters(boxed, config)
  assert counted == stored - padding
  if size in WITH_HEADS:
    assert counted == WITH_HEADS[size]
  if size in COUNTS:
    assert parameters.count_parameters(boxed['params']['bert'], config) == COUNTS[size]


def test_vocabulary_is_padded_to_128():
  assert BertConfig(vocab_size=30_522).padded_vocab_size == 30_592
  assert BertConfig(vocab_size=128).padded_vocab_size == 128
  assert BertConfig(vocab_size=129).padded_vocab_size == 256


def test_flops_of_base_at_128():
  # A row of 128 with 20 predictions takes 69.9 GFLOP, the published number for this convention.
  total = 128 * BertConfig().flops_per_token(128, 20 / 128)
  assert total == 6 * 12 * 128 * (4 * 768**2 + 2 * 768 * 3072) + 12 * 12 * 768 * 128**2 + (
      6 * 20 * (768**2 + 768 * 30_522))
  assert round(total / 1e9, 1) == 69.9


@pytest.mark.parametrize('name', architectures.ALL)
def test_fewest_layers_gives_two_valid_models(name):
  config = architectures.make_config({'architecture': name})
  one, two = (dataclasses.replace(config, num_layers=n) for n in config.fewest_layers)
  assert 1 <= one.stacked_layers <= two.stacked_layers and one.num_layers < two.num_layers


@pytest.mark.parametrize('wrong', [
    dict(hidden_size=100, num_heads=12), dict(activation='swish'), dict(dropout=1.0),
    dict(dtype='float16'), dict(num_layers=0), dict(remat='half')])
def test_wrong_choices_are_refused(wrong):
  with pytest.raises(UserError, match=next(iter(wrong))):
    BertConfig(**wrong)
