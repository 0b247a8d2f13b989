"""Scores by hand and by the official scorers."""

import numpy as np
import pytest

from bert_jax.labelled.squad import Question
from bert_jax.tasks import metrics


def test_single_label_by_hand():
  gold, predicted = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
  scores = metrics.single_label(gold, predicted, 2)
  assert scores['accuracy'] == pytest.approx(3 / 5)
  assert scores['f1'] == pytest.approx(2 / 3)  # precision 2/3, recall 2/3
  assert scores['matthews'] == pytest.approx((2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2))
  assert metrics.single_label(gold, np.ones(5, int), 2)['matthews'] == 0
  of_three = metrics.single_label(np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2]), 3)
  assert of_three['f1'] == pytest.approx((1 + 0 + 4 / 5) / 3)


def test_multi_label_by_hand():
  gold, predicted = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[1, 0], [1, 0], [0, 1]])
  scores = metrics.multi_label(gold, predicted)
  assert scores['accuracy'] == pytest.approx(1 / 3)
  assert scores['f1'] == pytest.approx(2 * 2 / (3 + 3))
  assert scores['f1_macro'] == pytest.approx((1 + 0) / 2)


def test_regression_by_hand():
  scores = metrics.regression(np.array([0.0, 1, 2, 3]), np.array([0.0, 1, 4, 9]))
  assert scores['spearman'] == pytest.approx(1)
  assert scores['pearson'] == pytest.approx(15 / np.sqrt(5 * 49))
  assert scores['squared_error'] == pytest.approx((4 + 36) / 4)
  assert metrics.regression(np.arange(3.0), np.ones(3))['pearson'] == 0


def test_entities_as_conlleval_counts_them():
  gold = [['B-PER', 'I-PER', 'O', 'B-LOC'], ['I-ORG', 'O']]
  predicted = [['B-PER', 'I-PER', 'O', 'B-PER'], ['B-ORG', 'I-ORG']]

  def of_label(label):
    one = [[[tag if tag.endswith(label) else 'O' for tag in tags] for tags in side]
           for side in (gold, predicted)]
    return [round(100 * metrics.entities(*one)[name], 2) for name in ('precision', 'recall', 'f1')]

  assert [round(100 * x, 2) for x in metrics.entities(gold, predicted).values()] == [
      33.33, 33.33, 33.33, 50]
  assert of_label('PER') == [50, 100, 66.67]
  assert of_label('LOC') == of_label('ORG') == [0, 0, 0]
  assert metrics.entities([['O']], [['O']]) == {'precision': 0, 'recall': 0, 'f1': 0, 'accuracy': 1}
  with pytest.raises(ValueError, match='argument 2 is shorter'):
    metrics.entities([['O', 'O']], [['O']])


def question(i, *answers):
  return Question(i, 'q', 'c', answers, (0,) * len(answers))


def test_answers_are_normalized():
  assert metrics.normalize_answer(" The  cat's, an-a \n The-Hat ") == 'cats ana thehat'
  assert metrics.normalize_answer('the a an') == ''
  assert metrics.normalize_answer('«Théâtre»') == '«théâtre»'  # ASCII punctuation only


def test_answers_v1():
  questions = [question('1', 'the Green Hat', 'hat'), question('2', 'Ann'), question('3', 'x')]
  scores = metrics.answers(questions, {'1': 'A green hat!', '2': 'Ann Lee'}, unanswerable=False)
  assert scores == {'exact_match': pytest.approx(100 / 3),
                    'f1': pytest.approx(100 * (1 + 2 / 3 + 0) / 3)}
  # Two answers of only articles match exactly but share no word, as in v1.1's scorer.
  assert metrics.answers([question('1', 'the')], {'1': 'a'}, unanswerable=False) == {
      'exact_match': 100, 'f1': 0}


def test_answers_v2():
  questions = [question('1', 'hat'), question('2'), question('3'), question('4', 'x', 'the')]
  scores = metrics.answers(questions, {'1': '', '2': 'the', '3': 'cat', }, unanswerable=True)
  assert scores['exact_match'] == pytest.approx(100 / 3)  # '4' has no prediction: left out
  assert scores['has_answer_f1'] == 0 and scores['no_answer_f1'] == 50


def test_the_best_threshold_by_hand():
  questions = [question('1', 'hat'), question('2'), question('3', 'cat')]
  predicted = {'1': 'hat', '2': 'no', '3': 'dog'}
  # Up to -1 only the first is answered: two of three right. Up to 2 the second too: one right.
  scores = metrics.best_threshold(questions, predicted, [-1.0, 2.0, 3.0])
  assert scores['best_exact_match'] == pytest.approx(200 / 3)
  assert scores['best_f1_threshold'] == -1.0
