"""Fine-tuning as users do it: a config, a workdir, predictions, an export; their mistakes."""

import json
import pathlib

from etils import epath
from flax import linen as nn
import jax
import numpy as np
import pytest
import torch
import transformers

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import conversion, layout
from bert_jax.interop import load as load_lib
from bert_jax.labelled import squad
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run
from bert_jax.tasks import (
  metrics,
  multiple_choice,
  question_answering,
  sequence_classification,
  token_classification,
)
from bert_jax.tasks.finetuning_data import FineTuningData
from bert_jax.training import checkpoint, integrity
from tests import conftest, made_tasks


@pytest.fixture(scope='module', autouse=True)
def two_devices():
  """Runs use two devices: eight on a few cores are only slower."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, 'make_mesh', lambda **_: conftest.sub_mesh(2, 1))
    yield


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  return made_tasks.model(tmp_path_factory.mktemp('pretrained') / 'model')


def make_config(task, pretrained, folder, **overrides):
  c = config_lib.finetuning(task)
  c.update_from_flattened_dict({
      'init_from': pretrained, 'batch_size': 16, 'max_len': 32, 'train_epochs': 8.0,
      'model.dropout': 0.0, 'model.attention_dropout': 0.0, 'optimizer.learning_rate': 3e-3,
      'eval_every': 10_000, 'checkpoint_every': 10_000, 'log_every': 50, 'model.scan_unroll': 1,
      **made_tasks.files(task, pathlib.Path(folder)), **overrides})
  return c


def read_metrics(workdir):
  return [json.loads(line) for line in (pathlib.Path(workdir) / 'metrics.jsonl').open()]


def last_scores(workdir):
  return [x for x in read_metrics(workdir) if 'eval_loss' in x][-1]


@pytest.fixture(scope='module')
def classifier(tmp_path_factory, pretrained):
  folder = tmp_path_factory.mktemp('classifier')
  test = folder / 'test.tsv'
  test.write_text('text\nw1 good w2\nw3 bad\n')
  c = make_config('sequence_classification', pretrained, folder, **{'data.test': str(test)})
  run.run(c, str(folder / 'run'))
  return folder / 'run'


def test_a_classifier_learns_and_predicts(classifier):
  scores = last_scores(classifier)
  assert scores['eval_accuracy'] == scores['eval_f1'] == 1
  bert = bert_lib.load(str(classifier))
  yes, no = sequence_classification.classify(bert, ['w4 w5 good', 'w4 w5 bad w6'])
  assert (yes['label'], no['label']) == ('yes', 'no')
  assert yes['probabilities']['yes'] > 0.9
  assert sum(yes['probabilities'].values()) == pytest.approx(1)
  predicted = [json.loads(x) for x in (classifier / 'predictions/predictions.jsonl').open()]
  assert [x['label'] for x in predicted] == ['yes', 'no']
  with pytest.raises(UserError, match='is for sequence_classification, not for multiple_choice'):
    multiple_choice.choose(bert, [('a', ['b', 'c'])])


def test_an_export_gives_the_same_logits_in_transformers(classifier, tmp_path):
  conversion.convert(str(classifier), str(tmp_path / 'hf'), 'huggingface')
  theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / 'hf').eval()
  assert theirs.config.id2label == {0: 'no', 1: 'yes'}
  assert theirs.config.problem_type == 'single_label_classification'
  bert = bert_lib.load(str(tmp_path / 'hf'))
  texts = ['w4 w5 good', 'w1 bad', 'good bad w2']
  ours = sequence_classification.class_logits(bert, texts)
  for text, logits in zip(texts, ours):
    ids = torch.tensor([bert.row(text).ids])
    np.testing.assert_allclose(logits, theirs(input_ids=ids).logits[0].detach(), atol=1e-4)


@pytest.mark.medium
def test_the_best_checkpoint_is_kept_and_loaded(pretrained, tmp_path):
  c = make_config('sequence_classification', pretrained, tmp_path,
                  **{'train_epochs': 6.0, 'eval_every': 0, 'optimizer.learning_rate': 2e-2,
                     'optimizer.warmup_ratio': 0.5, 'optimizer.clip_norm': 0.0})
  run.run(c, str(tmp_path / 'run'))
  evaluations = {x['step']: x for x in read_metrics(tmp_path / 'run') if 'eval_loss' in x}
  facts = load_lib.load(str(tmp_path / 'run')).facts
  best, last = evaluations[facts['steps']], evaluations[max(evaluations)]
  # The learning rate is so high that an earlier evaluation is the best; of equal ones, the first.
  assert last != best == max(evaluations.values(), key=lambda x: (x['eval_accuracy'], -x['step']))
  assert facts['scores']['accuracy'] == best['eval_accuracy']
  assert integrity.steps(epath.Path(tmp_path / 'run/best')) == [best['step']]
  rows = [line.split('\t') for line in pathlib.Path(c.data.eval).read_text().split('\n')[1:-1]]
  answers = sequence_classification.classify(bert_lib.load(str(tmp_path / 'run')),
                                             [text for text, _, _ in rows])
  # The loss tells the parameters of equally good evaluations apart.
  loss = np.mean([-np.log(a['probabilities'][label]) for a, (_, label, _) in zip(answers, rows)])
  assert best['eval_loss'] == pytest.approx(loss, rel=1e-3, abs=1e-5) != last['eval_loss']


@pytest.mark.medium
def test_regression_and_multi_label_classification_learn(pretrained, tmp_path):
  c = make_config('sequence_classification', pretrained, tmp_path, **{
      'data.problem': 'regression', 'data.label_column': 'value', 'train_epochs': 16.0})
  run.run(c, str(tmp_path / 'value'))
  resolved = json.loads((tmp_path / 'value/run.json').read_text())['config']
  assert resolved['keep_best'] == 'spearman'
  assert last_scores(tmp_path / 'value')['eval_pearson'] > 0.95
  bert = bert_lib.load(str(tmp_path / 'value'))
  good, bad = (x['value'] for x in sequence_classification.classify(bert, ['w1 good', 'w1 bad w2']))
  assert 2.5 < good < 3.5 and 0.5 < bad < 1.5

  for name in ('train', 'eval'):
    lines = pathlib.Path(tmp_path / f'{name}.tsv').read_text().split('\n')[1:-1]
    (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps({
        'text': text, 'label': [label, *(['w3'] if 'w3' in text.split() else [])]}) + '\n'
        for text, label, _ in (line.split('\t') for line in lines)))
  c = make_config('sequence_classification', pretrained, tmp_path, **{
      'data.problem': 'multi_label', 'data.train': str(tmp_path / 'train.jsonl'),
      'data.eval': str(tmp_path / 'eval.jsonl'), 'train_epochs': 16.0})
  run.run(c, str(tmp_path / 'several'))
  assert last_scores(tmp_path / 'several')['eval_f1'] > 0.9
  bert = bert_lib.load(str(tmp_path / 'several'))
  assert bert.model.problem == 'multi_label'
  assert 'yes' in sequence_classification.classify(bert, ['w1 good'])[0]['labels']


@pytest.mark.medium
@pytest.mark.parametrize('long', [
    'chunks_attention', pytest.param('head_tail', marks=pytest.mark.slow)])
def test_only_chunks_read_the_whole_of_a_long_text(pretrained, tmp_path, long):
  files = {f'data.{name}': made_tasks.sequences(tmp_path / f'long-{name}.tsv', count, seed, 60)
           for name, count, seed in (('train', 160, 0), ('eval', 40, 1))}
  c = make_config('sequence_classification', pretrained, tmp_path, **{
      **files, 'data.long': long, 'max_len': 16, 'train_epochs': 16.0})
  run.run(c, str(tmp_path / 'run'))
  accuracy = last_scores(tmp_path / 'run')['eval_accuracy']
  assert accuracy > 0.9 if long.startswith('chunks') else accuracy < 0.9  # the word may be cut off
  bert = bert_lib.load(str(tmp_path / 'run'))
  assert bert.model.facts['long'] == long
  lines = [line.split('\t') for line in pathlib.Path(c.data.eval).read_text().split('\n')[1:-1]]
  answers = sequence_classification.classify(bert, [text for text, _, _ in lines])
  right = np.mean([a['label'] == label for a, (_, label, _) in zip(answers, lines)])
  best = max(x['eval_accuracy'] for x in read_metrics(tmp_path / 'run') if 'eval_loss' in x)
  assert right == pytest.approx(best)


@pytest.mark.medium
def test_a_tagger_learns_and_predicts(pretrained, tmp_path):
  c = make_config('token_classification', pretrained, tmp_path, train_epochs=16.0, **{
      'data.train': made_tasks.tags(tmp_path / 'more.conll', 400)})
  with c.unlocked():
    c.data.test = c.data.eval
  run.run(c, str(tmp_path / 'run'))
  scores = last_scores(tmp_path / 'run')
  assert scores['eval_f1'] > 0.97
  bert = bert_lib.load(str(tmp_path / 'run'))
  text = 'W1  N2 n3s  w4 N1'
  entities, = (x['entities'] for x in token_classification.tag(bert, [text]))
  assert [(e['start'], e['end'], e['text'], e['label']) for e in entities] == [
      (4, 10, 'N2 n3s', 'NAME'), (15, 17, 'N1', 'NAME')]
  assert all(0.5 < e['probability'] <= 1 for e in entities)
  # The file of predictions has the words of the test file, and these tags score the same.
  def tags_of(path, column):
    return [[line.split()[column] for line in s.split('\n')]
            for s in pathlib.Path(path).read_text().strip().split('\n\n')]
  predicted = tmp_path / 'run/predictions/predictions.conll'
  assert tags_of(predicted, 0) == tags_of(c.data.test, 0)
  best = max(x['eval_f1'] for x in read_metrics(tmp_path / 'run') if 'eval_loss' in x)
  assert metrics.entities(tags_of(c.data.test, 1), tags_of(predicted, 1))['f1'] == best


@pytest.mark.medium
@pytest.mark.parametrize('unanswerable', [pytest.param(False, marks=pytest.mark.slow), True])
def test_question_answering_learns_and_predicts(pretrained, tmp_path, unanswerable):
  files = {f'data.{name}': made_tasks.questions(tmp_path / f'{name}-{unanswerable}.json', count,
                                                seed, unanswerable)
           for name, count, seed in (('train', 160, 0), ('eval', 40, 1))}
  c = make_config('question_answering', pretrained, tmp_path, **{
      **files, 'max_len': 20, 'data.doc_stride': 6, 'train_epochs': 12.0})
  with c.unlocked():
    c.data.test = c.data.eval
  run.run(c, str(tmp_path / 'run'))
  scores = last_scores(tmp_path / 'run')
  assert scores['eval_f1'] > 90
  if unanswerable:
    assert scores['eval_no_answer_f1'] > 85 and scores['eval_best_f1'] >= scores['eval_f1']
  bert = bert_lib.load(str(tmp_path / 'run'))
  text = 'w1 w2 W3 is N4 w5.'
  answer, nothing = question_answering.answer(bert, [('Who?', text), ('Who?', 'w1 w2 w3.')],
                                     0.0 if unanswerable else None)
  assert (answer['answer'], answer['start'], answer['end']) == ('N4', 12, 14)
  assert answer['n_best'][0]['answer'] == 'N4' and answer['probability'] > 0.5
  assert bool(nothing['answer']) != unanswerable
  predicted = json.loads((tmp_path / 'run/predictions/predictions.json').read_text())
  best = max(x['eval_f1'] for x in read_metrics(tmp_path / 'run') if 'eval_loss' in x)
  results = metrics.answers(squad.read(c.data.test), predicted, unanswerable=unanswerable)
  assert results['f1'] == pytest.approx(best)


@pytest.mark.medium
def test_multiple_choice_learns_and_predicts(pretrained, tmp_path):
  c = make_config('multiple_choice', pretrained, tmp_path)
  c.data.test = c.data.eval
  run.run(c, str(tmp_path / 'run'))
  assert last_scores(tmp_path / 'run')['eval_accuracy'] > 0.95
  bert = bert_lib.load(str(tmp_path / 'run'))
  assert multiple_choice.choose(bert, []) == []
  answers = multiple_choice.choose(
      bert, [('w1', ['w2 bad', 'w3 good']), ('w4', ['w5 bad', 'bad', 'w6 good'])])
  assert [x['choice'] for x in answers] == [1, 2]
  assert [len(x['probabilities']) for x in answers] == [2, 3]
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'hf'), 'huggingface')
  theirs = transformers.BertForMultipleChoice.from_pretrained(tmp_path / 'hf').eval()
  rows = [bert.row(('w4', choice)) for choice in ('w5 bad', 'w1 bad', 'w6 good')]
  inputs = {'input_ids': torch.tensor([[r.ids for r in rows]]),
            'token_type_ids': torch.tensor([[r.type_ids for r in rows]])}
  expected = torch.softmax(theirs(**inputs).logits[0], -1).tolist()
  again = bert_lib.load(str(tmp_path / 'hf'))
  answer, = multiple_choice.choose(again, [('w4', ['w5 bad', 'w1 bad', 'w6 good'])])
  assert answer['probabilities'] == pytest.approx(expected, abs=1e-5)


@pytest.mark.medium
def test_a_resumed_run_ends_with_the_same_bits(pretrained, tmp_path):
  overrides = {'train_epochs': 2.0, 'model.dropout': 0.1, 'optimizer.accumulation': 2,
               'optimizer.layer_decay': 0.8, 'checkpoint_every': 4, 'keep_checkpoints': 9,
               'log_every': 1}
  c = make_config('sequence_classification', pretrained, tmp_path, **overrides)
  run.run(c, str(tmp_path / 'whole'))
  rows = FineTuningData.rows

  def dies(self, step):
    if step == 15:
      raise RuntimeError('killed')
    return rows(self, step)

  FineTuningData.rows = dies
  try:
    with pytest.raises(RuntimeError, match='killed'):
      run.run(make_config('sequence_classification', pretrained, tmp_path, **overrides),
              str(tmp_path / 'cut'))
  finally:
    FineTuningData.rows = rows
  assert read_metrics(tmp_path / 'cut')[-1]['step'] < 20
  # The run no longer needs the model that it started from.
  run.run(make_config('sequence_classification', '', tmp_path, **overrides), str(tmp_path / 'cut'))

  def losses(name):
    return [(x['step'], x['loss']) for x in read_metrics(tmp_path / name) if 'loss' in x]
  assert losses('cut') == losses('whole') and len(losses('cut')) == 20
  a, b = (checkpoint.restore_params(epath.Path(tmp_path / name), _shapes(tmp_path / name))[0]
          for name in ('whole', 'cut'))
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert (np.asarray(x) == np.asarray(y)).all()


def _shapes(workdir):

  model = load_lib.load(str(workdir))
  return nn.unbox(layout.abstract_params(model.config, model.groups, len(model.labels)))


@pytest.mark.slow
def test_reinitialized_layers_start_fresh_and_frozen_layers_stay(pretrained, tmp_path):
  def params(name, **overrides):
    c = make_config('sequence_classification', pretrained, tmp_path, **{
        'train_epochs': 0.0, 'train_steps': 2, 'data.eval': '', **overrides})
    run.run(c, str(tmp_path / name))
    return load_lib.load(str(tmp_path / name)).params['params']['bert']

  start = load_lib.load(pretrained).params['params']['bert']
  kernel = lambda tree, layer: np.asarray(tree['layers']['attention']['qkv_kernel'][layer])
  fresh = params('fresh', **{'reinit_layers': 1, 'optimizer.learning_rate': 1e-9})
  np.testing.assert_allclose(kernel(fresh, 0), kernel(start, 0), atol=1e-6)
  assert np.abs(kernel(fresh, 1) - kernel(start, 1)).max() > 0.05
  assert np.abs(np.asarray(fresh['pooler']['kernel']) - start['pooler']['kernel']).max() > 0.05
  frozen = params('frozen', **{'optimizer.frozen_layers': 1})
  assert (kernel(frozen, 0) == kernel(start, 0)).all()
  assert (np.asarray(frozen['embeddings']['token']) == start['embeddings']['token']).all()
  assert (kernel(frozen, 1) != kernel(start, 1)).any()
  with pytest.raises(UserError, match='reinit_layers=3 is above model.num_layers=2'):
    params('none', **{'reinit_layers': 3})


def test_examples_with_skipped_labels_are_left_out(pretrained, tmp_path, capsys):
  c = make_config('sequence_classification', pretrained, tmp_path, train_epochs=0.0, train_steps=1,
                  **{'data.skip_labels': ('-',)})
  for name, count in (('train', 3), ('eval', 2)):
    with open(c.data[name], 'a') as file:
      file.write('w1 good\t-\t1.0\n' * count)
  run.run(c, str(tmp_path / 'run'))
  out = capsys.readouterr().out
  assert f'3 of 163 rows of {c.data.train} are left out: their label is -' in out
  assert f'2 of 42 rows of {c.data.eval} are left out' in out and '160 to train on' in out
  assert load_lib.load(str(tmp_path / 'run')).labels == ('no', 'yes')


def test_fractional_labels_print_a_note_about_regression(pretrained, tmp_path, capsys):
  for column, values, noted in (('value', ('1.0', '3.5'), True), ('value', ('1', '3'), False)):
    c = make_config('sequence_classification', pretrained, tmp_path, train_epochs=0.0,
                    train_steps=1, **{'data.label_column': column, 'data.eval': ''})
    path = pathlib.Path(c.data.train)
    path.write_text('text\tvalue\n' + ''.join(f'w{i}\t{values[i % 2]}\n' for i in range(9)))
    run.run(c, str(tmp_path / values[0]))
    assert ('data.problem=regression predicts the number' in capsys.readouterr().out) == noted


def test_numeric_labels_keep_their_given_order(pretrained, tmp_path):
  c = make_config('sequence_classification', pretrained, tmp_path, train_epochs=0.0, train_steps=1,
                  **{'data.label_column': 'value', 'data.labels': (3.0, '1.0')})
  run.run(c, str(tmp_path / 'run'))
  assert load_lib.load(str(tmp_path / 'run')).labels == ('3.0', '1.0')
  c.data.labels = ('1.0', '3.0', '1.0')
  with pytest.raises(UserError, match="data.labels=1.0,3.0,1.0: '1.0' is empty or repeated"):
    run.run(c, str(tmp_path / 'twice'))


@pytest.mark.medium
def test_an_i_tag_in_training_adds_the_b_tag(pretrained, tmp_path):
  c = make_config('token_classification', pretrained, tmp_path, train_epochs=0.0, train_steps=1)
  pathlib.Path(c.data.train).write_text('w1 O\nN1 B-NAME\nw2 I-X\n\n' * 9)
  pathlib.Path(c.data.eval).write_text('w1 O\nN1 B-NAME\nN2 I-NAME\nw2 B-X\n')
  run.run(c, str(tmp_path / 'run'))
  assert load_lib.load(str(tmp_path / 'run')).labels == ('B-NAME', 'B-X', 'I-NAME', 'I-X', 'O')


@pytest.mark.slow
def test_another_task_gets_a_new_head_and_the_same_task_keeps_it(classifier, pretrained, tmp_path):
  c = make_config('token_classification', str(classifier), tmp_path, train_epochs=0.0,
                  train_steps=1)
  run.run(c, str(tmp_path / 'tags'))
  assert load_lib.load(str(tmp_path / 'tags')).labels == ('B-NAME', 'I-NAME', 'O')
  # The same task with the same labels keeps the head too.
  c = make_config('sequence_classification', str(classifier), tmp_path, train_epochs=0.0,
                  train_steps=1, **{'optimizer.learning_rate': 1e-9})
  run.run(c, str(tmp_path / 'again'))
  assert last_scores(tmp_path / 'again')['eval_accuracy'] == 1


@pytest.mark.slow
def test_several_evaluation_files_have_their_own_scores(pretrained, tmp_path):
  c = make_config('sequence_classification', pretrained, tmp_path, train_epochs=1.0)
  with c.unlocked():
    c.data.eval += ',' + made_tasks.sequences(tmp_path / 'other.tsv', 10, 5)
  run.run(c, str(tmp_path / 'run'))
  scores = last_scores(tmp_path / 'run')
  assert {'eval_accuracy', 'eval_accuracy_other', 'eval_loss_other'} <= scores.keys()
  with c.unlocked():
    c.data.eval += ',' + made_tasks.sequences(tmp_path / 'other.2.tsv', 10, 5)
  with pytest.raises(UserError, match="two files would both end in 'other'"):
    run.run(c, str(tmp_path / 'twice'))


@pytest.mark.slow
def test_a_glue_run_writes_a_submission(pretrained, tmp_path):
  table = pathlib.Path(made_tasks.sequences(tmp_path / 'made.tsv', 240)).read_text()
  rows = [line.split('\t') for line in table.split('\n')[1:-1]]
  lines = [f'{text}\t{int(label == "yes")}' for text, label, _ in rows]
  for name in ('sst_train', 'sst_dev'):
    (tmp_path / f'{name}.tsv').write_text('\n'.join(['sentence\tlabel', *lines]) + '\n')
  (tmp_path / 'test.tsv').write_text('index\tsentence\n0\tw1 good w2\n1\tw3 bad\n2\tgood w9\n')
  c = make_config('sequence_classification', pretrained, tmp_path, **{
      'data.format': 'glue/sst2', 'data.train': str(tmp_path / 'sst_train.tsv'),
      'data.eval': str(tmp_path / 'sst_dev.tsv'), 'data.test': str(tmp_path / 'test.tsv')})
  run.run(c, str(tmp_path / 'run'))
  assert (tmp_path / 'run/predictions/SST-2.tsv').read_text() == (
      'index\tprediction\n0\t1\n1\t0\n2\t1\n')


def test_other_examples_or_batches_in_a_workdir_are_refused(classifier, pretrained, tmp_path):
  c = make_config('sequence_classification', pretrained, classifier.parent, batch_size=8)
  with pytest.raises(UserError, match=r'batch_size=16 \(now 8\)'):
    run.run(c, str(classifier))
  c = make_config('sequence_classification', pretrained, tmp_path, seed=0)
  pathlib.Path(c.data.train).write_text('text\tlabel\na\tyes\nb\tno\n')
  with pytest.raises(UserError, match='was trained on other rows'):
    run.run(c, str(classifier))
