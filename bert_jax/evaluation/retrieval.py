"""Retrieval: how well a model's vectors find the documents of queries, and a reranker orders them.

The scores are those that trec_eval gives for the run files.
"""

from collections.abc import Iterable
import json

from etils import epath
import numpy as np
import tqdm

from bert_jax.errors import require
from bert_jax.evaluation.report import Report
from bert_jax.inference import beir, json_lines, search, stored_vectors
from bert_jax.inference.bert import Bert
from bert_jax.interop.sentence_layout import DOCUMENT, QUERY
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import ranking_scores, reranking

RUN, RERANKED = '.run', '.reranked.run'  # endings of the files beside the report
_DEPTH = 100  # documents of a query that are scored
_QUERIES_AT_ONCE = 16  # of the reranker: a kill loses the scores of so many

# {query: [(document, score)]}, the best first; of equal scores the larger name, as in trec_eval.
Run = dict[str, list[tuple[str, float]]]


def _sorted(hits: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
  return sorted(hits, key=lambda hit: (hit[1], hit[0]), reverse=True)


def _search(bert: Bert, corpus: beir.Texts, queries: beir.Texts, path: epath.Path,
            **options) -> Run:
  """The nearest documents of each query.

  A document with the id of the query does not count, as in BEIR: ArguAna's corpus has its queries.
  """
  files = [path.with_suffix(f'.{name}.npy') for name in ('corpus', 'queries')]
  for texts, file, prompts in zip((corpus, queries), files, (DOCUMENT, QUERY)):
    stored_vectors.write(bert, texts, len(texts.ids), texts.digest, file, prompts,
                         **options)
  hits = search.search(np.load(files[1]), files[0], _DEPTH + 1)
  run = {}
  for query, scores, index in zip(queries.ids, hits.scores.tolist(), hits.index.tolist()):
    others = [(corpus.ids[i], score)
              for i, score in zip(index, scores)
              if corpus.ids[i] != query]
    run[query] = _sorted(others[:_DEPTH])
  return run


def _rerank(reranker: Bert, corpus: beir.Texts, queries: beir.Texts, run: Run,
            path: epath.Path) -> Run:
  """The same documents in the order of a cross-encoder, whose scores PATH.reranked.jsonl keeps."""
  needed = {name for hits in run.values() for name, _ in hits}
  texts = {name: text for name, text in zip(corpus.ids, corpus) if name in needed}
  asked = list(zip(queries.ids, queries))
  job = {'model': json_lines.identity(reranker.model), 'corpus': corpus.digest,
         'queries': queries.digest, 'run': run}
  kept = path.with_suffix('.reranked.jsonl')
  with json_lines.partial(kept, job) as (sink, before), tqdm.tqdm(
      total=len(asked), initial=before.examples, desc='reranking', unit=' queries',
      disable=None) as bar:
    for first in range(before.examples, len(asked), _QUERIES_AT_ONCE):
      window = asked[first:first + _QUERIES_AT_ONCE]
      scores = iter(
          reranking.pair_logits(reranker, [(text, texts[document])
                                           for name, text in window
                                           for document, _ in run[name]]).tolist())
      for name, _ in window:
        json_lines.write(sink, {'query': name, 'hits': [
            (document, next(scores)) for document, _ in run[name]]})
      bar.update(len(window))
  lines = map(json.loads, kept.read_text().splitlines())
  return {line['query']: _sorted(map(tuple, line['hits'])) for line in lines}


def run_file(run: Run) -> str:
  """The text of a run as trec_eval reads it: query Q0 document rank score name."""
  return ''.join(
      f'{query} Q0 {document} {rank} {score!r} bert_jax\n'
      for query, hits in run.items() for rank, (document, score) in enumerate(hits, 1))


def scores(run: Run, qrels: beir.Qrels) -> dict[str, float]:
  """The mean of each score over the queries of the judgements, all of which the run has."""
  return ranking_scores.mean([
      ranking_scores.of_query(np.array([grades.get(name, 0) for name, _ in run[query]]),
                              np.array(list(grades.values())))
      for query, grades in qrels.items()])


def evaluate(bert: Bert, source: str, path: epath.Path, *, split: str = 'test',
             pooling: str | None = None, max_len: int | None = None,
             reranker: Bert | None = None) -> Report:
  """NDCG@10, MRR@10, MAP@100 and recall@100 of the nearest documents by the cosine.

  Args:
    bert: the model of queries and documents.
    source: a folder in BEIR's layout.
    path: of the report; PATH.corpus.npy and PATH.queries.npy have the vectors. The report has the
      hits for PATH.run.
    split: its judgements are in qrels/SPLIT.tsv.
    pooling: cls, mean or max; None = the model's own, or mean.
    max_len: as for `Bert.embed`.
    reranker: a cross-encoder that orders the hits anew, for PATH.reranked.run.

  Raises:
    UserError: a mistake in the folder or the arguments.
  """
  if reranker:
    reranking.RerankingKind.head_of(reranker)
  require(epath.Path(source).is_dir(), f'--data={source} is no folder')
  corpus, queries, qrels, absent = beir.load(epath.Path(source), split)
  if absent:
    print_summary([('note',
                    f'{len(absent):,} judged documents are not in the corpus, such as '
                    f'{absent[0]!r}: they count as not found, as in trec_eval')])
  run = _search(bert, corpus, queries, path, pooling=pooling, max_len=max_len)
  runs = {RUN: run_file(run)}
  rows = [['search', *scores(run, qrels).values()]]
  if reranker:
    run = _rerank(reranker, corpus, queries, run, path)
    runs[RERANKED] = run_file(run)
    rows.append([f'reranked top {_DEPTH}', *scores(run, qrels).values()])
  facts = {'split': split, 'documents': len(corpus.ids), 'queries': len(queries.ids),
           'absent_documents': len(absent),
           'pooling': pooling, 'max_len': max_len,
           'reranker': reranker and reranker.model.facts.get('source')}
  columns = ('hits of', 'NDCG@10', 'MRR@10', f'MAP@{_DEPTH}', f'recall@{_DEPTH}')
  return Report(facts, columns, rows, 'NDCG@10', runs)
