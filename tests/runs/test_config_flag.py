"""Overrides on a command line: repeated ones, values of a wrong type, misspelt names."""

import re
import types

from absl import flags
from ml_collections import config_flags
import pytest

from bert_jax import config as config_lib
from bert_jax.commands import command, config_flag
from bert_jax.errors import UserError
from tests import conftest


def parsed(*overrides):
  """(the config, the values of given fields) of tests/tiny.py with overrides."""
  argv = ['main', '--config=tests/tiny.py', *(f'--config.{override}' for override in overrides)]
  values = flags.FlagValues()
  flag = config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
  values(argv)
  return flag.value, config_flags.get_override_values(values['config'])


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
  monkeypatch.chdir(config_flag.__file__.rsplit('/', 3)[0])


@pytest.mark.parametrize('field, values, last', [
    ('trackers', ('tensorboard', 'wandb'), ('wandb',)),
    ('trackers', ('tensorboard,wandb', '()'), ()),
    ('lora.targets', ('qkv,out', 'up', 'down,gate'), ('down', 'gate')),
    ('phases', ('((1,16,8),(1,32,8))', '((12,32,8),)'), ((12, 32, 8),)),
    ('phases', ('((12,32,8),)', '()', '((1,16,8),(1,32,8))'), ((1, 16, 8), (1, 32, 8))),
    ('profile_steps', ('1,2', '3,4'), (3, 4)), ('train_steps', ('3', '4'), 4),
    ('data.lowercase', ('true', 'false'), False)])
def test_the_last_of_repeated_overrides_wins(field, values, last):
  config, given = parsed('seed=1', *(f'{field}={value}' for value in values), 'log_every=7')
  assert config_lib.flat(config)[field] == given[field] == last
  assert (config.seed, config.log_every) == (1, 7) and set(given) == {'seed', field, 'log_every'}


def test_every_repeated_override_must_be_valid():
  with pytest.raises(flags.IllegalFlagValueError, match='is not a list: give a,b,c'):
    parsed('trackers=((a', 'trackers=wandb')


def test_two_configs_are_refused():
  with pytest.raises(UserError, match='--config=a.py and --config=b.py: give one of them'):
    config_flag.explain(['main', '--config=a.py', '--config=b.py', '--config.seed=1'])


@pytest.mark.parametrize('override, line', [
    ('data.lowercase=yes', 'flag --config.data.lowercase=yes: give true or false'),
    ('allow_schedule_change=', 'flag --config.allow_schedule_change=: give true or false'),
    ('data.pack=2', 'flag --config.data.pack=2: give true or false'),
    ('train_steps=1e3', 'flag --config.train_steps=1e3: give a whole number'),
    ('seed=', 'flag --config.seed=: give a whole number'),
    ('masking.rate=15%', 'flag --config.masking.rate=15%: give a number')])
def test_values_of_a_wrong_type_are_refused(override, line):
  with pytest.raises(flags.IllegalFlagValueError) as caught:
    parsed(override)
  assert command._explained(caught.value) == line


CONFIGS = types.SimpleNamespace(pretrain=config_lib.pretraining('tiny'),
                                tune=config_lib.finetuning('sequence_classification'))


@pytest.mark.parametrize('name, nearest', [
    ('batch_siz', 'batch_size'), ('data.batch_size', 'batch_size'), ('steps', 'train_steps'),
    ('data.train_step', 'train_steps'), ('optimiser.b1', 'optimizer.b1'),
    ('learning_rate', 'optimizer.learning_rate'), ('optimizer.rate', 'optimizer.learning_rate'),
    ('lr', 'optimizer.learning_rate'), ('model.layers', 'model.num_layers'),
    ('model.heads', 'model.num_heads'), ('model.drop', 'model.dropout'),
    ('masking.ratio', 'masking.rate'), ('model.rate', 'masking.rate'),
    ('optimizer.layers', 'optimizer.frozen_layers'), ('lora.target', 'lora.targets')])
def test_a_hint_names_a_field_of_the_same_group_first(name, nearest):
  with pytest.raises(UserError) as caught:
    config_lib.check_overrides(CONFIGS.pretrain, [f'--config.{name}=1'])
  assert str(caught.value) == (
      f'unknown config field --config.{name}: did you mean --config.{nearest}?')


@pytest.mark.parametrize('name, group', [
    ('data.xyz', 'data.'), ('mesh.batch', 'mesh.'), ('masking.prob', 'masking.'), ('xyz', '')])
def test_an_unknown_field_without_a_near_match_lists_its_group(name, group):
  with pytest.raises(UserError) as caught:
    config_lib.check_overrides(CONFIGS.pretrain, [f'--config.{name}=1'])
  named = str(caught.value).partition('known are ')[2].split(', ')
  assert named == [field for field in config_lib.flat(CONFIGS.pretrain) if field.startswith(group)]


@pytest.mark.parametrize('name', ['masking.prob', 'masking.ratio', 'masking.max_pred'])
def test_a_group_that_the_config_lacks_gets_no_hint(name):
  with pytest.raises(UserError, match='known are '):
    config_lib.check_overrides(CONFIGS.tune, [f'--config.{name}=1'])


@pytest.mark.parametrize('field, value, most', [
    ('train_steps', 3_000_000_000, 2**31 - 1), ('batch_size', 3_000_000_000, 2**31 - 1),
    ('seed', 2**32, 2**32 - 1), ('eval_every', 2**31, 2**31 - 1), ('max_len', 2**31, 2**31 - 1),
    ('optimizer.warmup_steps', 2**31, 2**31 - 1), ('masking.span_max', 2**40, 2**31 - 1)])
def test_too_large_whole_numbers_are_refused(field, value, most):
  config_lib.check(conftest.tiny_config('x', seed=2**32 - 1))
  with pytest.raises(UserError, match=f'^{field}={value} must be at most {most}$'):
    config_lib.check(conftest.tiny_config('x', **{field: value}))


@pytest.mark.parametrize('field, value', [
    ('model.initializer_range', 1e300), ('optimizer.eps', 1e-300), ('lora.alpha', 1e39),
    ('model.layer_norm_eps', 1e-50), ('optimizer.weight_decay', -1e40)])
def test_numbers_outside_the_range_of_float32_are_refused(field, value):
  config_lib.check(conftest.tiny_config('x', **{field: 1e-30}))
  with pytest.raises(UserError, match=f'^{re.escape(f"{field}={value}")} must have a magnitude'):
    config_lib.check(conftest.tiny_config('x', **{field: value}))
