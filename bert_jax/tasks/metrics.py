"""Scores of predictions on the host, as the tasks' own scorers have them.

scikit-learn and scipy.stats are imported where they score: they take a second of every start.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import re
import string

import numpy as np

from bert_jax.labelled import conll
from bert_jax.labelled.squad import Question

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)


def single_label(gold: np.ndarray, predicted: np.ndarray,
                 classes: int) -> dict[str, float]:
  """Accuracy, F1 (of the second of two classes, else the mean over classes), Matthews; [n] int."""
  from sklearn import metrics as sk

  average = 'binary' if classes == 2 else 'macro'
  return {'accuracy': float(np.mean(gold == predicted)),
          'f1': float(sk.f1_score(gold, predicted, average=average, zero_division=0)),
          'matthews': float(sk.matthews_corrcoef(gold, predicted))}


def multi_label(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Accuracy (all labels right), F1 over all labels, mean of each label's F1; [n, classes] 0, 1."""
  from sklearn import metrics as sk

  return {
      'accuracy': float(np.mean((gold == predicted).all(1))),
      'f1': float(sk.f1_score(gold, predicted, average='micro', zero_division=0)),
      'f1_macro': float(sk.f1_score(gold, predicted, average='macro', zero_division=0))
  }


def regression(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Pearson's and Spearman's correlation, 0 where one side is constant; the squared error."""
  from scipy import stats

  constant = np.ptp(gold) == 0 or np.ptp(predicted) == 0
  return {
      'pearson': 0.0 if constant else float(stats.pearsonr(gold, predicted).statistic),
      'spearman': 0.0 if constant else float(stats.spearmanr(gold, predicted).statistic),
      'squared_error': float(np.mean(np.square(gold - predicted)))
  }


def entities(gold: Sequence[Sequence[str]],
             predicted: Sequence[Sequence[str]]) -> dict[str, float]:
  """Precision, recall and F1 of the entities in tagged sentences, and the tags' accuracy.

  As conlleval has them (Tjong Kim Sang and Buchholz 2000); 0 where undefined.
  """
  def numbered(sentences):
    return {
        (i, entity) for i, tags in enumerate(sentences) for entity in conll.entities(tags)
    }

  of_gold, of_predicted = numbered(gold), numbered(predicted)
  correct = []
  for a, b in zip(gold, predicted, strict=True):
    if len(a) != len(b):
      raise ValueError(f'{len(a)} gold and {len(b)} predicted tags')
    correct += [x == y for x, y in zip(a, b)]
  both = len(of_gold & of_predicted)
  precision = both / len(of_predicted) if of_predicted else 0.0
  recall = both / len(of_gold) if of_gold else 0.0
  return {'precision': precision, 'recall': recall,
          'f1': 2 * precision * recall / (precision + recall) if both else 0.0,
          'accuracy': float(np.mean(correct)) if correct else 0.0}


def normalise_answer(text: str) -> str:
  """Lower case, without ASCII punctuation, articles and extra white space, as SQuAD scores it."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def _overlap(predicted: str, gold: str) -> float:
  """F1 over the bags of words of two normalised answers."""
  a, b = predicted.split(), gold.split()
  common = (Counter(a) & Counter(b)).total()
  return 2 * common / (len(a) + len(b)) if common else 0.0


def _answer_scores(question: Question, predicted: str,
                   unanswerable: bool) -> tuple[float, float]:
  """(exact match, F1) with the best of a question's answers."""
  predicted = normalise_answer(predicted)
  gold = [normalise_answer(answer) for answer in question.answers]
  if unanswerable:  # v2.0: answers of nothing but articles do not count, no answer at all is ''
    gold = [answer for answer in gold if answer] or ['']
  exact = max((float(predicted == answer) for answer in gold), default=0.0)
  if unanswerable and not (predicted and gold[0]):
    return exact, exact
  return exact, max((_overlap(predicted, answer) for answer in gold), default=0.0)


def answers(questions: Iterable[Question], predicted: Mapping[str, str], *,
            unanswerable: bool) -> dict[str, float]:
  """Exact match and F1 in per cent, as the official scorers of SQuAD v1.1 and v2.0 give them.

  Args:
    questions: with their gold answers.
    predicted: id -> text, '' = no answer.
    unanswerable: v2.0's rules: questions without a prediction are left out, and the questions with
      and without an answer are also scored apart. In v1.1 a missing prediction scores 0.
  """
  rows = []
  for question in questions:
    if question.id in predicted:
      exact, f1 = _answer_scores(question, predicted[question.id], unanswerable)
      rows.append((exact, f1, bool(question.answers)))
    elif not unanswerable:
      rows.append((0.0, 0.0, True))
  table = 100 * np.array(rows, np.float64).reshape(-1, 3)
  groups = {'': table}
  if unanswerable:
    groups |= {
        'has_answer_': table[table[:, 2] > 0],
        'no_answer_': table[table[:, 2] == 0]
    }
  return {f'{group}{name}': float(scores[:, i].mean()) for group, scores in groups.items()
          for i, name in enumerate(('exact_match', 'f1')) if len(scores)}


def best_threshold(questions: Sequence[Question], predicted: Mapping[str, str],
                   margins: Sequence[float]) -> dict[str, float]:
  """The scores that the best threshold for "no answer" would give, as v2.0's scorer finds it.

  Args:
    questions: n, with or without answers.
    predicted: id -> the best answer that is not empty.
    margins: [n] score of no answer minus score of the answer; a question is answered if its margin
      is at most the threshold.

  Returns:
    best_exact_match, best_f1, and the threshold of the latter.
  """
  order = np.argsort(margins, kind='stable')
  answered = np.array([_answer_scores(q, predicted[q.id], True) for q in questions
                      ])  # [n, 2]
  silent = np.array([[float(not q.answers)] * 2 for q in questions])
  gained = np.cumsum((answered - silent)[order],
                     axis=0)  # with the first so many answered
  totals = silent.sum(0) + np.concatenate([np.zeros((1, 2)), gained])  # [n + 1, 2]
  best = totals.argmax(0)
  exact, f1 = 100 * totals.max(0) / len(questions)
  threshold = margins[order[best[1] - 1]] if best[1] else float(np.min(margins)) - 1.0
  return {'best_exact_match': float(exact), 'best_f1': float(f1),
          'best_f1_threshold': float(threshold)}
