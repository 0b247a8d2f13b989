"""The sharding of every parameter in each preset, and the traffic of its step.

`python -m tests.parallel.test_sharding` rewrites the golden files.
"""

import pathlib
import re

import jax
import pytest

from bert_jax.data.phases import Phase
from bert_jax.parallel import sharding
from bert_jax.planning import collectives, programs
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest
from tests.planning.test_programs import small_config

GOLDEN = pathlib.Path(__file__).parent / 'golden'
ROWS, VOCAB = 16, 1024  # 1,000 entries, padded


def dump(preset: str) -> str:
  """A line for each array of the training state: its name, its shape, its axes on the mesh."""
  mesh = conftest.sub_mesh(2, 2, 2)
  work = programs.pretraining(small_config(), Phase(10, 64, ROWS))
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(), 100_000)
  _, abstract = state_lib.make_init(work.task, optimizer, mesh, preset)
  lines = []
  for path, x in jax.tree_util.tree_leaves_with_path(
      {'params': abstract.params['params'], 'mu': abstract.opt_state[1].mu['params'],
       'nu': abstract.opt_state[1].nu['params']}):
    axes = ', '.join(str(axis) for axis in x.sharding.spec)
    lines.append(f'{"/".join(key.key for key in path):56} {str(x.shape):20} {axes}'.rstrip())
  return '\n'.join(sorted(lines)) + '\n'


@pytest.mark.parametrize('preset', sharding.PRESETS)
def test_every_parameter_and_moment_is_sharded_as_in_the_golden_file(preset):
  assert dump(preset) == (GOLDEN / f'{preset}.txt').read_text()


@pytest.fixture(scope='module')
def steps():
  """The text of each preset's step on 2 x 2 (data x model) devices, and its traffic."""
  mesh, by_preset = conftest.sub_mesh(2, 2), {}
  for preset in sharding.PRESETS:
    c = small_config(**{'sharding': preset, 'model.num_layers': 2})
    text = programs.train_step(programs.pretraining(c, Phase(10, 64, ROWS)), c,
                               mesh).program.as_text()
    by_preset[preset] = text, {(x.kind, x.axes): x for x in collectives.read(text, mesh)}
  return by_preset


def test_data_parallel_only_sums_gradients(steps):
  _, sent = steps['dp']
  # Devices along the model axis hold the same values: they send nothing to each other.
  assert set(sent) == {('all-reduce', ('data',))}


def test_fsdp_gathers_parameters_but_not_moments(steps):
  _, sent = steps['fsdp']
  assert ('all-gather', ('data',)) in sent
  # Only gradients and parameters cross the chips: their bytes, not three times as much.
  _, dp = steps['dp']
  assert sent['all-gather', ('data',)].bytes < 2.1 * dp['all-reduce', ('data',)].bytes


@pytest.mark.parametrize('preset', ['tp', 'fsdp_tp'])
def test_logits_are_never_gathered(steps, preset):
  text, sent = steps[preset]
  assert ('all-reduce', ('model',)) in sent
  gathered = re.findall(r'= \(?(\w+\[[\d,]*\]).* all-gather', text)
  assert not [shape for shape in gathered
              if re.search(rf'[\[,]{VOCAB}\]', shape) and not shape.endswith(f'[64,{VOCAB}]')]
  assert re.search(rf'f32\[\d+,{VOCAB // 2}\]', text)  # a chip has the logits of its own entries


@pytest.mark.parametrize('preset', sharding.PRESETS)
def test_no_chip_draws_the_masks_of_all_rows(steps, preset):
  """No array in the program of a device has all rows: a device draws masks for its own rows."""
  text, _ = steps[preset]
  whole = re.findall(rf'= \(?\w+\[{ROWS},[\d,]*\].*', text)
  assert not whole, whole[:5]


if __name__ == '__main__':
  for name in sharding.PRESETS:
    (GOLDEN / f'{name}.txt').write_text(dump(name))
