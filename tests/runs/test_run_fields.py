"""Runs in this process: fields of a config that decide what a run does, and refused values."""

import json
import math
import re

import jax
import pytest

import bert_jax
from bert_jax.errors import UserError
from bert_jax.runs import run
from bert_jax.tasks.pretraining_data import PretrainingData
from tests import conftest
from tests.runs.test_run import evaluated, lines


@pytest.mark.medium
@pytest.mark.parametrize('name', ['normuon', *(
    pytest.param(name, marks=pytest.mark.slow) for name in ('muon', 'lamb', 'stable_adamw'))])
def test_a_run_with_every_optimizer_resumes_with_the_same_bits(corpus_file, tmp_path, name):
  def train():
    run.run(conftest.tiny_config(corpus_file, sharding='fsdp_tp', **{
        'mesh.model': 2, 'optimizer.name': name, 'optimizer.decay_ratio': 0.5}),
            str(tmp_path / 'run'))

  conftest.check_resume(train, tmp_path / 'run')
  training = [line['mlm_loss'] for line in lines(tmp_path / 'run') if 'mlm_loss' in line]
  assert training[-1] < training[0]


@pytest.mark.medium
def test_each_phase_has_its_steps_and_length(tmp_path, corpus_file, monkeypatch):
  """Also with microbatches."""
  config = conftest.tiny_config(corpus_file, phases=((4, 16, 16), (4, 32, 16)), train_steps=8,
                                **{'optimizer.accumulation': 2, 'log_every': 1, 'batch_size': 16})
  tokens = []
  make = PretrainingData.create

  def spy(*args, **kwargs):
    task = make(*args, **kwargs)
    rows = task.rows
    object.__setattr__(
        task, 'rows', lambda step: tokens.append(rows(step).tokens.ids.shape) or rows(step))
    return task

  monkeypatch.setattr(PretrainingData, 'create', spy)
  run.run(config, str(tmp_path / 'run'))
  assert tokens == [(16, 16)] * 4 + [(16, 32)] * 4
  assert [x['step'] for x in lines(tmp_path / 'run') if 'loss' in x] == list(range(1, 9))


def test_train_epochs_sets_the_number_of_steps(tmp_path, corpus_file, capsys):
  config = conftest.tiny_config(corpus_file, train_steps=0, train_epochs=0.5)
  run.run(config, str(tmp_path / 'run'))
  out = capsys.readouterr().out
  rows = int(re.search(r'rows of 32 +([\d,]+) an epoch', out)[1].replace(',', ''))
  assert lines(tmp_path / 'run')[-1]['step'] == math.ceil(rows / 2 / 8)


@pytest.mark.parametrize('overrides, message', [
    ({'max_len': 128}, 'max_len=128 is above model.max_positions=64'),
    ({'batch_size': 12}, 'batch_size=12 is not divisible by 8'),
    ({'optimizer.accumulation': 2}, 'batch_size=8 is not divisible by 16'),
    ({'mesh.model': 8, 'mesh.data': 1}, 'model.num_heads=4 is not divisible by mesh.model=8'),
    ({'mesh.data': 3}, 'mesh 1x3x1 .* does not fit the 8 devices'),
    ({'mesh.data': 0}, 'mesh 1x0x1'),
    ({'task': 'translate'}, "task='translate'"),
    ({'sharding': 'zero'}, "sharding='zero'"),
    ({'platform': 'tpu'}, "platform='tpu'"),
    ({'platform': 'npu'}, "platform='npu' is unknown"),
    ({'train_epochs': 1.0}, 'train_steps=12, train_epochs=1.0: give one of train_steps'),
    ({'train_steps': 0}, 'the run has no length: give one of train_steps'),
    ({'phases': ((12, 32),)}, 'phases=.*positive'),
    ({'batch_size': 0}, 'batch_size=0'),
    ({'masking.rate': 2.0}, 'masking.rate=2.0'),
    ({'data.format': 'html'}, "data.format='html'"),
    ({'data.source': '/nowhere/*'}, 'matches no file'),
    ({'optimizer.warmup_steps': 12}, 'warmup_steps=12'),
    ({'init_from': '/nowhere'}, '/nowhere is not a folder here'),
])
def test_mistakes_are_refused_before_any_checkpoint(tmp_path, corpus_file, overrides, message):
  with pytest.raises(UserError, match=message):
    run.run(conftest.tiny_config(corpus_file, **overrides), str(tmp_path / 'run'))
  assert not list((tmp_path / 'run').glob('checkpoints/*'))


def test_a_warmup_longer_than_the_epochs_leaves_no_run_json(corpus_file, tmp_path):
  c = conftest.tiny_config(corpus_file, train_steps=0, train_epochs=1.0)
  c.optimizer.warmup_steps = 10**6
  with pytest.raises(UserError, match='optimizer.warmup_steps=1000000 leaves nothing of the'):
    run.run(c, str(tmp_path / 'run'))
  assert not (tmp_path / 'run/run.json').exists()


def test_a_workdir_that_cannot_be_written_is_refused(tmp_path, corpus_file):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='--workdir=.*/file/run cannot be written'):
    run.run(conftest.tiny_config(corpus_file), str(tmp_path / 'file' / 'run'))


@pytest.mark.medium
@pytest.mark.parametrize('sequences, objective', [('sentence_order', 'sop'),
                                                  ('full_sentences', None)])
def test_each_kind_of_sequences_has_its_objective(tmp_path, corpus_file, sequences, objective,
                                                  capsys):
  config = evaluated(corpus_file, train_steps=2, eval_every=2, **{
      'data.sequences': sequences, 'masking.unit': 'span', 'masking.final_rate': 0.3,
      'masking.random_by_frequency': True, 'optimizer.warmup_steps': 1})
  run.run(config, str(tmp_path / 'run'))
  losses = {key for line in lines(tmp_path / 'run') for key in line if key.endswith('_loss')}
  names = {'mlm_loss', 'eval_mlm_loss'}
  if objective:
    names |= {f'{objective}_loss', f'eval_{objective}_loss'}
  assert losses - {'eval_loss'} == names
  last = [line for line in lines(tmp_path / 'run') if 'loss' in line][-1]
  assert last['loss'] == pytest.approx(sum(last[n] for n in names if not n.startswith('eval')))
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  counted = int(capsys.readouterr().out.split(' parameters')[0].split()[-1].replace(',', ''))
  stored = sum(x.size for x in jax.tree.leaves(bert.params))
  padding = bert.config.padded_vocab_size - bert.config.vocab_size
  assert counted == stored - padding * (bert.config.hidden_size + 1)
  assert len(bert.fill_mask('the [MASK] runs')) == 1
  if not objective:
    with pytest.raises(UserError, match='no next-sentence head'):
      bert.next_sentence([('a', 'b')])


@pytest.mark.medium
def test_a_run_trains_on_a_tfds_data_set(tmp_path, poems, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(poems))
  config = conftest.tiny_config('tfds:poems', train_steps=2, **{'optimizer.warmup_steps': 1})
  run.run(config, str(tmp_path / 'run'))
  assert [line['step'] for line in lines(tmp_path / 'run') if 'loss' in line] == [2]
  manifest = json.loads((tmp_path / 'run/corpus/manifest.json').read_text())
  assert manifest['documents'] == 40


@pytest.mark.medium
def test_profile_steps_writes_a_trace(corpus_file, tmp_path, capsys):
  config = conftest.tiny_config(corpus_file, train_steps=5, profile_steps=(2, 3))
  run.run(config, str(tmp_path / 'run'))
  assert 'steps 2 to 3: tensorboard --logdir=' in capsys.readouterr().out
  traces = list((tmp_path / 'run/tensorboard').rglob('*.xplane.pb'))
  assert len(traces) == 1 and traces[0].stat().st_size > 10_000
  config.profile_steps = (3, 2)
  with pytest.raises(UserError, match='profile_steps=3,2: the last step to trace, 2, is before'):
    run.run(config, str(tmp_path / 'other'))
