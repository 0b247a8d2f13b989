"""Runs whose length is a number of minutes."""

import itertools
import json
import re
import types

from etils import epath
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run, time_budget
from bert_jax.training import integrity, loop
from tests import conftest


@pytest.fixture(autouse=True)
def steps_of_a_tenth_of_a_second(monkeypatch):
  """A clock that advances by a second at each reading: ten timed steps take a second.

  The runs use one device: eight take longer to compile.
  """
  monkeypatch.setattr(mesh_lib, 'make_mesh', lambda **_: conftest.sub_mesh(1, 1))
  seconds = itertools.count()
  monkeypatch.setattr(time_budget, 'time', types.SimpleNamespace(monotonic=lambda: next(seconds)))


def config(corpus_file, minutes, **overrides):
  return conftest.tiny_config(corpus_file, **{
      'train_steps': 0, 'train_minutes': minutes, 'optimizer.warmup_steps': 0,
      'optimizer.warmup_ratio': 0.5, **overrides})


def last_arrays(workdir, step):
  return integrity.description(epath.Path(workdir / f'checkpoints/{step}'))['arrays']


@pytest.mark.slow
def test_a_run_by_minutes_equals_a_run_by_steps(corpus_file, tmp_path, monkeypatch, capsys):
  # The warm steps take a second, then one step, then ten: 0.1 s each.
  run.run(config(corpus_file, 0.021), str(tmp_path / 'measured'))
  assert 'train_minutes=0.021 are 12 steps, 0.1 s each' in capsys.readouterr().out
  saved = json.loads((tmp_path / 'measured/run.json').read_text())['config']
  assert (saved['train_steps'], saved['train_minutes']) == (12, 0.021)
  run.run(config(corpus_file, 0.0, train_steps=12), str(tmp_path / 'ordinary'))
  assert last_arrays(tmp_path / 'measured', 12) == last_arrays(tmp_path / 'ordinary', 12)
  # The same command does not measure again, whatever the speed of the machine is now.
  monkeypatch.setattr(time_budget, '_seconds_per_step', None)
  run.run(config(corpus_file, 0.021), str(tmp_path / 'measured'))
  out = capsys.readouterr().out
  assert '12 steps, as measured when the run began' in out and 'holds the whole run' in out
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 0.1)
  with pytest.raises(UserError, match=r'train_minutes=0.021 \(now 0.031\), train_steps=12 \('):
    run.run(config(corpus_file, 0.031), str(tmp_path / 'measured'))


def test_one_batch_of_each_shape_compiles_before_the_clock_starts():
  shapes = [(2, 8), (2, 8), (3, 8), (2, 8), (4, 8)]
  batches = time_budget._one_of_each_shape(lambda step: {'ids': np.zeros(shapes[step])}, range(5))
  assert [batch['ids'].shape for batch in batches] == [(2, 8), (3, 8), (4, 8)]


def test_changed_rows_or_minutes_are_measured_again(corpus_file, tmp_path, monkeypatch):
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 2.0)
  c = config(corpus_file, 1.0, phases=((3, 16, 8), (1, 32, 8)))
  before = {**c.to_dict(), 'train_steps': 600, 'phases': [[450, 16, 8], [150, 32, 8]]}
  for change, steps in ({}, 600), ({'phases': [[450, 16, 8], [150, 32, 4]]}, 30), (
      {'train_minutes': 2.0}, 30):
    fields, (note,) = time_budget.fixed_steps(c, before | change, None, None)
    assert f' are {steps} steps, ' in note and fields['train_steps'] == steps
    assert sum(phase[0] for phase in fields['phases']) == steps
  _, (note,) = time_budget.fixed_steps(c, {}, None, None)
  assert ' are 30 steps, 2 s each' in note


def train_nothing(job, config, mesh, workdir, checkpoints, initial):
  """Replaces the training loop."""
  del job, config, mesh, workdir, initial
  checkpoints.close()


def test_the_warmup_shrinks_with_the_run(corpus_file, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 0.1)
  monkeypatch.setattr(loop, 'train', train_nothing)
  for minutes, warmup in ((0.0101, 2), (0.101, 4)):  # 6 of the 12 steps of the config file, and 60
    c = conftest.tiny_config(corpus_file, train_minutes=minutes)
    run.run(c, str(tmp_path / f'{minutes}'), {'train_minutes': 0.0})
    c = json.loads((tmp_path / f'{minutes}/run.json').read_text())['config']
    assert (c['train_steps'], c['optimizer']['warmup_steps']) == (int(600 * minutes), warmup)
  output = capsys.readouterr().out
  assert 'train_minutes=0.0101 instead of train_steps=12' in output
  assert output.count('warmup of 4 of 12 steps scaled to 2 of 6') == output.count('warmup of') == 1


def test_the_warmup_shrinks_with_the_epochs(corpus_file, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(loop, 'train', train_nothing)
  c = conftest.tiny_config(corpus_file, train_epochs=0.05)
  run.run(c, str(tmp_path / 'run'), {'train_epochs': 0.0})
  saved = json.loads((tmp_path / 'run/run.json').read_text())['config']
  output = capsys.readouterr().out
  steps = int(re.search(r'steps +(\d+): ', output)[1])
  assert 0 < steps < 12 and saved['optimizer']['warmup_steps'] == round(4 * steps / 12)
  assert f'warmup of 4 of 12 steps scaled to {round(4 * steps / 12)} of {steps}' in output


@pytest.mark.medium
def test_a_warmup_longer_than_the_measured_run_is_refused(corpus_file, tmp_path):
  c = config(corpus_file, 0.021, **{'optimizer.warmup_steps': 2**31 - 1,
                                    'optimizer.warmup_ratio': 0.0})
  with pytest.raises(UserError, match='warmup_steps=2147483647 leaves nothing of the 12 training'):
    run.run(c, str(tmp_path / 'run'))


def test_minutes_or_epochs_of_too_many_steps_are_refused(corpus_file, tmp_path):
  with pytest.raises(UserError, match='the run would have 600,000,000,000 steps, and can have 2,1'):
    run.run(config(corpus_file, 1e9), str(tmp_path / 'run'))
  with pytest.raises(UserError, match='the run would have [0-9,]{13,} steps, and can have 2,147,4'):
    run.run(config(corpus_file, 0.0, train_epochs=1e9), str(tmp_path / 'run'))


@pytest.mark.slow
def test_phases_divide_the_steps_by_their_shares(corpus_file, tmp_path):
  # Ten steps of each phase take a second here, whatever their size.
  run.run(config(corpus_file, 0.021, phases=((3, 16, 8), (1, 32, 8))), str(tmp_path / 'run'))
  saved = json.loads((tmp_path / 'run/run.json').read_text())['config']
  assert saved['train_steps'] == 12 and saved['phases'] == [[9, 16, 8], [3, 32, 8]]


def test_mistakes_are_refused(corpus_file, tmp_path):
  with pytest.raises(UserError, match='train_minutes=0.001 is too short: a step takes 0.1 s'):
    run.run(config(corpus_file, 0.001), str(tmp_path / 'run'))
  with pytest.raises(UserError, match='train_steps=12, train_minutes=1.0: give one of'):
    run.run(config(corpus_file, 1.0, train_steps=12), str(tmp_path / 'run'))
  with pytest.raises(UserError, match='train_minutes=inf must be a finite number'):
    run.run(config(corpus_file, float('inf')), str(tmp_path / 'run'))
