"""Mistakes in the files and the config of a fine-tuning run."""

import json
import pathlib

import pytest

from bert_jax.errors import UserError
from bert_jax.runs import run
from tests.runs.test_finetune import make_config, pretrained, two_devices  # noqa: F401


@pytest.mark.parametrize('task, name, content, overrides, message', [
    ('sequence_classification', 'eval', 'text\tlabel\nx\tmaybe\n', {},
     "eval.tsv, line 2: the label 'maybe' is none of the 2 labels: no, yes"),
    ('sequence_classification', 'train', 'text\tlabel\nx\tyes\n', {},
     "has the label 'yes' only"),
    ('sequence_classification', 'train', 'text\tlabel\n', {}, 'train.tsv holds no example'),
    ('sequence_classification', 'eval', 'text\tlabel\n', {}, 'eval.tsv holds no example'),
    ('sequence_classification', 'test', 'label\nyes\n', {}, "test.tsv.* no column 'text'"),
    ('sequence_classification', '', '', {'data.text_column': 'body'}, "no column 'body'"),
    ('sequence_classification', '', '', {'data.train': ''}, 'data.train is not set'),
    ('sequence_classification', '', '', {'init_from': ''}, 'give its folder as init_from'),
    ('sequence_classification', '', '', {'keep_best': 'f2'}, "keep_best='f2' is not a score"),
    ('sequence_classification', '', '', {'data.long': 'all'}, "long='all' is unknown"),
    ('sequence_classification', '', '', {'model.num_heads': 2},
     'holds a model with num_heads=4, this config has model.num_heads=2'),
    ('sequence_classification', '', '', {'max_len': 100}, 'above model.max_positions=64'),
    ('sequence_classification', '', '', {'phases': ((1, 8, 8),)}, 'are for pretraining'),
    ('sequence_classification', '', '', {'checkpoint_every': 0, 'keep_every': 15},
     'keep_every=15 is not a multiple of checkpoint_every=10: '),  # 160 examples, 16 at a time
    ('token_classification', 'eval', 'w1 B-XYZ\n', {}, "the tag 'B-XYZ' is none of the 3 tags"),
    ('token_classification', 'train', 'w1 O\n', {}, "has the tag 'O' only"),
    ('token_classification', 'train', 'w1 O\nw2\n', {}, 'line 2: .w2. has a word without a tag'),
    ('sequence_classification', 'train', 'text\tlabel\nx\t1.5\ny\t1.5\n',
     {'data.problem': 'regression'}, 'all rows have the same label 1.5: there is nothing to'),
    ('question_answering', 'train', json.dumps({'data': [{'paragraphs': [{
        'context': 'w1 w2', 'qas': [{'id': '1', 'question': 'w1?', 'answers': []}]}]}]}), {},
     'no question has an answer: there is nothing to learn'),
    ('question_answering', '', '', {'max_len': 8, 'data.doc_stride': 0}, 'doc_stride=0'),
    ('multiple_choice', 'train', '{"text": "x", "choices": ["a", "b"], "label": 5}\n', {},
     'the label 5 is none of the 2 choices'),
])
def test_mistakes_are_refused(pretrained, tmp_path, task, name, content, overrides, message):  # noqa: F811
  c = make_config(task, pretrained, tmp_path, train_epochs=1.0, **overrides)
  if name == 'test':
    c.data.test = str(tmp_path / 'test.tsv')
  if name:
    pathlib.Path(c.data[name]).write_text(content)
  with pytest.raises(UserError, match=message):
    run.run(c, str(tmp_path / 'run'))


@pytest.mark.medium
def test_answers_at_a_wrong_offset_are_counted(pretrained, tmp_path, capsys):  # noqa: F811
  c = make_config('question_answering', pretrained, tmp_path, train_epochs=0.0, train_steps=1)
  content = json.loads(pathlib.Path(c.data.train).read_text())
  for paragraph in content['data'][0]['paragraphs'][:3]:
    paragraph['qas'][0]['answers'][0]['answer_start'] += 1
  pathlib.Path(c.data.train).write_text(json.dumps(content))
  run.run(c, str(tmp_path / 'run'))
  out = capsys.readouterr().out
  assert '3 of 160 questions of' in out and '157 to train on' in out


def test_a_question_longer_than_the_window_is_refused(pretrained, tmp_path):  # noqa: F811
  c = make_config('question_answering', pretrained, tmp_path, max_len=8)
  content = json.loads(pathlib.Path(c.data.train).read_text())
  content['data'][0]['paragraphs'][0]['qas'][0]['question'] = 'Who w1 w2 w3 w4?'
  pathlib.Path(c.data.train).write_text(json.dumps(content))
  with pytest.raises(UserError, match="train.json: the question 'Who w1.* leaves no room"):
    run.run(c, str(tmp_path / 'run'))
