"""The same tests for every member of the family: meshes, resuming, use, fine-tuning, plan."""

import dataclasses
import json
import pathlib

from etils import epath
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.interop import conversion, load
from bert_jax.model.albert import AlbertConfig
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.deberta import DebertaConfig
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.modern import ModernConfig
from bert_jax.model.mpnet import MPNetConfig
from bert_jax.runs import initial, run
from bert_jax.training import checkpoint, integrity
from tests import conftest, made_tasks

_SIZES = dict(vocab_size=200, hidden_size=32, num_heads=4, intermediate_size=64, max_positions=64)
MEMBERS = {
    'roberta': (BertConfig(**_SIZES, architecture='roberta', num_layers=2, type_vocab_size=1),
                {'data.sequences': 'full_sentences'}),
    'mpnet': (MPNetConfig(**_SIZES | {'vocab_size': 300}, num_layers=2),
              {'data.sequences': 'full_sentences', 'data.tokenizer': 'bpe'}),
    'albert': (AlbertConfig(**_SIZES, num_layers=4, groups=2, embedding_size=16),
               {'data.sequences': 'sentence_order', 'masking.unit': 'ngram'}),
    'electra': (ElectraConfig(**_SIZES, num_layers=2, embedding_size=16, generator_size=0.5),
                {'data.sequences': 'full_sentences', 'optimizer.learning_rate': 3e-3}),
    'deberta-v2': (DebertaConfig(**_SIZES, num_layers=2, position_buckets=16),
                   {'data.sequences': 'full_sentences', 'objective': 'replaced_tokens_gdes'}),
    'modernbert': (ModernConfig(**_SIZES, num_layers=4, local_window=8),
                   {'data.sequences': 'full_sentences', 'masking.rate': 0.3}),
    'distilbert': (DistilBertConfig(**_SIZES, num_layers=1),
                   {'data.sequences': 'full_sentences', 'objective': 'distillation'})}


def make_config(member: str, source: str, **more):
  model, overrides = MEMBERS[member]
  config = conftest.tiny_config(source)
  with config.unlocked():
    config.model = config_lib.model(model)
  config.update_from_flattened_dict({**overrides, **more})
  return config


def lines(workdir: pathlib.Path) -> list[dict]:
  return [json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()]


def fingerprints(workdir: pathlib.Path, step: int) -> dict:
  return integrity.description(epath.Path(workdir / f'checkpoints/{step}'))['arrays']


@pytest.fixture(scope='module')
def teacher(tmp_path_factory, corpus_file) -> str:
  workdir = tmp_path_factory.mktemp('teacher') / 'run'
  run.run(conftest.tiny_config(corpus_file), str(workdir))
  return str(workdir)


# The default tests cover the member that differs most from BERT.
_SLOW = ('roberta', 'mpnet', 'distilbert', 'albert', 'electra', 'deberta-v2')


@pytest.fixture(scope='module', params=[
    pytest.param(member, marks=pytest.mark.slow if member in _SLOW else ()) for member in MEMBERS])
def trained(request, tmp_path_factory, corpus_file):
  """(member, maker of its config, workdir) of a run of 12 steps, dp."""
  workdir, overrides = tmp_path_factory.mktemp(request.param) / 'run', {}
  if request.param == 'distilbert':
    overrides['teacher'] = request.getfixturevalue('teacher')

  def new_config(**more):
    return make_config(request.param, corpus_file, **overrides, **more)

  run.run(new_config(sharding='dp'), str(workdir))
  return request.param, new_config, workdir


@pytest.mark.slow
def test_losses_are_the_same_on_another_mesh(trained, tmp_path):
  _, new_config, workdir = trained
  other = new_config(sharding='fsdp_tp', **{'mesh.data': 4, 'mesh.model': 2})
  run.run(other, str(tmp_path / 'run'))
  a, b = ([x['loss'] for x in lines(w) if 'loss' in x] for w in (workdir, tmp_path / 'run'))
  np.testing.assert_allclose(a, b, rtol=2e-4)
  assert a[-1] < a[0]


@pytest.mark.medium
def test_a_resumed_run_ends_with_the_same_bits(trained, tmp_path, monkeypatch):
  _, new_config, workdir = trained
  save = checkpoint.Checkpoints.save

  def stop_after(self, state, step, *args, **kwargs):
    save(self, state, step, *args, **kwargs)
    if step == 8:
      self.close()
      raise KeyboardInterrupt

  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(checkpoint.Checkpoints, 'save', stop_after)
    run.run(new_config(sharding='dp'), str(tmp_path / 'run'))
  run.run(new_config(sharding='dp'), str(tmp_path / 'run'))
  assert fingerprints(tmp_path / 'run', 12) == fingerprints(workdir, 12)


def test_the_loaded_model_encodes_and_fills_masks(trained, tmp_path):
  member, _, workdir = trained
  bert = bert_jax.from_pretrained(str(workdir))
  text = conftest.make_documents(1)[0][0]
  encoded = bert.encode([text])
  assert encoded.hidden.shape[-1] == 32 and np.all(np.isfinite(encoded.hidden))
  layers = bert.embed([text], 'mean', layers=(0, -1))
  assert layers.shape == (1, 64)
  np.testing.assert_allclose(layers[:, 32:], bert.embed([text], 'mean'), atol=1e-5)
  if member in ('electra', 'deberta-v2'):  # the export holds the discriminator
    assert bert.model.groups == (('rtd',) if member == 'electra' else ())
    with pytest.raises(UserError, match='no masked-LM head'):
      bert.fill_mask('[MASK]')
  else:
    assert len(bert.fill_mask(text + ' [MASK]', top_k=3)) == 1


def finetuning_config(task, workdir, tmp_path, **overrides):
  config = config_lib.finetuning(task)
  config.update_from_flattened_dict({
      'init_from': str(workdir), 'batch_size': 8, 'max_len': 32, 'log_every': 1,
      'train_epochs': 0.0, 'train_steps': 3, 'model.scan_unroll': 1,
      **made_tasks.files(task, tmp_path, 16, 8), **overrides})
  return config


# In a ModernBERT a head on tokens reads another input.
@pytest.mark.medium
@pytest.mark.parametrize('task', [
    pytest.param('sequence_classification', marks=pytest.mark.slow), 'token_classification'])
def test_a_fine_tuned_model_is_exported_and_loaded(trained, tmp_path, task):
  member, _, workdir = trained
  if task != 'sequence_classification' and member != 'modernbert':
    pytest.skip('as for BERT, in test_finetune.py')
  run.run(finetuning_config(task, workdir, tmp_path), str(tmp_path / 'run'))
  model = load.load(str(tmp_path / 'run'))
  assert model.task == task and model.config.architecture == member
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'out'), 'huggingface')
  again = load.load(str(tmp_path / 'out'))
  assert (again.task, again.labels) == (model.task, model.labels)
  assert initial.with_head_of(again, task, model.labels) is again  # further training keeps the head
  assert dataclasses.asdict(again.config)['architecture'] == member


def test_layer_decay_is_refused_for_albert_and_modernbert(trained, tmp_path):
  member, _, workdir = trained
  if member not in ('albert', 'modernbert'):
    pytest.skip('its layers are as BERT\'s')
  config = finetuning_config('sequence_classification', workdir, tmp_path,
                             **{'optimizer.layer_decay': 0.9})
  with pytest.raises(UserError, match='optimizer.layer_decay counts layers'):
    run.run(config, str(tmp_path / 'run'))


@pytest.mark.parametrize('member', ['albert', 'modernbert'])
@pytest.mark.slow
def test_estimated_costs_match_the_compiled_program(member):
  from bert_jax.data.phases import Phase
  from bert_jax.planning import estimate, programs

  config = make_config(member, 'builtin', **{'data.pack': False})
  more = {'modernbert': 10, 'albert': 8}.get(member, 4)
  config.update_from_flattened_dict({'model.num_layers': more, 'model.scan_unroll': more})
  mesh, phase = conftest.sub_mesh(2, 1), Phase(10, 64, 8)
  work = programs.pretraining(config, phase)
  costs = estimate.estimate(config, work, mesh)
  np.testing.assert_allclose(costs.flops, programs.train_step(work, config, mesh).flops, rtol=0.02)
  parameters = sum(np.prod(x.shape) for x in jax.tree.leaves(
      jax.eval_shape(work.task.init, jax.random.key(0))))
  assert costs.memory['arguments'] > 3 * 4 * parameters
