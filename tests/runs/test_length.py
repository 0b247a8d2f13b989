"""One flag shortens a run, and the summary names the changes."""

import pathlib
import runpy

import pytest

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data import phases as phases_lib
from bert_jax.errors import UserError
from bert_jax.runs import resolve
from bert_jax.training import optimizer
from tests import conftest

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / 'configs').glob('*.py'))


@pytest.mark.parametrize('phases, steps, counts', [
    (((900, 128, 8), (100, 512, 8)), 10, [9, 1]),
    (((900, 128, 8), (100, 512, 8)), 1001, [901, 100]),
    (((900, 128, 8), (100, 512, 8)), 4, [3, 1]), (((1, 8, 8), (1, 8, 4), (1, 8, 2)), 10, [4, 3, 3]),
    (((1, 8, 8), (1, 8, 8), (98, 8, 8)), 3, [1, 1, 1]),
    (((20_000, 8, 1), (20_000, 8, 2), (20_000, 8, 3), (340_000, 8, 4)), 100, [5, 5, 5, 85])])
def test_phases_scale_by_their_shares(phases, steps, counts):
  scaled = phases_lib.scaled(phases, steps)
  assert [p[0] for p in scaled] == counts and sum(counts) == steps
  assert [p[1:] for p in scaled] == [p[1:] for p in phases]


def test_only_the_longest_phases_stay_in_a_run_of_fewer_steps():
  phases = ((20, 8, 1), (20, 8, 2), (30, 8, 3), (340, 8, 4))
  assert phases_lib.scaled(phases, 1) == ((1, 8, 4),)
  assert phases_lib.scaled(phases, 2) == ((1, 8, 3), (1, 8, 4))
  assert phases_lib.scaled(phases, 3) == ((1, 8, 1), (1, 8, 3), (1, 8, 4))


def fitted(config, **overrides):
  """(a config whose fields a command line changes, the notes on it)."""
  given = {name: config_lib.flat(config)[name] for name in overrides}
  return resolve.fitted(config_fields.changed(config, overrides), given)


@pytest.mark.parametrize('steps', [1, 2, 7, 60])
@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_one_flag_shortens_every_config(path, steps):
  c = runpy.run_path(str(path))['get_config']()
  if c.task != 'pretrain':
    c.data.train = 'x'
  elif c.objective == 'distillation':
    c.teacher = 'x'
  before = c
  c, notes = fitted(before, train_steps=steps)
  config_lib.check(c)
  assert [c[name] for name in config_lib.LENGTHS] == [steps, 0, 0]
  schedule = optimizer.learning_rate(optimizer.OptimizerConfig(**c.optimizer), steps)
  assert float(schedule(0)) > 0 or steps > 1
  assert sum(p.steps for p in config_lib.phases_of(c)) == steps
  # The notes name every change, and nothing else changed.
  text = ' '.join(notes)
  for name, note in (('phases', 'phases of '), ('optimizer.warmup_steps', 'warmup of '),
                     ('train_epochs', 'instead of train_epochs='),
                     ('train_minutes', 'instead of train_minutes=')):
    changed = config_lib.flat(c)[name] != config_lib.flat(before)[name]
    assert (note in text) == changed, name
  free = (*config_lib.LENGTHS, 'phases', 'optimizer.warmup_steps')
  assert all(config_lib.flat(c)[name] == value for name, value in config_lib.flat(before).items()
             if name not in free)


def test_train_steps_shortens_a_run_of_phases():
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=1000)
  assert notes == [
      'phases of 1,000,000 steps scaled to 1,000',
      'warmup of 10,000 of 1,000,000 steps scaled to 10 of 1,000']
  assert c.phases == ((900, 128, 256), (100, 512, 256)) and c.optimizer.warmup_steps == 10
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=1)
  assert notes[0] == (
      'phases of 1,000,000 steps scaled to 1, without the 1 shortest')
  assert c.phases == ((1, 128, 256),) and c.optimizer.warmup_steps == 0


@pytest.mark.parametrize('phases, rows', [
    ((), 512), (((1, 128, 256),), 128), (((3, 64, 256), (1, 128, 256)), 64)])
def test_given_phases_scale_the_warmup(phases, rows):
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=400, phases=phases)
  assert notes[-1] == 'warmup of 10,000 of 1,000,000 steps scaled to 4 of 400'
  assert config_lib.phases_of(c)[0].max_len == rows and c.optimizer.warmup_steps == 4


def test_two_flags_make_base_fit_a_laptop():
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=10, batch_size=8)
  assert c.phases == ((9, 128, 8), (1, 512, 8)) and c.optimizer.warmup_steps == 0
  assert notes[0] == 'batch_size=8 instead of 256 in all phases'
  config_lib.check_effects(c, ['train_steps', 'batch_size'])
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=10, max_len=64)
  assert notes == [
      'phases of 1,000,000 steps scaled to 10',
      'warmup of 10,000 of 1,000,000 steps scaled to 0 of 10']
  with pytest.raises(UserError, match='--config.max_len has no effect here: phases='):
    config_lib.check_effects(c, ['train_steps', 'max_len'])  # the phases have other lengths


def test_a_given_warmup_stays():
  c = config_lib.pretraining('base')
  c, _ = fitted(c, **{'train_steps': 1000, 'optimizer.warmup_steps': 300})
  assert c.phases[0][0] == 900 and c.optimizer.warmup_steps == 300
  c = config_lib.pretraining('base')
  c.train_steps, c.optimizer.warmup_steps = 1000, 300  # in Python, or by a config file
  c, _ = resolve.fitted(c, {})
  assert c.phases[0][0] == 900 and c.optimizer.warmup_steps == 300
  c, _ = fitted(c, train_steps=500)  # and on its command line
  assert c.phases[0][0] == 450 and c.optimizer.warmup_steps == 150


def test_a_longer_run_keeps_its_warmup():
  c = config_lib.pretraining('base')
  c, notes = fitted(c, train_steps=2_000_000)
  assert len(notes) == 1
  assert c.phases[1][0] == 200_000 and c.optimizer.warmup_steps == 10_000


def test_given_phases_scale_to_given_steps():
  c = conftest.tiny_config('x')
  c, notes = fitted(c, phases=((6, 16, 8), (4, 32, 8)), train_steps=5)
  assert notes == [
      'phases of 10 steps scaled to 5', 'warmup of 4 of 12 steps scaled to 2 of 5']
  assert c.phases == ((3, 16, 8), (2, 32, 8))
  config_lib.check(c)


def test_given_phases_alone_set_the_length():
  c = conftest.tiny_config('x')
  c, notes = fitted(c, phases=((3, 16, 8),))
  assert notes[0] == 'train_steps=3, the steps of phases, instead of 12'
  assert c.train_steps == 3 and c.phases == ((3, 16, 8),) and c.optimizer.warmup_steps == 1
  c = conftest.tiny_config('x', train_steps=0, train_minutes=2.0)
  c, notes = fitted(c, phases=((3, 16, 8), (1, 32, 8)))
  assert notes == []  # shares of the minutes
  assert c.train_steps == 0


@pytest.mark.parametrize('of_file, given, note', [
    ({'train_steps': 12}, {'train_epochs': 1.5}, 'train_epochs=1.5 instead of train_steps=12'),
    ({'train_steps': 12}, {'train_minutes': 30.0}, 'train_minutes=30.0 instead of train_steps=12'),
    ({'train_steps': 0, 'train_epochs': 3.0}, {'train_minutes': 1.0},
     'train_minutes=1.0 instead of train_epochs=3.0'),
    ({'train_steps': 0, 'train_minutes': 3.0}, {'train_steps': 5},
     'train_steps=5 instead of train_minutes=3.0'),
    ({'train_steps': 12}, {'train_steps': 0, 'train_epochs': 1.0}, None)])
def test_a_given_length_replaces_the_length_of_the_config_file(of_file, given, note):
  c = conftest.tiny_config('x', **of_file)
  c, notes = fitted(c, **given)
  assert notes == ([note] if note else [])
  config_lib.check(c)
  (name, value), = ((n, v) for n, v in given.items() if v)
  assert {n: c[n] for n in config_lib.LENGTHS if c[n]} == {name: value}


def test_two_given_lengths_are_refused():
  c = conftest.tiny_config('x')
  c, _ = fitted(c, train_steps=5, train_epochs=1.0)
  with pytest.raises(UserError, match='^train_steps=5, train_epochs=1.0: give one of'):
    config_lib.check(c)
  c = conftest.tiny_config('x')
  c, _ = fitted(c, train_epochs=1.0, train_minutes=2.0)
  with pytest.raises(UserError, match='^train_epochs=1.0, train_minutes=2.0: give one of'):
    config_lib.check(c)
