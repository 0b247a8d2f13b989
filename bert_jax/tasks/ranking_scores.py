"""Scores of a ranked list of documents, equal to the scores of trec_eval."""

from collections.abc import Sequence

import numpy as np

_FIRST = 10  # documents that count for NDCG and MRR


def of_query(ranked: np.ndarray, judged: np.ndarray) -> dict[str, float]:
  """Computes the scores of one query.

  Args:
    ranked: [n] grades of the ranked documents, best document first; above 0 is relevant.
    judged: [m] grades of all judged documents of the query, at least one above 0.

  Returns:
    NDCG@10 with the grades as gains (Järvelin and Kekäläinen 2002), MRR@10, MAP and
    recall of the list.
  """
  gains, ideal = (np.maximum(x, 0) for x in (ranked, np.sort(judged)[::-1]))
  discounts = 1 / np.log2(np.arange(_FIRST) + 2)
  dcg, best = (x[:_FIRST] @ discounts[:len(x)] for x in (gains, ideal))
  is_relevant, relevant = gains > 0, np.sum(ideal > 0)
  places = 1 + np.flatnonzero(is_relevant)
  precision = np.arange(1, len(places) + 1) / places
  first = places[0] if len(places) else _FIRST + 1
  # MAP and recall divide by all relevant documents: a search that misses some pays for
  # it.
  return {'ndcg_10': float(dcg / best),
          'mrr_10': 1 / float(first) if first <= _FIRST else 0.0,
          'map': float(precision.sum() / relevant),
          'recall': float(len(places) / relevant)}


def mean(of_queries: Sequence[dict[str, float]]) -> dict[str, float]:
  """Returns the mean of each score over at least one query."""
  return {name: float(np.mean([scores[name] for scores in of_queries]))
          for name in of_queries[0]}
