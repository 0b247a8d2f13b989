"""Any mesh gives the same losses, though an example's inputs may lie on several devices."""

from etils import epath
import jax
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import finetune, initial, resolve
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest, made_tasks


def losses(config, mesh, preset):
  config, model = resolve.with_model(config, mesh)
  job = finetune.make_job(config, model, mesh, epath.Path('unused'))
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(**config.optimizer), 9)
  init, abstract = state_lib.make_init(job.task, optimizer, mesh, preset)
  state = init(state_lib.root_key(0))
  state = state._replace(params=initial.from_model(state.params, job.start, 'model'))
  step = state_lib.make_train_step(job.task, optimizer, mesh, preset, abstract, seed=0,
                                   accumulation=1)
  sums = []
  for i in range(3):
    state, metrics = step(state, mesh_lib.put_batch(job.data.rows(i), mesh))
    sums.append(metrics['loss'])
  return [float(total / count) for total, count in jax.device_get(sums)]


@pytest.mark.slow
@pytest.mark.parametrize('task', ['multiple_choice', 'sequence_classification',
                                  'sentence_embedding', 'reranking'])
def test_meshes_give_the_same_losses(tmp_path, task):
  c = config_lib.finetuning(task)
  c.update_from_flattened_dict({
      'batch_size': 8, 'max_len': 32, 'optimizer.learning_rate': 1e-3, 'train_epochs': 1.0,
      'init_from': made_tasks.model(tmp_path / 'model'), 'model.dropout': 0.0,
      'model.attention_dropout': 0.0, **made_tasks.files(task, tmp_path, 40, 8)})
  if task == 'sequence_classification':
    c.data.train = made_tasks.sequences(tmp_path / 'long.tsv', 40, 0, length=60)
    c.data.long, c.max_len = 'chunks_mean', 16
  one = losses(c, conftest.sub_mesh(1, 1), 'dp')
  # Four rows instead of one, and another order of sums; the examples are the same.
  for (data, tensor), preset in (((4, 1), 'fsdp'), ((2, 2), 'tp')):
    np.testing.assert_allclose(losses(c, conftest.sub_mesh(data, tensor), preset), one, rtol=2e-5)


def test_scores_with_other_fields_of_the_evaluation_are_not_compared(tmp_path):
  """Only fields that differ from their defaults are named, so older runs stay comparable."""
  files = made_tasks.files('question_answering', tmp_path, 8, 8)
  for n_best, named in ((20, ''), (5, ', data.n_best=5')):
    config = config_lib.finetuning('question_answering')
    config.update_from_flattened_dict({
        'init_from': made_tasks.start(tmp_path / f'model{n_best}', 'question_answering'),
        'batch_size': 4, 'max_len': 24, 'data.doc_stride': 8, 'data.n_best': n_best, **files})
    mesh = conftest.sub_mesh(1, 1)
    config, model = resolve.with_model(config, mesh)
    job = finetune.make_job(config, model, mesh, epath.Path('unused'))
    assert job.data.judged_on(0) == files['data.eval'] + named
