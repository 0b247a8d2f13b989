"""Scores of predictions on the host, equal to the official scorers of each task.

Functions import scikit-learn and scipy.stats, because these imports take a second.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import itertools
import re
import string

import numpy as np

from bert_jax.labelled import conll, squad

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_FIRST = 10  # documents that count for NDCG and MRR


def single_label(gold: np.ndarray, predicted: np.ndarray,
                 classes: int) -> dict[str, float]:
  """Computes accuracy, F1 and Matthews correlation of [n] int classes.

  With two classes, 'f1' is the F1 of the second class; with more, the mean over classes.
  """
  from sklearn import metrics as sk

  average = 'binary' if classes == 2 else 'macro'
  return {'accuracy': float(np.mean(gold == predicted)),
          'f1': float(sk.f1_score(gold, predicted, average=average, zero_division=0)),
          'matthews': float(sk.matthews_corrcoef(gold, predicted))}


def multi_label(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Computes accuracy (all labels right) and F1 of two [n, classes] bool arrays.

  'f1' is the micro average; 'f1_macro' is the mean over the labels.
  """
  from sklearn import metrics as sk

  return {
      'accuracy': float(np.mean((gold == predicted).all(1))),
      'f1': float(sk.f1_score(gold, predicted, average='micro', zero_division=0)),
      'f1_macro': float(sk.f1_score(gold, predicted, average='macro', zero_division=0))}


def regression(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Computes Pearson and Spearman correlation and mean squared error of [n] floats."""
  from scipy import stats

  # A correlation with a constant is undefined: it counts as 0.
  constant = np.ptp(gold) == 0 or np.ptp(predicted) == 0
  return {
      'pearson': 0.0 if constant else float(stats.pearsonr(gold, predicted).statistic),
      'spearman': 0.0 if constant else float(stats.spearmanr(gold, predicted).statistic),
      'squared_error': float(np.mean(np.square(gold - predicted)))}


def entities(gold: Sequence[Sequence[str]],
             predicted: Sequence[Sequence[str]]) -> dict[str, float]:
  """Computes precision, recall and F1 of entities, and the accuracy of tags.

  Counts as conlleval does (Tjong Kim Sang and Buchholz 2000); undefined scores are 0.

  Args:
    gold: the tags of each sentence.
    predicted: the same number of tags for each sentence.

  Raises:
    ValueError: a sentence has another number of predicted tags.
  """
  plain_letters = conll.letters_are_plain(itertools.chain(*gold, *predicted))

  def numbered(sentences):
    return {(i, entity) for i, tags in enumerate(sentences)
            for entity in conll.entities(tags, plain_letters)}

  of_gold, of_predicted = numbered(gold), numbered(predicted)
  # Strict: a missing tag would shift all tags after it.
  correct = [x == y for a, b in zip(gold, predicted, strict=True)
             for x, y in zip(a, b, strict=True)]
  # An entity counts only with the right type and both boundaries.
  both = len(of_gold & of_predicted)
  precision = both / len(of_predicted) if of_predicted else 0.0
  recall = both / len(of_gold) if of_gold else 0.0
  return {'precision': precision, 'recall': recall,
          'f1': 2 * precision * recall / (precision + recall) if both else 0.0,
          'accuracy': float(np.mean(correct)) if correct else 0.0}


def normalize_answer(text: str) -> str:
  """Lowercases; drops ASCII punctuation, articles and extra spaces, as SQuAD does."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def _overlap(predicted: str, gold: str) -> float:
  """Returns F1 over the bags of words of two normalized answers."""
  a, b = predicted.split(), gold.split()
  common = (Counter(a) & Counter(b)).total()
  return 2 * common / (len(a) + len(b)) if common else 0.0


def _answer_scores(question: squad.Question, predicted: str,
                   unanswerable: bool) -> tuple[float, float]:
  """Returns (exact match, F1) with the best answer to a question."""
  predicted = normalize_answer(predicted)
  gold = [normalize_answer(answer) for answer in question.answers]
  if unanswerable:
    # v2.0 ignores gold answers that are only articles; without an answer, '' is right.
    gold = [answer for answer in gold if answer] or ['']
  exact = max((float(predicted == answer) for answer in gold), default=0.0)
  # An empty answer shares no word with another one: F1 is then the exact match.
  if unanswerable and not (predicted and gold[0]):
    return exact, exact
  return exact, max((_overlap(predicted, answer) for answer in gold), default=0.0)


def answers(questions: Iterable[squad.Question], predicted: Mapping[str, str], *,
            unanswerable: bool) -> dict[str, float]:
  """Computes exact match and F1 in percent, as SQuAD's scorers of v1.1 and v2.0 do.

  Args:
    questions: with their gold answers.
    predicted: id -> text, '' = no answer.
    unanswerable: the rules of v2.0: skips questions without a prediction, and also scores
      the questions with and without an answer separately. In v1.1 a missing prediction
      scores 0.
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
    groups |= {'has_answer_': table[table[:, 2] > 0],
               'no_answer_': table[table[:, 2] == 0]}
  return {f'{group}{name}': float(scores[:, i].mean()) for group, scores in groups.items()
          for i, name in enumerate(('exact_match', 'f1')) if len(scores)}


def best_threshold(questions: Sequence[squad.Question], predicted: Mapping[str, str],
                   margins: Sequence[float]) -> dict[str, float]:
  """Returns the scores at the best threshold for "no answer", as in SQuAD's v2.0 scorer.

  Args:
    questions: n, with or without answers.
    predicted: id -> the best non-empty answer.
    margins: [n] score of no answer minus score of the answer. A question is answered if
      its margin is at most the threshold.

  Returns:
    best_exact_match, best_f1, and the threshold of best_f1.
  """
  # Raising the threshold answers the questions one by one in this order.
  order = np.argsort(margins, kind='stable')
  answered = np.array([_answer_scores(q, predicted[q.id], True) for q in questions])
  silent = np.array([[float(not q.answers)] * 2 for q in questions])
  gained = np.cumsum((answered - silent)[order], axis=0)  # [n, 2]
  totals = silent.sum(0) + np.concatenate([np.zeros((1, 2)), gained])  # [n + 1, 2]
  best = totals.argmax(0)
  exact, f1 = 100 * totals.max(0) / len(questions)
  # If no answer is best, the threshold lies below all margins.
  threshold = margins[order[best[1] - 1]] if best[1] else float(np.min(margins)) - 1.0
  return {'best_exact_match': float(exact), 'best_f1': float(f1),
          'best_f1_threshold': float(threshold)}


def ranking(ranked: np.ndarray, judged: np.ndarray) -> dict[str, float]:
  """Computes the scores of one query's ranked documents, as trec_eval does.

  Args:
    ranked: [n] grades of the ranked documents, best document first; above 0 is relevant.
    judged: [m] grades of all judged documents of the query, at least one above 0.

  Returns:
    NDCG@10 with the grades as gains (Järvelin and Kekäläinen 2002), reciprocal rank at
    10, average precision and recall of the list.
  """
  gains, ideal = (np.maximum(x, 0) for x in (ranked, np.sort(judged)[::-1]))
  discounts = 1 / np.log2(np.arange(_FIRST) + 2)
  dcg, best = (x[:_FIRST] @ discounts[:len(x)] for x in (gains, ideal))
  is_relevant, relevant = gains > 0, np.sum(ideal > 0)
  places = 1 + np.flatnonzero(is_relevant)
  precision = np.arange(1, len(places) + 1) / places
  first = places[0] if len(places) else _FIRST + 1
  # MAP and recall divide by all relevant documents, to penalize missed documents.
  return {'ndcg_10': float(dcg / best),
          'mrr_10': 1 / float(first) if first <= _FIRST else 0.0,
          'map': float(precision.sum() / relevant),
          'recall': float(len(places) / relevant)}


def mean(of_queries: Sequence[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of each score over at least one query."""
  return {name: float(np.mean([scores[name] for scores in of_queries]))
          for name in of_queries[0]}
