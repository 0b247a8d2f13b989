"""A run whose step does not fit names the memory it needs and the batch that fits."""

import os
import subprocess
import sys

import jax
import pytest

from bert_jax.data.phases import Phase
from bert_jax.parallel import chip_figures
from bert_jax.planning import out_of_memory, programs
from tests import conftest
from tests.planning.test_programs import small_config
from tests.test_commands import ROOT


def needs(config, rows, mesh) -> int:
  work = programs.pretraining(config, Phase(10, 64, rows))
  return sum(programs.train_step(work, config, mesh).memory.values())


@pytest.fixture
def mesh(monkeypatch):
  """The mesh of one device that `explain` gets."""
  mesh = conftest.sub_mesh(1, 1)
  monkeypatch.setattr(out_of_memory.mesh_lib, 'make_mesh', lambda **_: mesh)
  return mesh


@pytest.mark.medium
def test_without_phases_the_error_suggests_a_batch_size(monkeypatch, mesh):
  monkeypatch.setattr(out_of_memory.estimate, 'largest_rows', lambda *_: (7, 1))
  config = small_config(**{'model.num_layers': 1, 'phases': (), 'batch_size': 8, 'max_len': 64})
  assert 'According to the compiler batch_size=7 fits; ' in out_of_memory.explain(config)


@pytest.mark.medium
def test_the_error_names_the_needed_memory_and_the_batch_that_fits(monkeypatch, mesh):
  config = small_config(**{'model.num_layers': 1, 'model.dtype': 'auto', 'train_steps': 0,
                           'phases': ((10, 32, 12), (10, 64, 8))})
  resolved = small_config(**{'model.num_layers': 1, 'model.dtype': conftest.DTYPE})
  limit = needs(resolved, 7, mesh)  # exactly 7 rows fit
  monkeypatch.setattr(chip_figures, 'memory_limit', lambda device: limit)
  line = out_of_memory.explain(config)
  need = needs(resolved, 8, mesh) / 2**30
  assert line.startswith(f'out of memory: a step of 8 rows of 64 needs {need:.1f} GiB of each '
                         f'device, which has {limit / 2**30:.1f}. According to the compiler '
                         '7 rows of 64 fit (give them in phases);')


def test_the_error_describes_the_layers_of_the_run(monkeypatch, mesh):
  """A long run on a GPU has no loop over its layers."""
  compiled = []

  def train_step(work, config, mesh):
    compiled.append((work.task.model.config.scan_unroll, config.model.scan_unroll))
    return programs.Figures({'arguments': 1})

  monkeypatch.setattr(out_of_memory.unrolling, 'fields',
                      lambda config, mesh, seconds: {'model.scan_unroll': 4})
  monkeypatch.setattr(out_of_memory.programs, 'train_step', train_step)
  monkeypatch.setattr(out_of_memory.estimate, 'largest_rows', lambda *_: (7, 1))
  out_of_memory.explain(small_config())
  assert compiled == [(4, 4)]


def test_only_errors_of_the_allocator_are_out_of_memory():
  assert out_of_memory.describes(jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'))
  assert not out_of_memory.describes(jax.errors.JaxRuntimeError('INTERNAL: x'))
  assert not out_of_memory.describes(OSError('RESOURCE_EXHAUSTED: a quota'))
  assert not out_of_memory.describes(
      jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: ENOSPC No space left on device'))


# main with an allocator that refuses: on a CPU the kernel would kill the process instead. It skips
# the search for the largest batch, which a test above covers.
SCRIPT = """
import runpy, sys
import jax
from bert_jax.parallel import chip_figures
from bert_jax.planning import estimate
from bert_jax.runs import run

def fail(*_):
  raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate')

run.run, chip_figures.memory_limit = fail, lambda device: 10_000
estimate.largest_rows = lambda *_: (0, 0)
sys.argv = ['main', '--config=tests/tiny.py', '--workdir=x', '--config.train_steps=7']
runpy.run_module('bert_jax.main', run_name='__main__')
"""


@pytest.mark.slow
def test_main_prints_one_line_if_memory_runs_out():
  done = subprocess.run([sys.executable, '-c', SCRIPT], cwd=ROOT, capture_output=True, text=True,
                        env={**os.environ, 'XLA_FLAGS': conftest.xla_flags(1)})
  assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
  assert done.stderr.startswith('bert_jax: out of memory: a step of 8 rows of 32 needs 0.0 GiB')
  assert 'not even one row fits' in done.stderr
