"""Runs read and continue the workdirs and checkpoints of an earlier version.

`old_workdirs.tar.gz` holds the files of commit c1713c2: a pretraining run of 8 steps that was
killed after the checkpoint of step 4, a fine-tuning run, a converted checkpoint, and in
expected.json the results of that commit for each.
"""

import json
import pathlib
import tarfile

import pytest

from bert_jax.inference import predictions
from bert_jax.runs import run
from tests import conftest

ARCHIVE = pathlib.Path(__file__).parent / 'old_workdirs.tar.gz'
SIZES = {'model.hidden_size': 8, 'model.num_heads': 2, 'model.intermediate_size': 16,
         'model.num_layers': 2, 'model.vocab_size': 120, 'model.max_positions': 32}


@pytest.fixture
def old(tmp_path, monkeypatch):
  """The folder of the unpacked workdirs."""
  with tarfile.open(ARCHIVE) as archive:
    archive.extractall(tmp_path, filter='data')
  monkeypatch.chdir(tmp_path)
  return json.loads((tmp_path / 'expected.json').read_text())


def metrics(workdir):
  lines = map(json.loads, (pathlib.Path(workdir) / 'metrics.jsonl').read_text().splitlines())
  return [line for line in lines if 'warning' not in line]


@pytest.mark.medium
def test_a_killed_run_of_an_earlier_version_resumes(old):
  config = conftest.tiny_config('corpus.txt', **SIZES, **{
      'train_steps': 8, 'checkpoint_every': 4, 'eval_every': 8, 'log_every': 1, 'eval_batches': 1,
      'log_batch_digest': True, 'keep_checkpoints': 2, 'data.heldout': 0.2,
      'optimizer.warmup_steps': 2})
  run.run(config, 'pretrained')
  lines = metrics('pretrained')
  assert len(lines) == len(old['metrics']) == 9
  for line, before in zip(lines, old['metrics']):
    assert line.get('batch_digests') == before.get('batch_digests')
    for name in before.keys() & {'mlm_loss', 'nsp_loss', 'grad_norm', 'eval_mlm_loss',
                                 'eval_unigram_entropy'}:
      assert line[name] == pytest.approx(before[name], rel=1e-5)
  # It ends with the same arrays under the same names, of the same types and shapes.
  saved = json.loads(pathlib.Path('pretrained/checkpoints/8/fingerprints/metadata').read_text())
  described = {item: {name: x[:2] for name, x in arrays.items()}
               for item, arrays in saved['arrays'].items()}
  assert described == {item: {name: x[:2] for name, x in arrays.items()}
                       for item, arrays in old['fingerprints'].items()}


@pytest.mark.parametrize('task, model, line, answer', [
    ('score', 'pretrained', {'text': 'The old house.'}, 'score'),
    ('score', 'converted', {'text': 'The old house.'}, 'score_converted'),
    ('sequence_classification', 'finetuned', {'text': 'w1 good w3'}, 'label')])
def test_models_of_an_earlier_version_give_the_same_answers(old, task, model, line, answer):
  pathlib.Path('in.jsonl').write_text(json.dumps(line) + '\n')
  predictions.run(task, model, 'in.jsonl', 'out.jsonl')
  answer_now, expected = json.loads(pathlib.Path('out.jsonl').read_text()), old[answer]
  if task == 'score':
    assert [x['token'] for x in answer_now['tokens']] == [x['token'] for x in expected['tokens']]
    assert answer_now['surprisal'] == pytest.approx(expected['surprisal'], rel=1e-6)
  else:
    assert answer_now['label'] == expected['label']
    assert answer_now['probabilities'] == pytest.approx(expected['probabilities'], rel=1e-5)
