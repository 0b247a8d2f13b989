"""Plans for GPUs that this machine does not have, by hand and with the real compiler."""

import importlib.util
import json
import pathlib
import types

import pytest

from bert_jax.errors import UserError
from bert_jax.parallel import chip_figures, gpu_topology, topology
from bert_jax.planning import collectives, estimate, flops, planner, traffic
from tests.planning.test_programs import small_config

needs_compiler = pytest.mark.skipif(bool(gpu_topology.missing()), reason=gpu_topology.missing())
HLO = (pathlib.Path(__file__).parent / 'gpu.hlo').read_text()


def test_traffic_and_flops_of_a_gpu_program_by_hand():
  """An asynchronous fusion in a loop updates a stack; a kernel gets one array three times."""
  vector, factors = 1024 * 4, (64 * 32 * 2, 32 * 16 * 2)
  update = 6 * (vector + 4 + vector)  # reads the vector and its index, writes the vector
  kernel, product = 2 * factors[0], sum(factors) + 64 * 16 * 4
  operations = traffic.operations(HLO)
  assert {(x.kind, x.bytes) for x in operations} == {
      ('fusion-start', update), ('custom-call', kernel), ('fusion', product)}
  assert traffic.of_products(HLO) == product
  assert flops.products(HLO) == 2 * 64 * 32 * 16


@pytest.mark.parametrize('result, size', [
    ('((f32[30592,96]{0,1}), f32[30592,768]{0,1})', 30592 * 768 * 4),
    ('((bf16[96,768]{1,0}, f32[8,8,2]{2,1,0}), (bf16[768,768]{1,0}, f32[64,8,2]{2,1,0}))',
     768 * 768 * 2 + 64 * 8 * 2 * 4),
    ('((f32[768,2]{1,0}, f32[768,512]{1,0}), (f32[96,2]{1,0}, f32[96,512]{1,0}))', 96 * 514 * 4)])
def test_the_result_size_of_asynchronous_collectives(result, size):
  assert collectives._result_size(result, asynchronous=True) == size


@pytest.mark.parametrize('name, message', [
    ('h100:9', 'a host has 1 to 8 cards'), ('gb200:8', 'a host has 1 to 4 cards'),
    ('h100', 'a host has'), ('h100:0', 'a host has'), ('h100:0x8', 'a host has'),
    ('a100:8x', 'a host has'), ('h100:2x9', 'a host has'), ('t4:1', 't4:1 is unknown')])
def test_gpu_topologies_that_do_not_exist_are_refused(name, message):
  with pytest.raises(UserError, match=message):
    topology.get(name)


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(UserError, match=r"not installed: pip install 'jax\[cuda13\]'.*no GPU is"):
    topology.get('h100:8')


def test_network_and_memory_of_gpus(monkeypatch):
  cards = [types.SimpleNamespace(device_kind='NVIDIA H100 80GB HBM3', platform='gpu', id=i,
                                 process_index=i // 8) for i in range(16)]
  assert chip_figures.network(cards[:8]) == 450e9
  assert chip_figures.network(cards) == 50e9
  monkeypatch.delenv('XLA_PYTHON_CLIENT_MEM_FRACTION', raising=False)
  assert chip_figures.memory_limit(cards[0]) == 60e9  # JAX's default share of 80
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.9')
  assert chip_figures.memory_limit(cards[0]) == 72e9


def test_the_rule_of_thumb_matches_measured_steps():
  """ms of a step on an H200 with layers unrolled: base@128, large@512, and large with cuDNN."""
  h200 = chip_figures.chip_of([types.SimpleNamespace(
      device_kind='NVIDIA H200', platform='gpu', id=0)])
  for tera, moved, products, measured in (
      (17.86, 136.6e9, 30e9, 59.8), (32.6, 277.7e9, 50e9, 121.5), (32.6, 145.3e9, 50e9, 86.7)):
    assert estimate._expected_seconds(h200, tera * 1e12, moved - products) * 1e3 == pytest.approx(
        measured, rel=0.05)


@needs_compiler
def test_a_plan_for_gpus(tmp_path, capsys):
  c = small_config(**{'model.num_layers': 2, 'model.dtype': 'auto', 'train_steps': 10})
  planner.plan(c, ['h100:1', 'h100:8'], explain=True, out=str(tmp_path / 'plan.json'))
  shown = capsys.readouterr().out
  assert 'h100:8: 8 NVIDIA H100' in shown and 'bfloat16)' in shown
  assert 'triton for rows of 64' in shown and 'by a rule of thumb from an H200' in shown
  plans = {name: x['phases'][0]
           for name, x in json.loads((tmp_path / 'plan.json').read_text()).items()}
  one, eight = plans['h100:1'], plans['h100:8']
  assert not one['collectives'] and one['flops'] >= one['model_flops']
  assert eight['devices'] == 8 and eight['flops'] < one['flops'] / 7
  reduced = [x for x in eight['collectives'] if x['kind'] == 'all-reduce']
  # The gradients of all parameters, in float32.
  assert sum(x['bytes'] for x in reduced) > 0.2 * one['memory']['arguments']


@needs_compiler
def test_a_plan_that_does_not_fit_says_so(capsys):
  c = small_config(**{'model.num_layers': 1, 'model.dtype': 'auto', 'model.remat': 'none',
                      'phases': ((10, 64, 8_000_000),), 'train_steps': 10})
  planner.plan(c, ['a100:1'])
  assert 'NO: each device lacks' in capsys.readouterr().out
