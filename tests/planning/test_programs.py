"""Programs without data are those of a run; costs follow from one and two layers."""

import os
import pathlib
import signal

import jax
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data import dataset
from bert_jax.data.phases import Phase
from bert_jax.errors import Failed
from bert_jax.objectives import catalogue
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.planning import children
from bert_jax.planning import estimate
from bert_jax.planning import programs
from bert_jax.tasks.pretraining import Pretraining
from tests import conftest


def small_config(**overrides):
  c = config_lib.pretraining('tiny')
  c.update_from_flattened_dict({
      'train_steps': 10, 'phases': ((10, 64, 8),), 'model.vocab_size': 1000, 'model.num_layers': 4,
      'model.hidden_size': 64, 'model.num_heads': 2, 'model.intermediate_size': 128, **overrides})
  return c


@pytest.mark.parametrize('overrides', [
    {}, {'masking.unit': 'whole_word', 'masking.final_rate': 0.3, 'data.pack': False}])
def test_shapes_are_those_of_a_run(corpus_file, tmp_path, overrides):
  c = conftest.tiny_config(corpus_file, **overrides)
  corpus = dataset.open_corpus(c.data, c.model.vocab_size, tmp_path, 1)
  phases = config_lib.phases_of(c)
  task = Pretraining.create(
      catalogue.create('', c.data.sequences, config_lib.bert_config(c.model)),
      MaskingConfig(**c.masking), corpus, phases, seed=0, eval_batches=1, pack=c.data.pack,
      sequences=c.data.sequences)
  real = jax.tree.map(lambda x: (x.shape, x.dtype), task.rows(0))
  planned = jax.tree.map(lambda x: (x.shape, x.dtype), programs.pretraining(c, phases[0]).batch)
  assert jax.tree.structure(real) == jax.tree.structure(planned)
  assert jax.tree.leaves(real) == jax.tree.leaves(planned)


def test_costs_of_all_layers_follow_from_one_and_two():
  mesh = conftest.sub_mesh(2, 1)
  c = small_config(**{'model.num_layers': 3, 'model.scan_unroll': 3})
  work = programs.pretraining(c, Phase(10, 64, 8))
  whole = programs.train_step(work, c, mesh)
  found = estimate.estimate(c, work, mesh)
  np.testing.assert_allclose(found.flops, whole.flops, rtol=0.01)
  np.testing.assert_allclose(found.traffic, whole.traffic, rtol=0.05)
  sent = sum(x.sent for x in found.collectives)
  parameters = sum(np.prod(x.shape) for x in jax.tree.leaves(
      jax.eval_shape(work.task.init, jax.random.key(0))))
  # Every gradient, 2 (n - 1) / n of them in float32; the token table's comes in two parts.
  np.testing.assert_allclose(sent, 4 * (parameters + 1024 * 64), rtol=0.001)
  # Forward and backward passes of the products; norms, softmax and dropout come on top.
  model_flops = config_lib.bert_config(c.model).flops_per_token(64, 0.15) * 8 * 64
  assert 1.0 < 2 * found.flops / model_flops < 1.5


@pytest.mark.parametrize('message', [
    'Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by',
    'the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G).'])
def test_what_does_not_fit_is_told_by_the_compiler(message):
  class Lowered:
    def compile(self):
      raise jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: {message}')

  with pytest.raises(programs.OutOfMemory) as e:
    programs._compile(Lowered())
  assert (e.value.used - e.value.limit) / 2**30 == 4.75


def _dies(marker, always):
  if always or not os.path.exists(marker):
    pathlib.Path(marker).touch()
    os.kill(os.getpid(), signal.SIGSEGV)
  return 'done'


def test_a_compiler_that_crashes_is_tried_again(tmp_path):
  assert children.run([(_dies, (str(tmp_path / 'once'), False)), (abs, (-3,))]) == ['done', 3]
  with pytest.raises(Failed, match='crashed twice'):
    children.run([(_dies, (str(tmp_path / 'always'), True))])
