"""A run whose step does not fit names its need and the batch that fits."""

import re

import jax
import pytest

from bert_jax.data.phases import Phase
from bert_jax.parallel import chip_figures
from bert_jax.planning import out_of_memory, programs
from tests import conftest
from tests.planning.test_programs import small_config


def needs(config, rows, mesh) -> int:
  work = programs.pretraining(config, Phase(10, 64, rows))
  return sum(programs.train_step(work, config, mesh).memory.values())


def test_the_need_and_the_batch_that_fits(monkeypatch):
  mesh = conftest.sub_mesh(1, 1)
  monkeypatch.setattr(out_of_memory.mesh_lib, 'make_mesh', lambda **_: mesh)
  config = small_config(**{'model.num_layers': 1, 'model.dtype': 'auto', 'train_steps': 0,
                           'phases': ((10, 32, 256), (10, 64, 200))})
  resolved = small_config(**{'model.num_layers': 1, 'model.dtype': 'float32'})
  limit = needs(resolved, 40, mesh)  # so many rows fit exactly
  monkeypatch.setattr(chip_figures, 'memory_limit', lambda device: limit)
  line = out_of_memory.explain(config)
  need = needs(resolved, 200, mesh) / 2**30
  assert line.startswith(f'out of memory: a step of 200 rows of 64 needs {need:.1f} GiB of each '
                         f'device, which has {limit / 2**30:.1f}. By the compiler batch_size=')
  assert int(re.search(r'batch_size=(\d+) fits', line)[1]) in range(36, 41)
  monkeypatch.setattr(chip_figures, 'memory_limit', lambda device: 1000)
  assert 'By the compiler not even one row fits' in out_of_memory.explain(config)


def test_other_errors_are_not_taken_for_it():
  assert out_of_memory.describes(jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'))
  assert not out_of_memory.describes(jax.errors.JaxRuntimeError('INTERNAL: x'))
  assert not out_of_memory.describes(OSError('RESOURCE_EXHAUSTED: a quota'))


@pytest.mark.parametrize('task, starts', [('pretrain', ''), ('pretrain', 'x'), ('other', '')])
def test_main_ends_with_the_line(monkeypatch, task, starts):
  """A config without random parameters keeps the general line."""
  from bert_jax import errors, main
  from bert_jax.runs import config_flag, run

  config = small_config()
  config.task, config.init_from = task, starts
  error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')

  def fail(*_):
    raise error

  monkeypatch.setattr(run, 'run', fail)
  for name, value in (('is_given', True), ('get', config), ('given', {})):
    monkeypatch.setattr(config_flag, name, lambda value=value: value)
  monkeypatch.setattr(main, '_WORKDIR', type('Flag', (), {'value': 'x'}))
  monkeypatch.setattr(out_of_memory, 'explain', lambda config, given: 'the line')
  expected = errors.Failed if (task, starts) == ('pretrain', '') else jax.errors.JaxRuntimeError
  with pytest.raises(expected):
    main._main([])
