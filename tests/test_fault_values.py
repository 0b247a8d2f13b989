"""tests.faults can draw random values for every field of the configs."""

import random

import pytest

from bert_jax import config
from bert_jax.config import flat
from tests import made_tasks
from tests.faults import configs


@pytest.mark.parametrize('task', ['pretrain', *made_tasks.FILES])
def test_each_field_has_several_random_values(task):
  fields = flat(config.pretraining('tiny') if task == 'pretrain' else config.finetuning(task))
  for name, value in fields.items():
    drawn = {configs.value_of(random.Random(seed), name, 0 if value is None else value)
             for seed in range(20)}
    assert len(drawn) > 1, name
