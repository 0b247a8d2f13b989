"""LoRA as users run it: resumed with the same bits, merged on export, planned."""

import json
import pathlib
import shutil
import types

from etils import epath
import jax
import numpy as np
import pytest
from scipy import special

from bert_jax import config_fields
from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import conversion
from bert_jax.interop import load as load_lib
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import programs
from bert_jax.runs import finetune, frozen_base, resolve, run
from bert_jax.tasks import sequence_classification
from bert_jax.training import loop
from tests import conftest, made_tasks
from tests.runs import test_finetune

LORA = {'lora.rank': 2, 'lora.targets': ('qkv', 'up')}
TEXTS = ['w4 w5 good', 'w1 bad', 'good bad w2']


@pytest.fixture(scope='module', autouse=True)
def two_devices():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, 'make_mesh', lambda **_: conftest.sub_mesh(2, 1))
    yield


def make_config(model, folder, **overrides):
  return test_finetune.make_config(
      'sequence_classification', model, folder,
      **{**LORA, 'train_epochs': 0.0, 'train_steps': 60, 'checkpoint_every': 20, 'eval_every': 60,
         'log_every': 20, 'model.dropout': 0.1, 'keep_best': '', 'optimizer.learning_rate': 1e-2,
         **overrides})


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """(folder of the model that the run starts from, config, its workdir)."""
  folder = tmp_path_factory.mktemp('lora')
  model = made_tasks.model(folder / 'model')
  c = make_config(model, folder)
  run.run(c, str(folder / 'run'))
  return folder / 'model', c, folder / 'run'


def arrays(folder):
  return {path: np.asarray(x) for path, x in
          jax.tree_util.tree_leaves_with_path(load_lib.load(str(folder)).params)}


@pytest.mark.medium
def test_the_merged_model_gives_the_logits_of_the_run(finished, tmp_path):
  source, c, workdir = finished
  start, end = arrays(source), arrays(workdir)
  changed = {jax.tree_util.keystr(path, simple=True, separator='/').removeprefix('params/bert/')
             for path, x in start.items() if not np.array_equal(x, end[path])}
  assert changed == {'layers/attention/qkv_kernel', 'layers/feed_forward/up/kernel',
                     'pooler/kernel', 'pooler/bias'}  # all others keep their bits
  ours = bert_lib.load(str(workdir))
  assert test_finetune.last_scores(workdir)['eval_accuracy'] == 1
  conversion.convert(str(workdir), str(tmp_path / 'hf'), 'huggingface')
  theirs = bert_lib.load(str(tmp_path / 'hf'))
  np.testing.assert_array_equal(*(sequence_classification.class_logits(bert, TEXTS)
                                  for bert in (ours, theirs)))
  # The logits of the merged model give the loss that the run measured with its factors.
  rows = [line.split('\t') for line in pathlib.Path(c.data.eval).read_text().split('\n')[1:-1]]
  logits = sequence_classification.class_logits(ours, [row[0] for row in rows])
  gold = [ours.model.labels.index(row[1]) for row in rows]
  loss = -special.log_softmax(logits.astype(np.float64), -1)[np.arange(len(gold)), gold].mean()
  np.testing.assert_allclose(test_finetune.last_scores(workdir)['eval_loss'], loss, rtol=1e-4)


def test_a_killed_run_resumes_exactly_without_its_source(finished, tmp_path, monkeypatch):
  source, c, workdir = finished
  shutil.copytree(source, tmp_path / 'model')
  c = c.copy_and_resolve_references()
  c.init_from = str(tmp_path / 'model')
  save = loop.Checkpoints.save

  def killed(self, state, step):
    save(self, state, step)
    if step == 40:
      self.wait()
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(loop.Checkpoints, 'save', killed)
    with pytest.raises(KeyboardInterrupt):
      run.run(c, str(tmp_path / 'run'))
  shutil.rmtree(tmp_path / 'model')
  run.run(c, str(tmp_path / 'run'))
  ends = [json.loads((folder / 'checkpoints/60/fingerprints/metadata').read_text())['arrays']
          for folder in (workdir, tmp_path / 'run')]
  assert ends[0] == ends[1]
  names = set(ends[0]['params'])
  assert not any('embeddings' in name or name.endswith('_kernel') for name in names)
  assert {name.rpartition('/')[2] for name in names} == {'lora_a', 'lora_b', 'kernel', 'bias'}
  whole, again = arrays(workdir), arrays(tmp_path / 'run')
  assert all(np.array_equal(x, again[path]) for path, x in whole.items())


def test_a_damaged_base_is_refused(finished, tmp_path):
  _, c, workdir = finished
  shutil.copytree(workdir, tmp_path / 'run')
  path = tmp_path / 'run/base/bert.json'
  path.write_text(path.read_text().replace('"groups"', '"group"'))
  for use in (lambda: run.run(c, str(tmp_path / 'run')),
              lambda: load_lib.load(str(tmp_path / 'run'))):
    with pytest.raises(UserError, match='base/bert.json is damaged'):
      use()


@pytest.mark.medium
def test_a_run_without_checkpoints_starts_from_the_current_init_from(finished, tmp_path):
  source, c, _ = finished
  workdir, c = tmp_path / 'run', c.copy_and_resolve_references()
  c.train_steps, c.data.eval = 1, ''
  c.optimizer.warmup_ratio = 0.0
  run.run(c, str(workdir))
  before = arrays(workdir / 'base')
  shutil.rmtree(workdir / 'checkpoints')
  c.init_from = made_tasks.model(tmp_path / 'other', initializer_range=0.2)
  run.run(c, str(workdir))
  after = arrays(workdir / 'base')
  other = arrays(tmp_path / 'other')
  assert all(np.array_equal(x, other[path]) for path, x in after.items())
  assert any(not np.array_equal(x, before[path]) for path, x in after.items())


@pytest.mark.slow
def test_continued_pretraining_changes_only_layers_and_heads(corpus_file, tmp_path):
  short = {'train_steps': 2, 'optimizer.warmup_steps': 1}
  run.run(conftest.tiny_config(corpus_file, **short), str(tmp_path / 'first'))
  c = conftest.tiny_config(corpus_file, **short, **LORA, init_from=str(tmp_path / 'first'))
  run.run(c, str(tmp_path / 'second'))
  start, end = arrays(tmp_path / 'first'), arrays(tmp_path / 'second')
  assert start.keys() == end.keys()
  changed = {path[2].key if path[1].key == 'bert' else path[1].key for path, x in start.items()
             if not np.array_equal(x, end[path])}
  assert changed == {'layers', 'pooler', 'mlm_dense', 'mlm_norm', 'mlm_bias', 'nsp'}


@pytest.mark.medium
def test_a_resumed_student_keeps_its_own_base(corpus_file, tmp_path):
  short = {'train_steps': 2, 'optimizer.warmup_steps': 1}
  for seed, name in enumerate(('teacher', 'start')):
    run.run(conftest.tiny_config(corpus_file, **short, seed=seed), str(tmp_path / name))
  c = conftest.tiny_config(
      corpus_file, **short, **LORA, init_from=str(tmp_path / 'start'), objective='distillation',
      teacher=str(tmp_path / 'teacher'), allow_schedule_change=True)
  c.data.source = str(tmp_path / 'teacher/corpus')  # both were trained on its records
  run.run(c, str(tmp_path / 'run'))
  base = arrays(tmp_path / 'run/base')
  c.train_steps = 3
  run.run(c, str(tmp_path / 'run'))
  for path, x in arrays(tmp_path / 'run/base').items():
    np.testing.assert_array_equal(x, base[path])


@pytest.mark.medium
def test_a_plan_counts_no_moments_of_frozen_parameters(finished, tmp_path):
  source, c, _ = finished
  mesh = conftest.sub_mesh(1, 1)
  arguments = {}
  for rank in (0, 2):
    c, model = resolve.with_model(config_fields.changed(c, {'lora.rank': rank}), mesh)
    job = finetune.make_job(c, model, mesh, epath.Path(tmp_path))
    work = programs.finetuning(c, job.data, job.train_steps)
    arguments[rank] = programs.train_step(work, c, mesh).memory['arguments']
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  frozen = count(work.task.frozen)
  factors = 2 * 2 * (32 + 96 + 32 + 64)  # 2 layers, rank 2
  # LoRA drops two moments of each frozen parameter and adds each factor with its two moments.
  assert arguments[0] - arguments[2] == 4 * (2 * frozen - 3 * factors)


@pytest.mark.parametrize('fields, line', [
    ({'lora.targets': ('query',)}, "lora.targets: 'query' matches no kernel of this model, it has "
                                   'attention, down, feed_forward, out, qkv, up'),
    ({'reinit_layers': 1}, 'reinit_layers=1 changes parameters that lora.rank=2 freezes'),
    ({'embedding_init': 'x'}, 'embedding_init=x changes parameters that lora.rank=2 freezes'),
])
def test_mistakes_are_refused(finished, tmp_path, fields, line):
  source, _, _ = finished
  c = make_config(str(source), tmp_path, **fields)
  with pytest.raises(UserError, match=line):
    run.run(c, str(tmp_path / 'run'))
  assert not list((tmp_path / 'run').glob('checkpoints/*'))


def test_the_workdir_of_a_run_without_lora_is_refused(finished, tmp_path):
  """It has checkpoints, so the run loads no other model. It has no base."""
  _, c, _ = finished
  with pytest.raises(UserError, match=r'run holds a run with lora.rank=0 \(now 2\)'):
    frozen_base.with_lora(types.SimpleNamespace(start=None), c, epath.Path(tmp_path / 'run'))


def test_lora_pretraining_without_init_from_is_refused(corpus_file, tmp_path):
  c = conftest.tiny_config(corpus_file, **LORA)
  with pytest.raises(UserError, match='lora.rank=2 freezes a pretrained model: give its folder as'):
    run.run(c, str(tmp_path / 'run'))
