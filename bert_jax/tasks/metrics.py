"""Scores of predictions on the host, as the tasks' own scorers have them."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import re
import string

import numpy as np
from scipy import stats
from sklearn import metrics as sk

from bert_jax.labelled import conll
from bert_jax.labelled.squad import Question

# ---- sequences ----------------------------------------------------------------------------------


def single_label(gold: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
  """Accuracy, F1 (of the second of two classes, else the mean over classes), Matthews.

  Args:
    gold, predicted: [n] int.
    classes: their number.
  """
  average = 'binary' if classes == 2 else 'macro'
  return {'accuracy': float(np.mean(gold == predicted)),
          'f1': float(sk.f1_score(gold, predicted, average=average, zero_division=0)),
          'matthews': float(sk.matthews_corrcoef(gold, predicted))}


def multi_label(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Accuracy (all labels right), F1 over all labels together, and the mean of each label's F1.

  Args:
    gold, predicted: [n, classes] 0 or 1.
  """
  return {'accuracy': float(np.mean((gold == predicted).all(1))),
          'f1': float(sk.f1_score(gold, predicted, average='micro', zero_division=0)),
          'f1_macro': float(sk.f1_score(gold, predicted, average='macro', zero_division=0))}


def regression(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Pearson's and Spearman's correlation, 0 where one side is constant; the squared error."""
  constant = np.ptp(gold) == 0 or np.ptp(predicted) == 0
  return {'pearson': 0.0 if constant else float(stats.pearsonr(gold, predicted).statistic),
          'spearman': 0.0 if constant else float(stats.spearmanr(gold, predicted).statistic),
          'squared_error': float(np.mean(np.square(gold - predicted)))}


# ---- entities -----------------------------------------------------------------------------------


def _ratios(correct: int, found: int, there: int) -> tuple[float, float, float]:
  """(precision, recall, F1), 0 where undefined."""
  precision, recall = correct / found if found else 0.0, correct / there if there else 0.0
  return precision, recall, 2 * precision * recall / (precision + recall) if correct else 0.0


def entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
  """Precision, recall and F1 of whole entities, and the tags' accuracy (Tjong Kim Sang 2000).

  Args:
    gold, predicted: the tags of each sentence.
  """
  there, found, correct = _count_entities(gold, predicted)
  precision, recall, f1 = _ratios(correct.total(), found.total(), there.total())
  pairs = [a == b for x, y in zip(gold, predicted) for a, b in zip(x, y)]
  return {'precision': precision, 'recall': recall, 'f1': f1,
          'accuracy': float(np.mean(pairs)) if pairs else 0.0}


def _count_entities(gold, predicted) -> tuple[Counter, Counter, Counter]:
  """By label: the entities that there are, those found, those found rightly."""
  there, found, correct = Counter(), Counter(), Counter()
  for a, b in zip(gold, predicted, strict=True):
    if len(a) != len(b):
      raise ValueError(f'{len(a)} gold and {len(b)} predicted tags')
    a, b = set(conll.entities(a)), set(conll.entities(b))
    for counter, which in ((there, a), (found, b), (correct, a & b)):
      counter.update(entity.label for entity in which)
  return there, found, correct


def _in_per_cent(precision: float, recall: float, f1: float) -> str:
  return (f'precision: {100 * precision:6.2f}%; recall: {100 * recall:6.2f}%; FB1: '
          f'{100 * f1:6.2f}')


def conlleval_report(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> str:
  """What the conlleval script prints."""
  there, found, correct = _count_entities(gold, predicted)
  s = entities(gold, predicted)
  lines = [f'processed {sum(map(len, gold))} tokens with {there.total()} phrases; found: '
           f'{found.total()} phrases; correct: {correct.total()}.',
           f'accuracy: {100 * s["accuracy"]:6.2f}%; '
           + _in_per_cent(s['precision'], s['recall'], s['f1'])]
  for label in sorted(there.keys() | found.keys()):
    shown = _in_per_cent(*_ratios(correct[label], found[label], there[label]))
    lines.append(f'{label:>17}: {shown}  {found[label]}')
  return '\n'.join(lines) + '\n'


# ---- answers ------------------------------------------------------------------------------------

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalise_answer(text: str) -> str:
  """Lower case, without ASCII punctuation, articles and extra white space, as SQuAD scores it."""
  return ' '.join(_ARTICLES.sub(' ', text.lower().translate(_PUNCTUATION)).split())


def _overlap(predicted: str, gold: str) -> float:
  """F1 over the bags of words of two normalised answers."""
  a, b = predicted.split(), gold.split()
  common = (Counter(a) & Counter(b)).total()
  return 2 * common / (len(a) + len(b)) if common else 0.0


def _answer_scores(question: Question, predicted: str, unanswerable: bool) -> tuple[float, float]:
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
  scores = {}
  for question in questions:
    if question.id in predicted:
      scores[question.id] = (*_answer_scores(question, predicted[question.id], unanswerable),
                             bool(question.answers))
    elif not unanswerable:
      scores[question.id] = (0.0, 0.0, True)
  table = 100 * np.array(list(scores.values()), np.float64).reshape(-1, 3)
  found = dict(zip(('exact_match', 'f1'), table.mean(0)[:2].tolist())) if len(table) else {}
  if unanswerable:
    for name, kind in (('has_answer', 100.0), ('no_answer', 0.0)):
      part = table[table[:, 2] == kind]
      if len(part):
        found |= {f'{name}_exact_match': float(part[:, 0].mean()),
                  f'{name}_f1': float(part[:, 1].mean())}
  return found


def best_threshold(questions: Sequence[Question], predicted: Mapping[str, str],
                   above: Sequence[float]) -> dict[str, float]:
  """The scores that the best threshold for "no answer" would give, as v2.0's scorer finds it.

  Args:
    questions: n, with or without answers.
    predicted: id -> the best answer, were there one.
    above: [n] how far no answer scores above it; the answer is given up to the threshold.

  Returns:
    best_exact_match, best_f1, and the threshold of the latter.
  """
  order = np.argsort(above, kind='stable')
  answered = np.array([_answer_scores(q, predicted[q.id], True) for q in questions])  # [n, 2]
  silent = np.array([[float(not q.answers)] * 2 for q in questions])
  gained = np.cumsum((answered - silent)[order], axis=0)  # with the first so many answered
  totals = silent.sum(0) + np.concatenate([np.zeros((1, 2)), gained])  # [n + 1, 2]
  best = totals.argmax(0)
  exact, f1 = 100 * totals.max(0) / len(questions)
  threshold = above[order[best[1] - 1]] if best[1] else float(np.min(above)) - 1.0
  return {'best_exact_match': float(exact), 'best_f1': float(f1),
          'best_f1_threshold': float(threshold)}
