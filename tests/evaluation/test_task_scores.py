"""Scores of a fine-tuned model on a file equal the scores of its run; mistakes."""

import dataclasses
import json
import types

from etils import epath
import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.evaluation import suites, task_scores
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import conversion, load, sentence_transformers
from bert_jax.interop.cross_layout import CrossLayout
from bert_jax.interop.sentence_layout import Module, SentenceLayout
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run
from bert_jax.tasks import question_answering, task_list
from tests import conftest, made_tasks


@pytest.fixture(scope='module', autouse=True)
def one_device():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mesh_lib, 'make_mesh', lambda **_: conftest.sub_mesh(1, 1))
    yield


def train(task, folder, **overrides):
  """Trains two steps; returns (files, the scores of the run)."""
  config, files = config_lib.finetuning(task), made_tasks.files(task, folder, 32, 40)
  if task == 'reranking':  # with a grade that data.eval lacks
    overrides['data.loss'] = 'graded'
    with open(files['data.train'], 'a') as file:
      file.write(json.dumps({'query': 'w1', 'document': 'w2 good', 'label': 3}) + '\n')
  config.update_from_flattened_dict({
      'init_from': made_tasks.start(folder / 'model', task), 'batch_size': 16, 'max_len': 24,
      'train_epochs': 1.0, 'optimizer.learning_rate': 3e-3, 'model.scan_unroll': 1, **files,
      **overrides})
  run.run(config, str(folder / 'run'))
  lines = [json.loads(line) for line in (folder / 'run/metrics.jsonl').open()]
  scores = [line for line in lines if any(name.startswith('eval_') for name in line)][-1]
  return files, {name.removeprefix('eval_'): x for name, x in scores.items()
                 if name.startswith('eval_')}


def score(model, data, folder, **options):
  suites.run(str(model), 'task', data, str(folder / 'scores.json'), options)
  return json.loads((folder / 'scores.json').read_text())


@pytest.mark.medium
@pytest.mark.parametrize('task', list(made_tasks.FILES))
def test_scores_equal_the_run(task, tmp_path, capsys):
  files, expected = train(task, tmp_path)
  report = score(tmp_path / 'run', files['data.eval'], tmp_path, batch_size=16)
  assert report['examples'] == 40 and report['task'] == task
  for name in expected.keys() - {'seconds'}:
    assert report[name] == pytest.approx(expected[name], abs=1e-5), name
  if task == 'sequence_classification':  # as somebody else's folder, which has no config
    conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'hf'), 'huggingface')
    again = score(tmp_path / 'hf', files['data.eval'], tmp_path, max_len=24)
    assert again['accuracy'] == report['accuracy']
    assert again['loss'] == pytest.approx(report['loss'], abs=1e-5)
  if task == 'reranking':
    check_exports_of_a_reranker(report, files['data.eval'], tmp_path, capsys)


def check_exports_of_a_reranker(report, data, folder, capsys):
  """Our own format keeps the highest grade of the training data; others lose it, with a note."""
  assert 'highest grade' not in capsys.readouterr().out
  formats = 'bert_jax', 'huggingface'
  for to in formats:
    conversion.convert(str(folder / 'run'), str(folder / to), to)
  (folder / 'run').rename(folder / 'moved')  # an export does not read the run
  for to in formats:
    named = {'task': 'reranking'} if to == 'huggingface' else {}  # it may be a regression, too
    again = score(folder / to, data, folder, fields=['loss=graded'], max_len=24, **named)
    is_known = again['loss'] == pytest.approx(report['loss'], abs=1e-5)
    noted = 'does not say the highest grade of its training data' in capsys.readouterr().out
    assert is_known == (to == 'bert_jax') != noted


def test_the_model_decides_whether_no_answer_is_possible():
  """A SQuAD v2.0 model is scored by the rules of v2.0, even if every question has an answer."""
  of_file = question_answering.QuestionFiles(None)
  assert of_file.null_threshold is None
  assert of_file.with_facts({'null_threshold': 1.5}, []).null_threshold == 1.5
  for facts in ({}, {'null_threshold': None}):  # an export; a model of v1.1 on a file of v2.0
    asked = dataclasses.replace(of_file, null_threshold=0.0)
    assert asked.with_facts(facts, []).null_threshold == 0.0
    assert of_file.with_facts(facts, []).null_threshold is None


def test_predict_uses_the_threshold_of_the_run(monkeypatch):
  used = []
  monkeypatch.setattr(question_answering, 'answer', lambda bert, pairs, threshold: used.append(
      threshold))
  for facts, given in (({'null_threshold': 1.5}, None), ({'null_threshold': 1.5}, 0.0), ({}, None)):
    bert = types.SimpleNamespace(model=types.SimpleNamespace(facts=facts))
    question_answering.QuestionKind.answer(bert, [], types.SimpleNamespace(null_threshold=given))
  assert used == [1.5, 0.0, None]


@pytest.mark.medium
def test_fields_name_other_columns_and_mistakes_are_refused(tmp_path):
  """In data.eval and in --fields; a file with tabs may be named .txt."""
  files = made_tasks.files('sequence_classification', tmp_path, 32, 40)
  lines = open(files['data.eval']).read()
  other = tmp_path / 'other.txt'
  other.write_text(lines.replace('text\tlabel', 'sentence\tgold', 1))
  fields = ('text_column=sentence', 'label_column=gold')
  _, expected = train('sequence_classification', tmp_path,
                      **{'data.eval_fields': fields, 'data.eval': str(other)})
  for data, options in ((str(other), {'fields': fields}), (files['data.eval'], {})):
    report = score(tmp_path / 'run', data, tmp_path, **options)
    assert report['accuracy'] == expected['accuracy']
  no = tmp_path / 'no.tsv'  # one class is too little to learn, but enough to score
  no.write_text(''.join(line for line in lines.splitlines(keepends=True) if '\tyes\t' not in line))
  assert score(tmp_path / 'run', str(no), tmp_path)['examples'] < 40

  for options, message in (
      ({'fields': ('text=sentence',)}, "the field in --fields='text' is unknown"),
      ({'fields': ('sentence',)}, '--fields=sentence must be FIELD=VALUE'),
      ({'task': 'reranking'}, 'scores no pairs: it is for sequence_classification with 2 labels'),
      ({'task': 'question_answering'}, 'this model is for sequence_classification, not for q'),
      ({'max_len': 65}, '--max_len=65 must be at least 8 and at most the 64 positions'),
      ({}, "no column 'text'")):
    with pytest.raises(UserError, match=message.replace('(', r'\(')):
      score(tmp_path / 'run', str(other), tmp_path, **options)
  with pytest.raises(UserError, match='this model has no masked-LM head'):
    score(tmp_path / 'model', str(other), tmp_path, task='sparse_embedding')
  with pytest.raises(UserError, match='has no head of a task'):
    score(tmp_path / 'model', str(other), tmp_path)
  maybe = tmp_path / 'maybe.tsv'
  maybe.write_text('text\tlabel\nw1 good\tmaybe\n')
  with pytest.raises(UserError, match="maybe.tsv, line 2: the label 'maybe' is none of the 2"):
    score(tmp_path / 'run', str(maybe), tmp_path)


@pytest.mark.medium
def test_an_embedder_is_scored_whole_and_wrong_fields_are_refused(tmp_path):
  """A run that encodes in parts is scored whole; an invalid value of a field is refused."""
  files, expected = train('sentence_embedding', tmp_path, **{'data.cached_parts': 2})
  options = {'task': 'sentence_embedding'}
  report = score(tmp_path / 'run', files['data.eval'], tmp_path, **options)
  # Pearson first: if two cosines are almost equal, the last bit decides their ranks.
  assert report['pearson'] == pytest.approx(expected['pearson'], abs=1e-5)
  assert report['spearman'] == pytest.approx(expected['spearman'], abs=1e-3)  # a rank or two
  with pytest.raises(UserError, match="data.pooling='median' is unknown"):
    score(tmp_path / 'run', files['data.eval'], tmp_path, fields=('pooling=median',), **options)
  # A model that pools twice is scored with one pooling, at the length that its folder gives.
  folder = tmp_path / 'both'
  two = SentenceLayout(('cls', 'mean'), max_len=40)
  sentence_transformers.save(
      sentence_transformers.exported(dataclasses.replace(
          load.load(str(tmp_path / 'model')), text_layout=two)), epath.Path(folder))
  with pytest.raises(UserError, match='concatenates cls and mean.*--fields=pooling=mean'):
    score(folder, files['data.eval'], tmp_path, **options)
  texts = tmp_path / 'long.tsv'
  texts.write_text('sentence1\tsentence2\tscore\n' + ''.join(
      f'w1 {"w2 " * n}\tw3 {"w4 " * n}\t{n}\n' for n in (10, 30, 50)))
  options['fields'] = ('pooling=mean',)
  report, of_40, of_64 = (score(folder, str(texts), tmp_path, **options, **length)
                          for length in ({}, {'max_len': 40}, {'max_len': 64}))
  assert report == of_40 and report['pearson'] != of_64['pearson']


def test_inputs_are_as_long_as_in_predictions(tmp_path):
  """A published folder whose longest input is its number of positions states no max_len."""
  for task, expected in (('sequence_classification', 512), ('question_answering', 384)):
    model = load.load(made_tasks.with_head(tmp_path / task, task, ('no', 'yes')))
    model = dataclasses.replace(
        model, config=dataclasses.replace(model.config, max_positions=512), facts={})
    config = task_scores._config('m', model, task_list.ALL[task], ())
    assert config.max_len == expected


def test_steps_of_a_model_that_the_scores_lack_are_named_or_refused(tmp_path, capsys):
  (tmp_path / 'dev.tsv').write_text('text\tlabel\nw1 good\tyes\nw2 bad\tno\n')
  name = made_tasks.with_head(tmp_path / 'a', 'sequence_classification', ('no', 'yes'))
  bert = bert_jax.from_pretrained(name)

  def of(layout):
    other = bert_lib.Bert(dataclasses.replace(bert.model, text_layout=layout))
    other.name = name
    return other

  data, path = str(tmp_path / 'dev.tsv'), epath.Path(tmp_path / 'x.json')
  prompts = {'prompts': {'q': 'w1 '}, 'default_prompt': 'q'}
  task_scores.evaluate(of(CrossLayout(activation='', **prompts)), data, path)
  assert f'left out        prompts of {name}' in capsys.readouterr().out
  for options, step in (
      ({'dim': 4}, 'truncate_dim'),
      ({'modules': (Module('Dense', {}, {'x': np.ones(1)}),)}, 'the modules after the pooling')):
    with pytest.raises(UserError, match=f'leave out {step} of --model'):
      task_scores.evaluate(of(SentenceLayout(**options)), data, path, task='sentence_embedding')


def test_labels_of_glue(tmp_path):
  """A model with other labels than the file is refused; LABEL_0 and LABEL_1 fit any file."""
  (tmp_path / 'dev.tsv').write_text('sentence\tlabel\nw1 good\t1\nw2 bad\t0\n')
  options = {'fields': ('format=glue/sst2',)}
  unnamed = made_tasks.with_head(tmp_path / 'a', 'sequence_classification', ('LABEL_0', 'LABEL_1'))
  assert score(unnamed, str(tmp_path / 'dev.tsv'), tmp_path, **options)['examples'] == 2
  other = made_tasks.with_head(tmp_path / 'b', 'sequence_classification', ('yes', 'no'))
  with pytest.raises(UserError, match='has the labels yes, no, this file needs negative, positive'):
    score(other, str(tmp_path / 'dev.tsv'), tmp_path, **options)
