"""Programs without data equal the programs of a run; costs follow from one and two layers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data import dataset
from bert_jax.data.phases import Phase
from bert_jax.labelled import packed_examples
from bert_jax.model import architectures
from bert_jax.objectives import objectives
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.parallel import sharding, topology
from bert_jax.planning import estimate, programs, tables, traffic
from bert_jax.runs import pretrain
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from tests import conftest
from tests.labelled import test_packed_examples


def small_config(**overrides):
  c = config_lib.pretraining('tiny')
  c.update_from_flattened_dict({
      'train_steps': 10, 'phases': ((10, 64, 8),), 'model.vocab_size': 1000, 'model.num_layers': 4,
      'model.hidden_size': 64, 'model.num_heads': 2, 'model.intermediate_size': 128,
      'optimizer.warmup_steps': 1, **overrides})
  return c


@pytest.mark.parametrize('overrides', [
    {}, {'masking.unit': 'whole_word', 'masking.final_rate': 0.3, 'data.pack': False}])
def test_planned_batches_have_the_shapes_of_a_run(corpus_file, tmp_path, overrides):
  c = conftest.tiny_config(corpus_file, **overrides)
  corpus = dataset.open_corpus(c.data, c.model.vocab_size, tmp_path, 1)
  phases = config_lib.phases_of(c)
  objective = objectives.create('', c.data.sequences, architectures.make_config(c.model))
  masking = MaskingConfig(**c.masking)
  data = PretrainingData.create(
      Pretraining(objective, masking, pretrain.vocabulary(corpus, masking)), corpus, phases, c.data,
      seed=0, eval_batches=1)
  real = jax.tree.map(lambda x: (x.shape, x.dtype), data.rows(0))
  planned = jax.tree.map(lambda x: (x.shape, x.dtype), programs.pretraining(c, phases[0]).batch)
  assert jax.tree.structure(real) == jax.tree.structure(planned)
  assert jax.tree.leaves(real) == jax.tree.leaves(planned)


def test_the_plan_of_a_fine_tuning_run_has_the_largest_whole_batch():
  """The planned devices may have several hosts, which share a batch."""
  features = test_packed_examples.make(40)
  batches = packed_examples.Batches(features, batch_size=4, pad_id=0, row_multiple=2)
  half = types.SimpleNamespace(train=types.SimpleNamespace(batches=batches), task='task',
                               rows=lambda step: batches.batch(step)[:1])
  work = programs.finetuning(config_lib.finetuning('sequence_classification'), half, 30)
  assert work.phase == Phase(30, batches.length, batches.rows[-1])
  assert work.batch.members.shape == (4, 3) and work.batch.tokens.ids.shape == (
      batches.rows[-1], batches.length)


@pytest.mark.slow
def test_costs_of_all_layers_follow_from_one_and_two():
  mesh = conftest.sub_mesh(2, 1)
  c = small_config(**{'model.num_layers': 3, 'model.scan_unroll': 3})
  work = programs.pretraining(c, Phase(10, 64, 8))
  whole = programs.train_step(work, c, mesh)
  result = estimate.estimate(c, work, mesh)
  np.testing.assert_allclose(result.flops, whole.flops, rtol=0.01)
  np.testing.assert_allclose(
      result.traffic, traffic.total(traffic.operations(whole.program.as_text())), rtol=1e-9)
  sent = sum(x.sent for x in result.collectives)
  parameters = sum(np.prod(x.shape) for x in jax.tree.leaves(
      jax.eval_shape(work.task.init, jax.random.key(0))))
  # Every gradient, 2 (n - 1) / n times in float32. The gradient of the token table has two parts.
  np.testing.assert_allclose(sent, 4 * (parameters + 1024 * 64), rtol=0.001)
  # Forward and backward passes of the products; norms, softmax and dropout come on top.
  model_flops = architectures.make_config(c.model).flops_per_token(64, 0.15) * 8 * 64
  assert 1.0 < 2 * result.flops / model_flops < 1.5


@pytest.mark.medium
def test_every_microbatch_exchanges_its_gradients():
  mesh, sent = conftest.sub_mesh(2, 1), []
  for accumulation in (1, 4):
    c = small_config(**{'model.num_layers': 1, 'optimizer.accumulation': accumulation})
    work = programs.pretraining(c, Phase(10, 64, 4 * 2 * accumulation))
    figures = programs.compile_program(c, work, mesh, programs.Program())
    sent.append(sum(x.sent for x in figures.collectives))
  np.testing.assert_allclose(sent[1], 4 * sent[0], rtol=0.01)


@pytest.mark.parametrize('message, missing', [
    ('Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by',
     4.75 * 2**30),
    # Rounded: the program still does not fit.
    ('Ran out of memory in memory space hbm. Used 15.75G of 15.75G hbm. Exceeded hbm capacity by',
     1),
    ('the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G).',
     4.75 * 2**30)])
def test_the_missing_memory_is_read_from_the_compiler_error(message, missing):
  class Lowered:
    def compile(self):
      raise jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: {message}')

  figures = programs._compile(Lowered(), jax.devices()[0])
  assert figures.memory is None and figures.missing == missing


@pytest.mark.parametrize('share', [0.3, 1.2])
def test_a_flop_count_below_the_formula_is_reported(share):
  """Invented figures of two devices, for two layers, one layer, all layers and the evaluation."""
  mesh, c = conftest.sub_mesh(2, 1), small_config()
  work = programs.pretraining(c, Phase(10, 64, 8))
  for_each_token = work.task.flops_per_token(64)
  own = for_each_token * 64 * 8 / 2
  moves = traffic.Operation('update', 'optimizer', 'add', count=1, bytes=1e6, cycles=0)
  counts = [share * own / 2, share * own / 4, 0, 0]  # four layers: twice the count of two
  result = estimate.estimate(c, work, mesh, lambda steps: [
      programs.Figures(memory={'code': 1}, seconds=1, flops=flops, operations=[moves])
      for flops in counts])
  np.testing.assert_allclose(result.counted_flops, share * own)
  np.testing.assert_allclose(result.flops, max(share, 1) * own)
  shown = dict(tables.lines(result, 0))
  assert ('counted' in shown) == (share < 1)
  if share < 1:
    assert shown['counted'].startswith(
        f'only {tables._amount(share * for_each_token, "FLOP")} for each token')


def test_parameters_are_gathered_before_their_products():
  """The weights are split over 16 chips. By default the compiler makes a loop of the product."""
  pytest.importorskip('libtpu')
  mesh = mesh_lib.make_mesh(devices=topology.get('v5e:4x4'))
  split = mesh_lib.batch_sharding(mesh)
  rows, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
                   for shape in ((16 * 1024, 1024), (1024, 4096)))
  own = 2 * 1024 * 1024 * 4096  # the compiler counts FLOPs in a loop once
  plain, ours = (
      programs._compile(product.lower(rows, weights), mesh.devices.flat[0]).flops
      for product in (jax.jit(jnp.matmul, out_shardings=split),
                      sharding.with_mesh(jnp.matmul, mesh, 'fsdp', out_shardings=split)))
  assert plain < own / 3 and ours == own


@pytest.mark.slow
@pytest.mark.parametrize('preset, model', [('fsdp', 1), ('fsdp_tp', 2)])
def test_no_loop_hides_flops(preset, model):
  pytest.importorskip('libtpu')
  mesh = mesh_lib.make_mesh(model=model, devices=topology.get('v5e:4x4'))
  c = config_lib.pretraining('large')
  c.update_from_flattened_dict({'sharding': preset, 'model.num_layers': 1, 'model.vocab_size': 2048,
                                'model.dtype': 'bfloat16'})
  work = programs.pretraining(c, Phase(10, 128, 128))
  figures = programs.compile_program(c, work, mesh, programs.Program(layers=1))
  assert 1.0 < figures.flops * mesh.size / (work.task.flops_per_token(128) * 128 * 128) < 1.3
