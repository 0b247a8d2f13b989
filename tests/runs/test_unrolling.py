"""A run on a GPU unrolls its layers, unless it is too short to repay the compilation."""

import dataclasses
import types

from ml_collections import FrozenConfigDict
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config_fields import changed
from bert_jax.data.phases import Phase
from bert_jax.model.bert_config import BertConfig
from bert_jax.runs import unrolling
from bert_jax.training import lora


def mesh(kind, platform, count=1):
  devices = [types.SimpleNamespace(device_kind=kind, platform=platform, id=i) for i in range(count)]
  return types.SimpleNamespace(devices=np.array(devices))


H100 = mesh('NVIDIA H100 80GB HBM3', 'gpu')


@pytest.mark.parametrize('task, devices, given, duration, layers', [
    ('pretrain', H100, 0, 301, 12), ('pretrain', H100, 0, 299, 1), ('pretrain', H100, 3, 301, 3),
    ('pretrain', mesh('cpu', 'cpu'), 0, 301, 1), ('pretrain', mesh('TPU v5e', 'tpu'), 0, 301, 1),
    ('sequence_classification', H100, 0, 60, 1), ('sequence_classification', H100, 0, 900, 12),
    ('sequence_classification', mesh('cpu', 'cpu'), 0, 60, 12)])
def test_only_a_long_run_unrolls_its_layers(task, devices, given, duration, layers):
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


def test_a_run_by_epochs_has_the_duration_of_its_steps():
  config = config_lib.pretraining('base')
  config.train_steps, config.train_epochs, config.phases = 0, 40.0, ()
  task = types.SimpleNamespace(flops_per_token=lambda length: 6 * 110e6,
                               with_config=lambda config: config)
  job = dataclasses.make_dataclass('Job', ['task', 'train_steps'])(task, 1_000_000)
  fields, job = unrolling.of_job(FrozenConfigDict(config), job, H100)
  assert fields == {'model.scan_unroll': 12} and job.task.scan_unroll == 12


@pytest.mark.parametrize('layers, keeps', [(2, True), (1, False)])
def test_a_lora_run_keeps_its_base_unless_its_layers_change(layers, keeps):
  """Without it the frozen model would be zeros."""
  config = BertConfig(num_layers=2, scan_unroll=0)
  task = types.SimpleNamespace(model=types.SimpleNamespace(config=config), loss_weights={},
                               with_config=lambda config: task)
  adapted = lora.Lora(task, lora.LoraConfig(rank=2), base={'kernel': np.ones(3)})
  other = adapted.with_config(dataclasses.replace(config, num_layers=layers, scan_unroll=layers))
  assert (other.base is not None) == keeps
