"""`python -m bert_jax.plan` for local devices and, with the real TPU compiler, for slices."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from bert_jax import config as config_lib
from bert_jax.data.phases import Phase
from bert_jax.errors import UserError
from bert_jax.model import architectures
from bert_jax.objectives import objectives
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import topology
from bert_jax.planning import collectives, estimate, planner, programs
from tests import conftest, test_commands
from tests.planning.test_programs import small_config

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.medium
def test_a_plan_for_local_devices(tmp_path, capsys):
  c = small_config(**{'model.num_layers': 2, 'model.dtype': 'auto'})
  planner.plan(c, ['local'], explain=True, out=str(tmp_path / 'planner.json'))
  shown = capsys.readouterr().out
  assert f'remat none; {conftest.DTYPE})' in shown
  assert '10 steps of 8 rows of 64' in shown and 'all-reduce' in shown
  (phase,) = json.loads((tmp_path / 'planner.json').read_text())['local']['phases']
  assert phase['devices'] == 8 and phase['missing'] == 0 and phase['tokens'] == 512
  assert phase['traffic'] == sum(x['bytes'] for x in phase['operations'])
  table = shown.partition('| traffic | share | part')[2].splitlines()[2:12]
  assert len(table) == 10 and any('optimizer' in row for row in table)
  # Parameters and two moments, float32, whole on every device; the batch is small.
  model = dataclasses.replace(architectures.make_config(c.model), dtype='float32')
  objective = objectives.create('', c.data.sequences, model)
  parameters = objective.num_parameters() + 24 * (64 + 1)
  batch = 4 * (4 * 64 + 3 * 8 + 1)  # a row: int32 and float32
  assert phase['memory']['arguments'] == pytest.approx(12 * parameters + batch, rel=1e-3)


@pytest.mark.parametrize('most', [0, 7, 8, 100, 4095, 5000])
def test_largest_rows_finds_nearly_the_largest_batch(monkeypatch, most):
  monkeypatch.setattr(estimate, '_needs', lambda config, phase, mesh, rows: (
      1000 + 10 * rows if rows <= most else None))
  rows, memory = estimate.largest_rows(None, None, None)
  assert rows <= min(most, 4096) and rows >= min(most, 4096) * 7 / 8 - 1
  assert memory == (1000 + 10 * rows if rows else 0)


def test_a_batch_is_divisible_into_microbatches(monkeypatch):
  tried = []
  monkeypatch.setattr(estimate.programs, 'train_step', lambda work, *_: (
      tried.append(work.phase.batch_size) or estimate.programs.Figures({'arguments': 1})))
  c, mesh = small_config(**{'optimizer.accumulation': 3}), conftest.sub_mesh(2, 1)
  estimate._needs(c, Phase(10, 64, 8), mesh, rows=7)
  assert tried == [7 * 2 * 3]


@pytest.mark.parametrize('fields, arguments, message', [
    ({}, {'topologies': []}, 'give --topology=local'),
    ({'train_steps': 0, 'train_minutes': 5.0}, {}, 'only a run measures its steps'),
    ({'train_steps': 0, 'train_epochs': 2.0, 'phases': ()}, {}, 'a plan has no corpus to count'),
    ({'optimizer.warmup_steps': 10}, {}, 'optimizer.warmup_steps=10 leaves nothing of the 10'),
    ({'optimizer.warmup_steps': 0, 'optimizer.warmup_ratio': 1.0, 'train_steps': 20, 'phases': ()},
     {}, 'optimizer.warmup_ratio=1.0 leaves nothing of the 20 training steps'),
    ({'trackers': ('tensorbord',)}, {}, "trackers='tensorbord' is unknown: use tensorboard, wandb"),
    ({'profile_steps': (5, 2)}, {}, 'profile_steps=5,2: the last step to trace, 2, is before'),
    ({'model.architecture': None}, {}, 'model.architecture is not set: this config takes it from'),
    ({'platform': 'tpu'}, {}, "platform='tpu' has no device here"),
    ({}, {'given': {'platform': 'auto'}, 'topologies': ['v5e:2x2']}, 'platform has no effect here'),
    ({}, {'out': __file__ + '/x.json'}, '--out=.*x.json cannot be written'),
    # Root may write into any folder except the folders of the kernel.
    ({}, {'out': '/proc/x.json'}, '^--out=/proc/x.json cannot be written: No such file')])
def test_an_impossible_plan_is_refused_before_it_compiles(fields, arguments, message):
  with pytest.raises(UserError, match=message):
    planner.plan(small_config(**fields), **{'topologies': ['local'], **arguments})


def test_a_child_takes_no_accelerator(monkeypatch):
  """A run may hold the accelerator, and JAX would wait for it or fail."""
  platforms = []
  monkeypatch.setattr(planner.programs, 'compile_program',
                      lambda *_: platforms.append(jax.config.jax_platforms))
  before = jax.config.jax_platforms
  jax.config.update('jax_platforms', 'cpu,tpu')
  try:
    planner._in_child(small_config(), 'local', 0, programs.Program())
  finally:
    jax.config.update('jax_platforms', before)
  assert platforms == ['cpu']


@pytest.mark.slow
def test_a_larger_batch_needs_more_memory():
  c, mesh = small_config(**{'model.num_layers': 1}), conftest.sub_mesh(2, 1)
  small, large = (estimate._needs(c, Phase(10, 64, 8), mesh, rows) for rows in (4, 64))
  assert large > 2 * small


@pytest.mark.parametrize('name', ['v5e:3x5', 'v9:2x2', 'v5e', 'tpu'])
def test_an_unknown_topology_is_refused(name):
  with pytest.raises(UserError, match=f'--topology={name} is unknown: use v4:2x2x1.*v5e:1x1'):
    planner.plan(small_config(), [name])


def test_mistakes_on_the_command_line_are_refused():
  done = test_commands.run('plan', '--config=configs/tiny.py', '--topology=v5e:4')
  test_commands.assert_mistake(done, '--topology=v5e:4 is unknown')
  done = test_commands.run('plan', '--config=configs/tiny.py', '--config.model.num_head=2')
  test_commands.assert_mistake(done, 'did you mean --config.model.num_heads?')
  test_commands.assert_mistake(test_commands.run('plan'), 'give --config=')


# ---- the TPU compiler ---------------------------------------------------------------------------


@pytest.fixture
def tpu():
  """The function that returns the devices of a slice. It needs the TPU compiler."""
  pytest.importorskip('libtpu')
  return topology.get


@pytest.mark.slow
def test_tiny_compiles_for_a_slice_unless_its_mesh_is_wrong(tpu, capsys, tmp_path):
  """One mesh does not fit the slice. The model axis of another does not divide the heads."""
  c = config_lib.pretraining('tiny')
  c.update_from_flattened_dict({'train_steps': 100, 'phases': (), 'batch_size': 32, 'max_len': 64,
                                'model.dtype': 'auto', 'optimizer.warmup_steps': 10})
  planner.plan(c, ['v5e:2x2'], price=1.2, out=str(tmp_path / 'planner.json'))
  shown = capsys.readouterr().out
  assert 'v5e:2x2: 4 TPU v5 lite' in shown and 'remat none; bfloat16)' in shown
  assert c.model.dtype == 'auto' and 'yes, in 16 GiB' in shown
  assert re.search(r'all steps .* chip-hours, .* at 1.2 an hour', shown)
  (phase,) = json.loads((tmp_path / 'planner.json').read_text())['v5e:2x2']['phases']
  assert phase['chips'] == 4 and 0 < phase['mfu'] < 1
  assert {(x['kind'], *x['axes']) for x in phase['collectives']} == {('all-reduce', 'data')}

  c.mesh.data = 3
  with pytest.raises(UserError, match='mesh 1x3x1 .* does not fit the 4 devices'):
    planner.plan(c, ['v5e:2x2'])
  c.mesh.data, c.mesh.model = 1, 4
  with pytest.raises(UserError, match='num_heads=2 is not divisible by mesh.model=4'):
    planner.plan(c, ['v5e:2x2'])


@pytest.fixture
def base():
  c = config_lib.pretraining('base')
  c.model.dtype = 'bfloat16'
  return c


@pytest.mark.slow
def test_a_chip_of_a_slice_holds_only_its_own_rows(tpu, base):
  """Base on 2 x 2 chips: no random number, mask or activation of all 64 rows on any."""
  mesh = mesh_lib.make_mesh(devices=tpu('v5e:2x2'))
  figures = programs.train_step(programs.pretraining(base, Phase(10, 128, 64)), base, mesh)
  text = figures.program.as_text()
  assert re.search(r'= \(?\w+\[16,128', text)  # a chip's rows
  assert not re.findall(r'= \(?\w+\[64,[\d,]*\]', text)
  assert figures.memory['temporaries'] < 3 * 2**30


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_the_missing_memory(tpu, base, capsys):
  base.update_from_flattened_dict({'phases': (), 'train_steps': 10, 'batch_size': 8192,
                                   'max_len': 512, 'model.num_layers': 2,
                                   'optimizer.warmup_steps': 1})
  planner.plan(base, ['v5e:2x2'])
  missing = re.search(r'fits +NO: each device lacks ([\d.]+) GiB', capsys.readouterr().out)
  assert missing and float(missing[1]) > 1


@pytest.mark.slow
@pytest.mark.parametrize('length, dropout, kernel', [(512, 0.1, 'backward_attention'),
                                                     (1024, 0.0, 'splash')])
def test_a_kernel_saves_the_attention_weights_of_long_rows(tpu, base, length, dropout, kernel):
  """A step with the kernel saves at least the memory of the attention weights of two layers."""
  mesh = mesh_lib.make_mesh(devices=tpu('v5e:2x2'))
  needed = {}
  for attention in ('auto', 'xla'):
    base.update_from_flattened_dict({
        'model.attention_dropout': dropout, 'model.num_layers': 2, 'model.attention': attention,
        'model.max_positions': length})
    figures = programs.train_step(programs.pretraining(base, Phase(10, length, 32)), base, mesh)
    assert (kernel in figures.program.as_text()) == (attention == 'auto')
    needed[attention] = figures.memory['temporaries']
  weights = 8 * 12 * length * length * 2  # bytes that a layer holds for its backward pass, bfloat16
  assert needed['xla'] - needed['auto'] > 2 * weights


_SLICES = {'v4': 'v4:2x2x1', 'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2',
           'tpu7x': 'tpu7x:2x2x1'}
# A product over all chips of a slice, whose weights they gather.
PRODUCT = """
import sys
import jax
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import topology
from bert_jax.planning import collectives
mesh = mesh_lib.make_mesh(devices=topology.get(sys.argv[1]))
split = mesh_lib.batch_sharding(mesh)
x = jax.ShapeDtypeStruct((256, 256), 'bfloat16', sharding=split)
text = jax.jit(lambda x, w: x @ w, out_shardings=split).lower(x, x).compile().as_text()
print(mesh.size, collectives.read(text, mesh))
"""


def launch_flags(chip: str) -> tuple[str, str]:
  """The variable and the flags that the launch scripts set."""
  printed = subprocess.run(['bash', '-c', f'. launch/xla_flags.sh; xla_flags {chip}'], cwd=ROOT,
                           text=True, capture_output=True, check=True).stdout.strip()
  variable, _, flags = printed.partition('=')
  return variable, flags


@pytest.mark.parametrize('chip', _SLICES)
def test_a_slice_compiles_with_the_flags_of_the_launch_scripts(tpu, chip):
  variable, flags = launch_flags(chip)
  done = subprocess.run([sys.executable, '-c', PRODUCT, _SLICES[chip]], cwd=ROOT, text=True,
                        capture_output=True, env={
                            **os.environ, variable: flags, 'JAX_PLATFORMS': 'cpu',
                            'JAX_ENABLE_COMPILATION_CACHE': 'false'})
  devices = 8 if chip == 'tpu7x' else 4  # two on each chip
  gather = collectives.Collective('all-gather', ('data',), devices, count=1, bytes=256 * 256 * 2)
  assert done.stdout.strip() == f'{devices} {[gather]}', done.stderr
  assert 'nknown' not in done.stderr, done.stderr


@pytest.mark.parametrize('chip', _SLICES)
def test_flags_that_exclude_each_other_are_not_set_together(chip):
  """libtpu 0.0.50 refuses every program with both flags, except on v5e; 0.0.42 accepts both."""
  _, flags = launch_flags(chip)
  assert not ('fuse_all_gather=true' in flags and 'xla_enable_async_all_gather=true' in flags)
