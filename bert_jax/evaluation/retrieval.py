"""Retrieval: how well vectors find relevant documents, and how a reranker sorts them.

The scores equal the scores of trec_eval on the run files.
"""

from collections.abc import Iterable
import itertools

from etils import epath
import numpy as np
import tqdm

from bert_jax.data.late_inputs import DOCUMENT, QUERY
from bert_jax.errors import require, require_choice
from bert_jax.evaluation.report import Report
from bert_jax.inference import beir, json_lines, search, short_vectors, stored_vectors
from bert_jax.inference.bert import Bert, load_cross_encoder
from bert_jax.interop.late_layout import LateLayout
from bert_jax.interop.sentence_layout import DOCUMENT_PROMPTS, QUERY_PROMPTS
from bert_jax.runtime.console import print_summary
from bert_jax.tasks import late_interaction, metrics, reranking

RUN, RERANKED = '.run', '.reranked.run'  # suffixes of the files next to the report
_DEPTH = 100  # scored documents of a query
_QUANTIZED_AT_ONCE = 1 << 16  # vectors
_DOCUMENTS_AT_ONCE = 1024  # whose token vectors are in memory
_QUERIES_AT_ONCE = 16  # of the reranker: a kill loses the scores of at most this many

# {query: [(document, score)]}, best first; at equal scores, the larger name first, as
# in trec_eval.
Run = dict[str, list[tuple[str, float]]]


def _sorted(hits: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
  return sorted(hits, key=lambda hit: (hit[1], hit[0]), reverse=True)


def _files(path: epath.Path) -> list[epath.Path]:
  return [path.with_suffix(f'.{name}.npy') for name in ('corpus', 'queries')]


def _embed(bert: Bert, corpus: beir.Texts, queries: beir.Texts, path: epath.Path,
           **options):
  files = _files(path)
  prompts_of = DOCUMENT_PROMPTS, QUERY_PROMPTS
  for texts, file, prompts in zip((corpus, queries), files, prompts_of):
    stored_vectors.write(bert, texts, len(texts.ids), texts.digest, file, prompts,
                         **options)


def _shorten(path: epath.Path, precision: str) -> tuple[epath.Path, search.Restore]:
  """Writes the quantized vectors of the documents; returns the file and its reader."""
  vectors = np.load(_files(path)[0], mmap_mode='r')
  ranges = short_vectors.ranges_of(vectors)
  short = path.with_suffix(f'.corpus.{precision}.npy')
  width = short_vectors.quantize(vectors[:1], precision, ranges).shape[1]
  file = np.lib.format.open_memmap(short, 'w+', np.int8, (len(vectors), width))
  for first in range(0, len(vectors), _QUANTIZED_AT_ONCE):
    part = slice(first, first + _QUANTIZED_AT_ONCE)
    file[part] = short_vectors.quantize(vectors[part], precision, ranges)
  file.flush()
  return short, short_vectors.restorer(precision, ranges)


def _search(corpus: beir.Texts, queries: beir.Texts, path: epath.Path,
            file: epath.Path | None = None, restore: search.Restore | None = None) -> Run:
  """Finds the nearest documents of each query, by default by their float32 vectors."""
  vectors, of_queries = _files(path)
  # One more: as in BEIR, a document with the id of the query does not count. The corpus
  # of ArguAna contains its queries.
  hits = search.search(np.load(of_queries), file or vectors, _DEPTH + 1, restore)
  run = {}
  of_queries = zip(queries.ids, hits.scores.tolist(), hits.numbers.tolist())
  for query, scores, numbers in of_queries:
    others = [(corpus.ids[i], score) for i, score in zip(numbers, scores)
              if corpus.ids[i] != query]
    run[query] = _sorted(others[:_DEPTH])
  return run


def _search_late(bert: Bert, corpus: beir.Texts, queries: beir.Texts) -> Run:
  """Finds the documents of each query by MaxSim, exactly.

  Only one window of documents is in memory at a time. The token vectors are not stored.
  """
  of_queries = late_interaction.vectors(bert, list(queries), QUERY)
  run = {name: [] for name in queries.ids}
  documents = iter(zip(corpus.ids, corpus))
  with tqdm.tqdm(total=len(corpus.ids), desc='MaxSim', unit=' texts', disable=None) as bar:
    while window := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
      names, texts = zip(*window)
      vectors = late_interaction.vectors(bert, texts, DOCUMENT)
      of_window = late_interaction.max_sims(of_queries, vectors)
      for query, row in zip(queries.ids, of_window.tolist()):
        hits = [hit for hit in zip(names, row) if hit[0] != query]
        run[query] = _sorted([*run[query], *hits])[:_DEPTH]
      bar.update(len(window))
  return run


def _rerank(reranker: Bert, corpus: beir.Texts, queries: beir.Texts, run: Run,
            path: epath.Path) -> Run:
  """Reorders the documents by a cross-encoder; PATH.reranked.jsonl has its scores."""
  needed = {name for hits in run.values() for name, _ in hits}
  # A large corpus may exceed the memory: keep only the texts of the hits.
  texts = {name: text for name, text in zip(corpus.ids, corpus) if name in needed}
  asked = list(zip(queries.ids, queries))
  job = {'model': json_lines.identity(reranker.model), 'corpus': corpus.digest,
         'queries': queries.digest, 'run': run}

  def reranked(window):
    pairs = [(text, texts[document]) for name, text in window
             for document, _ in run[name]]
    scores = iter(reranking.pair_logits(reranker, pairs).tolist())
    return [
        {'query': name, 'hits': [(document, next(scores)) for document, _ in run[name]]}
        for name, _ in window]

  lines, _ = json_lines.write_all(
      path.with_suffix('.reranked.jsonl'), job, asked, len(asked), _QUERIES_AT_ONCE,
      reranked, desc='reranking', unit=' queries')
  return {line['query']: _sorted(map(tuple, line['hits'])) for line in lines}


def run_file(run: Run) -> str:
  """Returns a run in the format of trec_eval: query Q0 document rank score name."""
  return ''.join(
      f'{query} Q0 {document} {rank} {score!r} bert_jax\n'
      for query, hits in run.items() for rank, (document, score) in enumerate(hits, 1))


def scores(run: Run, qrels: beir.Qrels) -> dict[str, float]:
  """Returns the mean scores over the judged queries; `run` must have hits for each."""
  return metrics.mean([
      metrics.ranking(np.array([grades.get(name, 0) for name, _ in run[query]]),
                              np.array(list(grades.values())))
      for query, grades in qrels.items()])


def evaluate(bert: Bert, source: str, path: epath.Path, *, split: str = 'test',
             pooling: str | None = None, max_len: int | None = None,
             precision: str = 'float32', rerank: str = '') -> Report:
  """Computes NDCG@10, MRR@10, MAP@100 and recall@100 of the nearest documents.

  Args:
    bert: the model for queries and documents; a late-interaction model scores by MaxSim.
    source: a folder in BEIR's layout.
    path: the path of the report. PATH.corpus.npy and PATH.queries.npy have the vectors,
      PATH.corpus.PRECISION.npy the quantized ones, PATH.reranked.jsonl the scores of the
      reranker. The returned report has the content of PATH.run, the hits.
    split: its judgments are in qrels/SPLIT.tsv.
    pooling: cls, mean or max; None = the pooling of the model, or mean.
    max_len: see `Bert.embed`.
    precision: of the stored vectors of documents, one of `short_vectors.PRECISIONS`; the
      table has the scores of float32 too.
    rerank: a cross-encoder that reorders the hits, for PATH.reranked.run; '' = none. See
      `bert.load`.

  Raises:
    UserError: a mistake in the folder or the arguments.
  """
  require_choice('--precision', precision, short_vectors.PRECISIONS)
  # Before the search, which takes long: raises UserError for another task's model.
  reranker = load_cross_encoder(rerank)
  if isinstance(bert.model.text_layout, LateLayout):
    for flag, given in (('pooling', pooling), ('max_len', max_len),
                        ('precision', precision != 'float32')):
      require(not given, f'--{flag} has no effect here: a late-interaction model has one '
                         'vector per token, and sets its own lengths')
  require(epath.Path(source).is_dir(), f'--data={source} is not a folder')
  corpus, queries, qrels, absent = beir.load(epath.Path(source), split)
  if absent:
    print_summary([('note', f'{len(absent):,} judged documents are not in the corpus, such '
                            f'as {absent[0]!r}: they count as not found, as in trec_eval')])
  if isinstance(bert.model.text_layout, LateLayout):
    run = _search_late(bert, corpus, queries)
  else:
    short_vectors.check(precision, stored_vectors.width_of(bert, pooling, max_len))
    _embed(bert, corpus, queries, path, pooling=pooling, max_len=max_len,
           normalize=bert.dense.search_normalizes)
    run = _search(corpus, queries, path)
  rows = [['search', *scores(run, qrels).values()]]
  if precision != 'float32':
    run = _search(corpus, queries, path, *_shorten(path, precision))
    rows.append([f'search in {precision}', *scores(run, qrels).values()])
  runs = {RUN: run_file(run)}
  if reranker:
    run = _rerank(reranker, corpus, queries, run, path)
    runs[RERANKED] = run_file(run)
    rows.append([f'reranked top {_DEPTH}', *scores(run, qrels).values()])
  facts = {'split': split, 'documents': len(corpus.ids), 'queries': len(queries.ids),
           'absent_documents': len(absent), 'pooling': pooling, 'max_len': max_len,
           'precision': precision, 'reranker': rerank or None}
  columns = ('hits of', 'NDCG@10', 'MRR@10', f'MAP@{_DEPTH}', f'recall@{_DEPTH}')
  return Report(facts, columns, rows, 'NDCG@10', runs)
