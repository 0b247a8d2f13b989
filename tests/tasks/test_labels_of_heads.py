"""Predictions and exports refuse two outputs with one name."""

import functools
import json
import types

import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.interop import conversion
from bert_jax.labelled import texts
from bert_jax.model.bert_config import BertConfig
from bert_jax.tasks import sequence_classification, token_classification
from tests import made_tasks

NAMES = ({'0': 'x', '1': 'x', '2': 'y'}, {'0': 'y', '1': 'x', '2': 'x'},
         {'0': 'LABEL_2', '1': 'y'}, {'0': 1, '1': '1', '2': 'O'})


@pytest.mark.parametrize('task, problem', [
    ('sequence_classification', 'single_label_classification'),
    ('sequence_classification', 'multi_label_classification'), ('token_classification', None)])
def test_outputs_with_one_name_are_refused(tmp_path, task, problem):
  folder = made_tasks.with_head(tmp_path / 'model', task, ('B-x', 'I-x', 'O'))
  path = tmp_path / 'model/config.json'
  fields = json.loads(path.read_text())
  if problem:
    fields['problem_type'] = problem

  def answer():
    bert = bert_jax.from_pretrained(folder)
    if task == 'token_classification':
      return token_classification.tag(bert, ['w1 w2 good'])
    return sequence_classification.classify(bert, ['w1 w2 good'])

  message = f'^{folder}: the outputs . and . of its head are both named .(x|1|LABEL_2).: give each'
  for names in NAMES:
    path.write_text(json.dumps({**fields, 'id2label': names}))
    with pytest.raises(UserError, match=message):
      answer()
    for to in ('huggingface', 'bert_jax'):
      with pytest.raises(UserError, match=message):
        conversion.convert(folder, str(tmp_path / to), to)
      assert not (tmp_path / to).exists()
  # Embeddings need no head.
  assert np.isfinite(bert_jax.from_pretrained(folder).embed(['w1'])).all()

  path.write_text(json.dumps({**fields, 'id2label': {'0': 'B-x', '1': 'I-x', '2': 'O'}}))
  result, = answer()
  if problem:
    assert len(result['probabilities']) == 3
    total = sum(result['probabilities'].values())
    assert (total == pytest.approx(1)) == (problem == 'single_label_classification')


def test_a_regression_with_several_outputs_answers_all(tmp_path):
  folder = made_tasks.with_head(tmp_path / 'model', 'sequence_classification', ('a', 'b', 'c'))
  path = tmp_path / 'model/config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'problem_type': 'regression'}))
  bert = bert_jax.from_pretrained(folder)
  logits = sequence_classification.class_logits(bert, ['w1', 'w2 w3'])
  assert sequence_classification.classify(bert, ['w1', 'w2 w3']) == [
      {'values': dict(zip('abc', row.tolist()))} for row in logits.astype(np.float64)]


def test_a_model_of_pairs_refuses_single_texts():
  bert = types.SimpleNamespace(model=types.SimpleNamespace(facts={'reads_pairs': True}))
  examples = [{'text': 'a', 'hypothesis': 'b'}]
  with pytest.raises(UserError, match="trained on pairs of texts: give 'text_pair', too"):
    sequence_classification.SequenceKind.answer(bert, examples, None)
  config = config_lib.finetuning('sequence_classification')
  config.model.update(vars(BertConfig()))
  of = functools.partial(texts.TextExample, where='x', label='yes')
  for pair, reads_pairs in ((None, False), ('b', True)):
    examples = [of(text='a', text_pair=pair), of(text='c', text_pair=pair)._replace(label='no')]
    files = sequence_classification.SequenceFiles.make(config, examples, [])
    assert files.facts['reads_pairs'] == reads_pairs
