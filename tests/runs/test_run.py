"""Whole runs in this process: the files of a workdir, resuming, refusals."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from etils import epath
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.runs import run
from bert_jax.training import integrity
from tests import conftest


def lines(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def evaluated(source, **overrides):
  """A config of runs with evaluations."""
  return conftest.tiny_config(source, **{'data.heldout': 0.1, **overrides})


@pytest.fixture(scope='module')
def finished(tmp_path_factory, corpus_file):
  """A finished run of 12 steps on 8 devices."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  run.run(evaluated(corpus_file), str(workdir))
  return workdir


def test_a_workdir_has_the_files_of_a_run(finished):
  assert {'run.json', 'metrics.jsonl', 'tensorboard', 'curves.png', 'checkpoints', 'tokenizer',
          'corpus'} <= {p.name for p in finished.iterdir()}
  saved = json.loads((finished / 'run.json').read_text())
  assert saved['config']['train_steps'] == 12 and saved['versions']['jax'] == jax.__version__
  assert saved['config']['model']['vocab_size'] <= 200
  assert (finished / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert any(p.name.startswith('events.') for p in (finished / 'tensorboard').iterdir())


def test_metrics_have_the_expected_steps_and_fields(finished):
  training = [line for line in lines(finished) if 'loss' in line]
  held_out = [line for line in lines(finished) if 'eval_loss' in line]
  assert [line['step'] for line in training] == [2, 4, 6, 8, 10, 12]
  assert [line['step'] for line in held_out] == [6, 12]
  for line in training:
    assert set(line) == {'step', 'loss', 'mlm_loss', 'mlm_accuracy', 'nsp_loss', 'nsp_accuracy',
                         'learning_rate', 'grad_norm', 'tokens_per_second', 'mfu', 'data_wait',
                         'skipped_steps'}
    assert line['loss'] == pytest.approx(line['mlm_loss'] + line['nsp_loss'])
    assert line['mfu'] is None  # the peak of a CPU is unknown
  # The rate of the last update before each line: warmup to step 4, then down to 0 at step 12.
  assert [line['learning_rate'] for line in training] == pytest.approx(
      [1e-3 * r for r in (1 / 4, 3 / 4, 7 / 8, 5 / 8, 3 / 8, 1 / 8)])
  assert held_out[0]['eval_unigram_entropy'] > 2


def test_the_last_three_checkpoints_are_kept(finished):
  assert sorted(p.name for p in (finished / 'checkpoints').iterdir()) == ['12', '4', '8']


def test_a_finished_run_prints_that_it_is_finished(finished, corpus_file, capsys):
  before = (finished / 'metrics.jsonl').read_bytes()
  run.run(evaluated(corpus_file), str(finished))
  assert 'holds the whole run of 12 steps' in capsys.readouterr().out
  assert (finished / 'metrics.jsonl').read_bytes() == before


def test_a_finished_run_replaces_a_damaged_checkpoint(finished, corpus_file, tmp_path, capsys):
  """It repeats its last steps with the same bits. Until then readers do not take an older one."""
  workdir = tmp_path / 'run'
  shutil.copytree(finished, workdir)
  whole, before = integrity.check(epath.Path(workdir / 'checkpoints/12')), lines(workdir)
  damaged = next((workdir / 'checkpoints/12/params/d').iterdir())
  damaged.write_bytes(damaged.read_bytes()[:-100])
  with pytest.raises(UserError, match='run/checkpoints/12 is damaged: .*; the next sound one is '
                                      '.*run/checkpoints/8: run main again'):
    bert_jax.from_pretrained(str(workdir))
  assert bert_jax.from_pretrained(str(workdir), step=4).model.facts['steps'] == 4
  assert bert_jax.from_pretrained(str(workdir), allow_older=True).model.facts['steps'] == 8
  assert not (workdir / 'damaged').exists()
  capsys.readouterr()
  run.run(evaluated(corpus_file), str(workdir))
  output = ' '.join(capsys.readouterr().out.split())
  assert 'resumed from step 8, 4 steps are repeated' in output and 'holds the whole' not in output
  assert (workdir / 'damaged/checkpoints-12').is_dir()
  assert integrity.check(epath.Path(workdir / 'checkpoints/12')) == whole
  timed = ('tokens_per_second', 'data_wait')
  assert [{k: v for k, v in x.items() if k not in timed} for x in lines(workdir)] == [
      {k: v for k, v in x.items() if k not in timed} for x in before]
  run.run(evaluated(corpus_file), str(workdir))
  assert 'holds the whole run of 12 steps' in capsys.readouterr().out


def test_a_run_without_a_sound_checkpoint_stays_as_it_is(finished, corpus_file, tmp_path):
  """The second attempt does not start over and cut the metrics either."""
  workdir = tmp_path / 'run'
  shutil.copytree(finished, workdir)
  for checkpoint in (workdir / 'checkpoints').iterdir():
    for path in (checkpoint / 'params/d').iterdir():
      path.write_bytes(path.read_bytes()[:-1])
  before = (workdir / 'metrics.jsonl').read_bytes()
  for message in ('no checkpoint of .* is sound', 'all checkpoints of .* are damaged'):
    with pytest.raises(UserError, match=f'{message}.*: start over with another --workdir'):
      run.run(evaluated(corpus_file), str(workdir))
    assert (workdir / 'metrics.jsonl').read_bytes() == before


def test_a_longer_or_another_run_in_the_same_workdir_is_refused(finished, corpus_file):
  before = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob('[!.]*') if p.is_file())
  for overrides, message in (
      ({'model.hidden_size': 64}, r'model.hidden_size=32 \(now 64\): that is another run'),
      ({'data.lowercase': False}, 'data.lowercase=True, now it is False'),
      ({'data.pack': False}, r'data.pack=True \(now False\): that is another run'),
      ({'seed': 5, 'masking.rate': 0.3, 'log_every': 5},
       r'with masking.rate=0.15 \(now 0.3\), seed=0 \(now 5\): that is another run'),
      ({'train_steps': 14, 'optimizer.learning_rate': 0.1, 'log_every': 5},
       r'with optimizer.learning_rate=0.001 \(now 0.1\), train_steps=12 \(now 14\): every later '
       'learning rate or row changes with it; give --config.optimizer.learning_rate=0.001 '
       '--config.train_steps=12 to continue as before, .* --config.allow_schedule_change=True')):
    with pytest.raises(UserError, match=message):
      run.run(evaluated(corpus_file, **overrides), str(finished))
  with pytest.raises(UserError, match='a run of 12 steps, more than train_steps=10'):
    run.run(evaluated(corpus_file, train_steps=10, allow_schedule_change=True),
            str(finished))
  assert sorted((p, p.stat().st_mtime_ns) for p in finished.rglob('[!.]*') if p.is_file()) == before


def test_a_run_without_a_checkpoint_starts_over_with_other_fields(
    finished, corpus_file, tmp_path, monkeypatch):
  """As after a first step that was out of memory."""
  shutil.copytree(finished, tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run/checkpoints')
  trained = []
  monkeypatch.setattr(run.loop, 'train', lambda job, config, *_, **__: trained.append(config))
  other = json.loads((finished / 'run.json').read_text())['config']['batch_size'] * 2
  run.run(evaluated(corpus_file, batch_size=other), str(tmp_path / 'run'))
  saved = json.loads((tmp_path / 'run/run.json').read_text())['config']
  assert saved['batch_size'] == trained[0].batch_size == other


@pytest.mark.parametrize('name', ['metrics.jsonl', 'config.json'])
def test_a_folder_of_something_else_is_refused_and_kept(corpus_file, tmp_path, name):
  (tmp_path / name).write_text('{"mine": 1}')
  with pytest.raises(UserError, match=f'holds {name} and no run.json'):
    run.run(evaluated(corpus_file), str(tmp_path))
  assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name[0] != '.'} == {
      name: '{"mine": 1}'}


def test_a_run_of_another_task_is_refused_before_it_reads_anything(finished):
  config = config_lib.finetuning('sentence_embedding')
  config.init_from, config.data.train = 'nowhere', 'nowhere.jsonl'
  with pytest.raises(UserError, match=r'task=pretrain \(now sentence_embedding\): that is another'):
    run.run(config, str(finished))


@pytest.mark.parametrize('name, now', [
    ('name', 'lamb'), ('layer_decay', 0.9), ('frozen_layers', 0)])
def test_an_optimizer_with_other_moments_is_refused(finished, corpus_file, name, now):
  before = (finished / 'run.json').read_bytes()
  was = json.loads(before)['config']['optimizer'][name]
  for allowed in (False, True):
    with pytest.raises(UserError) as e:
      run.run(evaluated(corpus_file, allow_schedule_change=allowed, **{f'optimizer.{name}': now}),
              str(finished))
    assert str(e.value) == (f'{finished} holds a run with optimizer.{name}={was} (now {now}): that '
                            'is another run, use another --workdir')
  assert (finished / 'run.json').read_bytes() == before


@pytest.mark.medium
def test_a_resumed_run_prints_the_changed_fields(finished, corpus_file, tmp_path, capsys):
  """Harmless changes are allowed, and so is a longer schedule on request."""
  shutil.copytree(finished, tmp_path / 'run')
  config = evaluated(corpus_file, train_steps=14, allow_schedule_change=True,
                     log_every=1, sharding='dp', **{
                         'mesh.model': 2, 'model.dtype': 'bfloat16'})
  run.run(config, str(tmp_path / 'run'))
  words = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
  assert sorted(rest for word, rest in (x for x in words if len(x) == 2) if word == 'changed') == [
      'allow_schedule_change=False (now True)', 'log_every=2 (now 1)', 'mesh.model=1 (now 2)',
      'model.dtype=float32 (now bfloat16)', 'sharding=tp (now dp)', 'train_steps=12 (now 14)']
  assert [x['step'] for x in lines(tmp_path / 'run') if 'loss' in x][-3:] == [12, 13, 14]
  assert json.loads((tmp_path / 'run/run.json').read_text())['config']['train_steps'] == 14


@pytest.mark.medium
def test_a_run_that_no_longer_keeps_the_best_names_the_kept_one(corpus_file, tmp_path, capsys):
  workdir = str(tmp_path / 'run')
  run.run(evaluated(corpus_file, keep_best='mlm_loss'), workdir)
  kept = integrity.steps(tmp_path / 'run' / 'best')
  assert 'keep_best' not in capsys.readouterr().out
  run.run(evaluated(corpus_file, train_steps=14, allow_schedule_change=True), workdir)
  assert f'{workdir}/best still has step {kept[-1]}, which predict' in capsys.readouterr().out


@pytest.mark.medium
def test_init_from_copies_the_parameters_of_another_workdir(finished, tmp_path, corpus_file):
  # Another vocabulary, and another model.
  vocab = (finished / 'tokenizer' / 'vocab.txt').read_text().splitlines()[:-1]
  (tmp_path / 'vocab.txt').write_text('\n'.join(vocab) + '\n')
  for overrides, message in (({'data.vocab': str(tmp_path / 'vocab.txt')}, 'another vocabulary'),
                             ({'model.num_layers': 3}, 'with num_layers=2, this config has')):
    with pytest.raises(UserError, match=message):
      run.run(conftest.tiny_config(corpus_file, init_from=str(finished), **overrides),
              str(tmp_path / next(iter(overrides))))
  config = conftest.tiny_config(corpus_file, init_from=str(finished), train_steps=2,
                                **{'optimizer.learning_rate': 1e-30, 'optimizer.warmup_steps': 0})
  run.run(config, str(tmp_path / 'run'))
  ours, theirs = (bert_jax.from_pretrained(str(d)).params for d in (tmp_path / 'run', finished))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_checkpoints_without_run_json_are_refused_and_kept(finished, tmp_path, corpus_file):
  workdir = shutil.copytree(finished, tmp_path / 'run')
  (workdir / 'run.json').unlink()
  def content():
    return {path: path.read_bytes() for path in workdir.rglob('*')
            if path.is_file() and path.name != '.lock'}

  before = content()
  with pytest.raises(UserError, match='holds checkpoints but not the run.json'):
    run.run(evaluated(corpus_file, train_steps=14), str(workdir))
  assert content() == before


def test_predictions_agree_with_each_other(finished):
  bert = bert_jax.from_pretrained(str(finished))
  assert bert.config.dtype == 'float32'
  masks = bert.fill_mask('The [MASK] runs under the [MASK].', top_k=3)
  assert len(masks) == 2
  for mask in masks:
    candidates = mask['candidates']
    assert len(candidates) == 3
    probabilities = [c['probability'] for c in candidates]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1
    for c in candidates:
      assert c['surprisal'] == pytest.approx(-np.log(c['probability']), rel=1e-5)
  ids = bert.tokenizer.encode_with_masks('The [MASK] runs under the [MASK].')
  assert [m['position'] - 1 for m in masks] == [
      i for i, token in enumerate(ids) if token == bert.tokenizer.mask_id]

  scored = bert.score('The king runs.')
  surprisals = [t['surprisal'] for t in scored['tokens']]
  assert scored['pseudo_perplexity'] == pytest.approx(np.exp(np.mean(surprisals)))
  # score and fill_mask give a token the same surprisal.
  first = bert.fill_mask('[MASK] king runs.', top_k=bert.config.vocab_size)[0]['candidates']
  assert len(bert.tokenizer.encode_batch(['The'])[0]) == 1
  the = next(c for c in first if c['token'] == scored['tokens'][0]['token'])
  assert the['surprisal'] == pytest.approx(surprisals[0], rel=1e-5)

  pairs = [('The king runs.', 'The king sees.'), ('A tree.', 'A horse takes her river.')]
  together = bert.next_sentence(pairs)
  assert together == pytest.approx([bert.next_sentence([p])[0] for p in pairs], rel=1e-5)
  assert all(0 < p < 1 for p in together)
  with pytest.raises(UserError, match='no .MASK.'):
    bert.fill_mask('nothing')
  with pytest.raises(UserError, match='longer than the 64 positions'):
    bert.score('the ' * 70)


@pytest.mark.medium
def test_worker_processes_make_the_same_rows(tmp_path, finished, corpus_file):
  """Compares the digests of every step."""
  digests = []
  for workers in (0, 1):
    config = conftest.tiny_config(str(finished / 'corpus'), train_steps=2, log_batch_digest=True,
                                  **{'data.loader_workers': workers, 'optimizer.warmup_steps': 1})
    workdir = tmp_path / f'run{workers}'
    run.run(config, str(workdir))
    digests.append([d for line in lines(workdir) for d in line.get('batch_digests', ())])
  assert digests[0] == digests[1] and len(digests[0]) == 2


PLAIN_SCRIPT = """
print('begins')
from multiprocessing.process import BaseProcess
import sys
from bert_jax.runs import run
from bert_jax.data import preparation
from tests import conftest

started, start = [], BaseProcess.start
BaseProcess.start = lambda self: (started.append(self.name.partition('-')[0]), start(self))
preparation._IN_PROCESS, preparation.host.cores = 0, lambda: 2
run.run(conftest.tiny_config(
    sys.argv[1], **{'data.loader_workers': 1, 'data.heldout': 0.1}), 'run')
assert __file__.endswith('script.py')
print(len(started), *set(started), 'torch' in sys.modules)
"""


@pytest.mark.medium
def test_a_plain_script_needs_no_main_guard(tmp_path, finished, corpus_file):
  (tmp_path / 'script.py').write_text(PLAIN_SCRIPT)
  env = os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2])}
  result = subprocess.run([sys.executable, 'script.py', corpus_file], cwd=tmp_path, env=env,
                          capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  output = result.stdout.splitlines()
  # Two processes prepare, one makes rows.
  assert (output[0], output.count('begins'), output[-1]) == ('begins', 1, '3 SpawnProcess False')
  corpora = [{p.name: p.read_bytes() for p in sorted((workdir / 'corpus').iterdir()) if p.is_file()}
             for workdir in (finished, tmp_path / 'run')]
  assert len(corpora[0]) > 3 and corpora[0] == corpora[1]
  assert [line.get('loss') for line in lines(finished)] == [
      line.get('loss') for line in lines(tmp_path / 'run')]
