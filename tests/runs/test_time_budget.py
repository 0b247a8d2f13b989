"""Runs whose length is a number of minutes."""

import itertools
import json
import types

from etils import epath
import pytest

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run, time_budget
from bert_jax.training import integrity
from tests import conftest


@pytest.fixture(autouse=True)
def steps_of_a_tenth_of_a_second(monkeypatch):
  """A clock that goes on by a second between two looks; the count of timed steps becomes ten.

  The runs see one device: eight take longer to compile.
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


def test_a_measured_run_is_an_ordinary_one(corpus_file, tmp_path, monkeypatch, capsys):
  # The warm steps take a second, then one step, then ten: 0.1 s each.
  run.run(config(corpus_file, 0.021), str(tmp_path / 'measured'))
  assert 'train_minutes=0.021 are 12 steps, 0.1 s each' in capsys.readouterr().out
  saved = json.loads((tmp_path / 'measured/run.json').read_text())['config']
  assert (saved['train_steps'], saved['train_minutes']) == (12, 0.021)
  run.run(config(corpus_file, 0.0, train_steps=12), str(tmp_path / 'ordinary'))
  assert last_arrays(tmp_path / 'measured', 12) == last_arrays(tmp_path / 'ordinary', 12)
  # The same command measures nothing again, whatever the speed of the machine is now.
  monkeypatch.setattr(time_budget, '_seconds_per_step', None)
  run.run(config(corpus_file, 0.021), str(tmp_path / 'measured'))
  out = capsys.readouterr().out
  assert '12 steps, as measured when the run began' in out and 'holds the whole run' in out
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 0.1)
  with pytest.raises(UserError, match=r'train_minutes=0.021 \(now 0.031\), train_steps=12 \('):
    run.run(config(corpus_file, 0.031), str(tmp_path / 'measured'))


def test_other_rows_are_measured_again(corpus_file, tmp_path, monkeypatch):
  monkeypatch.setattr(time_budget, '_set_steps', lambda config, steps: None)
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 2.0)
  c = config(corpus_file, 1.0, phases=((3, 16, 8), (1, 32, 8)))
  before = {**c.to_dict(), 'train_steps': 600, 'phases': [[450, 16, 8], [150, 32, 8]]}
  for change, steps in ({}, 600), ({'phases': [[450, 16, 8], [150, 32, 4]]}, 30), (
      {'train_minutes': 2.0}, 30):
    (note,) = time_budget.fix_steps(c, {}, {'config': before | change}, None, None)
    assert f' are {steps} steps, ' in note
  (note,) = time_budget.fix_steps(c, {}, {}, None, None)
  assert ' are 30 steps, 2 s each' in note


def test_the_warmup_shrinks_with_the_run(monkeypatch):
  monkeypatch.setattr(time_budget, '_seconds_per_step', lambda *_: 0.06)
  c = config_lib.pretraining('base')
  given = {'train_steps': c.train_steps, 'train_minutes': 0.0}
  c.train_steps, c.train_minutes = 0, 10.0
  notes = time_budget.fix_steps(c, given, {}, None, None)
  assert notes[1] == 'warmup of 10,000 of 1,000,000 steps scaled to 100 of 10,000'
  assert (c.train_steps, c.optimizer.warmup_steps) == (10_000, 100)
  assert c.phases == ((9000, 128, 256), (1000, 512, 256))


@pytest.mark.slow
def test_phases_give_the_shares_of_the_steps(corpus_file, tmp_path):
  # Ten steps of each phase take a second here, whatever their size.
  run.run(config(corpus_file, 0.021, phases=((3, 16, 8), (1, 32, 8))), str(tmp_path / 'run'))
  saved = json.loads((tmp_path / 'run/run.json').read_text())['config']
  assert saved['train_steps'] == 12 and saved['phases'] == [[9, 16, 8], [3, 32, 8]]


def test_mistakes(corpus_file, tmp_path):
  with pytest.raises(UserError, match='train_minutes=0.001 is too short: a step takes 0.1 s'):
    run.run(config(corpus_file, 0.001), str(tmp_path / 'run'))
  with pytest.raises(UserError, match='train_steps=12, train_minutes=1.0: give one of'):
    run.run(config(corpus_file, 1.0, train_steps=12), str(tmp_path / 'run'))
  with pytest.raises(UserError, match='train_minutes=inf must be a finite number'):
    run.run(config(corpus_file, float('inf')), str(tmp_path / 'run'))
