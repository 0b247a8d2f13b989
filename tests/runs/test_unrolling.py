"""A run on a GPU has no loop over layers, unless it is too short for the compilation."""

import types

from ml_collections import FrozenConfigDict
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.data.phases import Phase
from bert_jax.runs import unrolling


def mesh(kind, platform, count=1):
  devices = [types.SimpleNamespace(device_kind=kind, platform=platform, id=i) for i in range(count)]
  return types.SimpleNamespace(devices=np.array(devices))


H100 = mesh('NVIDIA H100 80GB HBM3', 'gpu')


@pytest.mark.parametrize('task, devices, given, duration, layers', [
    ('pretrain', H100, 0, 301, 12), ('pretrain', H100, 0, 299, 1), ('pretrain', H100, 3, 301, 3),
    ('pretrain', mesh('cpu', 'cpu'), 0, 301, 1), ('pretrain', mesh('TPU v5e', 'tpu'), 0, 301, 1),
    ('sequence_classification', H100, 0, 60, 1), ('sequence_classification', H100, 0, 900, 12),
    ('sequence_classification', mesh('cpu', 'cpu'), 0, 60, 12)])
def test_the_layers_of_a_step(task, devices, given, duration, layers):
  config = (config_lib.pretraining('base') if task == 'pretrain' else config_lib.finetuning(task))
  config.model.scan_unroll = given
  if task != 'pretrain':
    config.model.num_layers = 12
  config = FrozenConfigDict(config)
  fields = unrolling.fields(config, devices, duration)
  assert changed(config, fields).model.scan_unroll == layers


def test_the_duration_follows_from_flops():
  task = types.SimpleNamespace(flops_per_token=lambda length: 1e9 * length)
  phases = [Phase(100, 128, 32), Phase(10, 512, 8)]
  flops = 100 * 32 * 128 * 128e9 + 10 * 8 * 512 * 512e9
  assert unrolling.seconds(task, phases, H100) == pytest.approx(flops / (0.4 * 989e12))
  eight = mesh('NVIDIA H100 80GB HBM3', 'gpu', 8)
  assert unrolling.seconds(task, phases, eight) == pytest.approx(flops / (0.4 * 989e12) / 8)
  assert unrolling.seconds(task, phases, mesh('NVIDIA X', 'gpu')) == np.inf
