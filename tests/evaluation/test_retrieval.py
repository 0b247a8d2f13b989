"""Retrieval: scores equal trec_eval's, hits equal a whole sort's, resumption, mistakes."""

import dataclasses
import json

from etils import epath
import numpy as np
import pytest
import pytrec_eval

import bert_jax
from bert_jax.errors import UserError
from bert_jax.evaluation import retrieval, suites
from bert_jax.inference import beir, stored_vectors
from bert_jax.inference import bert as bert_lib
from bert_jax.interop import load as load_lib
from bert_jax.interop import sentence_transformers
from bert_jax.interop.sentence_layout import SentenceLayout
from bert_jax.tasks import metrics, reranking
from tests import made_tasks


def theirs(run, qrels) -> dict[str, float]:
  """The means of pytrec_eval. It has no MRR@10: the MRR of the first ten hits replaces it."""
  measures = {'ndcg_10': 'ndcg_cut_10', 'map': 'map_cut_100', 'recall': 'recall_100'}
  of_query = pytrec_eval.RelevanceEvaluator(qrels, set(measures.values())).evaluate(
      {query: dict(hits) for query, hits in run.items()})
  tens = {query: dict(sorted(hits, key=lambda hit: (hit[1], hit[0]), reverse=True)[:10])
          for query, hits in run.items()}
  first = pytrec_eval.RelevanceEvaluator(qrels, {'recip_rank'}).evaluate(tens)
  means = {ours: np.mean([s[name] for s in of_query.values()]) for ours, name in measures.items()}
  return means | {'mrr_10': np.mean([s['recip_rank'] for s in first.values()])}


def test_scores_equal_trec_eval():
  """With grades from -1 to 3, many equal scores, and documents without a judgment."""
  rng, run, qrels = np.random.default_rng(0), {}, {}
  for i in range(60):
    names = [f'd{n}' for n in rng.permutation(300)[:100]]
    values = rng.integers(0, 12, 100).astype(np.float32) / 7
    run[f'q{i}'] = retrieval._sorted(zip(names, values.tolist()))
    grades = rng.choice([-1, 0, 1, 2, 3], rng.integers(1, 60), p=[.1, .5, .2, .1, .1])
    qrels[f'q{i}'] = {f'd{n}': int(g) for n, g in zip(rng.permutation(300), grades)}
    qrels[f'q{i}'][f'd{rng.integers(300)}'] = 1
  ours = retrieval.scores(run, qrels)
  assert ours == pytest.approx(theirs(run, qrels), abs=1e-9)
  assert min(ours.values()) > 0.02 and max(ours.values()) < 0.9  # no score is trivial


def test_scores_by_hand():
  # Hits 2 (grade 1) and 4 (grade 3) of four are relevant; a third document (grade 2) is missing.
  scores = metrics.ranking(np.array([0, 1, 0, 3]), np.array([1, 3, 2, 0]))
  dcg, ideal = 1 / np.log2(3) + 3 / np.log2(5), 3 + 2 / np.log2(3) + 1 / np.log2(4)
  assert scores == pytest.approx({'ndcg_10': dcg / ideal, 'mrr_10': 1 / 2,
                                  'map': (1 / 2 + 2 / 4) / 3, 'recall': 2 / 3})
  late = metrics.ranking(np.array([0] * 10 + [1]), np.array([1]))
  assert late == pytest.approx({'ndcg_10': 0, 'mrr_10': 0, 'map': 1 / 11, 'recall': 1})


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """130 documents, of which 20 repeat others; 12 queries, of which the last has no judgment."""
  path, rng = tmp_path_factory.mktemp('beir'), np.random.default_rng(0)

  def text(low, high):
    return ' '.join(f'w{n}' for n in rng.integers(0, 20, rng.integers(low, high)))

  documents = [{'_id': f'd{i}', 'title': f'n{i % 5}' if i % 2 else '', 'text': text(3, 12)}
               for i in range(110)]
  documents += [documents[i] | {'_id': f'e{i}'} for i in range(20)]
  queries = [{'_id': f'q{i}', 'text': text(1, 4)} for i in range(12)]
  queries[0] |= {'_id': 'd7'}  # a query with the name of a document
  lines = ['query-id\tcorpus-id\tscore']
  for query in queries[:-1]:
    lines += [f'{query["_id"]}\td{n}\t{g}' for g, n in enumerate(rng.permutation(110)[:4])]
  # As in ArguAna, the corpus lacks some judged documents; for q5 it lacks all relevant ones.
  lines = [line for line in lines if not line.startswith('q5\t')]
  lines += ['q3\tgone1\t3', 'q4\tgone2\t0', 'q4\tgone1\t1', 'q5\tgone3\t2', 'q5\td1\t0']
  (path / 'qrels').mkdir()
  (path / 'qrels/test.tsv').write_text('\n'.join(lines) + '\n')
  for name, rows in (('corpus', documents), ('queries', queries)):
    (path / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """(an encoder, a cross-encoder)."""
  path = tmp_path_factory.mktemp('models')
  return (made_tasks.model(path / 'bert'),
          made_tasks.with_head(path / 'reranker', 'sequence_classification', ('score',)))


def read_run(path) -> retrieval.Run:
  run = {}
  for line in path.read_text().splitlines():
    query, _, document, rank, score, _ = line.split()
    run.setdefault(query, []).append((document, float(score)))
    assert int(rank) == len(run[query])
  return run


def test_hits_equal_a_whole_sort_and_scores_equal_trec_eval(folder, models, tmp_path, capsys):
  suites.run(models[0], 'retrieval', str(folder), str(tmp_path / 'out.json'),
             {'rerank': models[1]})
  note = "3 judged documents are not in the corpus, such as 'gone1': they count as not found"
  assert note in capsys.readouterr().out
  bert, reranker = map(bert_jax.from_pretrained, models)
  documents, queries = ([json.loads(line) for line in (folder / f'{name}.jsonl').open()]
                        for name in ('corpus', 'queries'))
  queries = queries[:-1]
  texts = [f'{d["title"]} {d["text"]}'.strip() for d in documents]
  cosines = bert.similarity([q['text'] for q in queries], texts)
  run = read_run(tmp_path / 'out.run')
  assert list(run) == [q['_id'] for q in queries]
  for query, row in zip(queries, cosines):
    of_name = {d['_id']: s for d, s in zip(documents, row) if d['_id'] != query['_id']}
    hits = run[query['_id']]
    assert len(hits) == 100 and query['_id'] not in dict(hits)
    np.testing.assert_allclose([s for _, s in hits], sorted(of_name.values())[::-1][:100],
                               atol=2e-6)
    np.testing.assert_allclose([s for _, s in hits], [of_name[name] for name, _ in hits], atol=2e-6)
  qrels = beir.read_qrels(folder / 'qrels/test.tsv')
  reranked = read_run(tmp_path / 'out.reranked.run')
  name, hits = list(reranked.items())[3]
  assert {d for d, _ in hits} == {d for d, _ in run[name]}
  pairs = [(queries[3]['text'], dict(zip([d['_id'] for d in documents], texts))[d])
           for d, _ in hits]
  np.testing.assert_allclose([s for _, s in hits], reranking.pair_logits(reranker, pairs),
                             atol=1e-5)
  report = json.loads((tmp_path / 'out.json').read_text())
  assert (report['absent_documents'], report['queries']) == (3, 11)
  for row, hits in zip(report['rows'], (run, reranked), strict=True):
    expected = theirs(hits, qrels)
    assert expected != theirs(hits, {q: {d: g for d, g in grades.items() if 'gone' not in d}
                                     for q, grades in qrels.items()})
    assert row['NDCG@10'] == pytest.approx(expected['ndcg_10'], abs=1e-9)
    assert row['MRR@10'] == pytest.approx(expected['mrr_10'], abs=1e-9)
    assert row['MAP@100'] == pytest.approx(expected['map'], abs=1e-9)
    assert row['recall@100'] == pytest.approx(expected['recall'], abs=1e-9)


def test_queries_and_documents_have_their_own_prompts(folder, models, tmp_path):
  model = load_lib.load(models[0])
  for name, prompts in (('own', {'query': 'w1 w2 ', 'passage': 'w3 '}), ('other', {'x': 'w4 '})):
    layout = SentenceLayout(prompts=prompts, default_prompt='x' if 'x' in prompts else None)
    sentence_transformers.save(dataclasses.replace(model, text_layout=layout),
                               epath.Path(tmp_path / name))
    suites.run(str(tmp_path / name), 'retrieval', str(folder), str(tmp_path / f'{name}.json'), {})
    documents, queries = ([json.loads(line) for line in (folder / f'{kind}.jsonl').open()]
                          for kind in ('corpus', 'queries'))
    bert = bert_jax.from_pretrained(models[0])
    before = prompts.get('passage', ''), prompts.get('query', '')  # never the default prompt
    texts = [f'{before[0]}{d["title"]} {d["text"]}' if d['title'] else before[0] + d['text']
             for d in documents]
    np.testing.assert_allclose(np.load(tmp_path / f'{name}.corpus.npy'),
                               bert.embed(texts, normalize=True), atol=1e-6)
    np.testing.assert_allclose(
        np.load(tmp_path / f'{name}.queries.npy'),
        bert.embed([before[1] + q['text'] for q in queries[:-1]], normalize=True), atol=1e-6)


def test_a_killed_evaluation_resumes(folder, models, tmp_path, monkeypatch):
  monkeypatch.setattr(stored_vectors, '_WINDOW', 50)
  monkeypatch.setattr(retrieval, '_QUERIES_AT_ONCE', 4)
  options = {'rerank': models[1]}
  arguments = (models[0], 'retrieval', str(folder))
  suites.run(*arguments, str(tmp_path / 'whole.json'), dict(options))
  embed, score, texts, pairs = bert_lib.Bert.embed, reranking.pair_logits, [], []

  def count(calls, kill_at, function, size):
    def counted(*args, **kwargs):
      calls.append(size(*args))
      if len(calls) == kill_at:
        raise KeyboardInterrupt
      return function(*args, **kwargs)
    return counted

  monkeypatch.setattr(bert_lib.Bert, 'embed', count(texts, 3, embed, lambda _, x, *__: len(x)))
  monkeypatch.setattr(reranking, 'pair_logits', count(pairs, 2, score, lambda _, x: len(x)))
  for _ in range(2):
    with pytest.raises(KeyboardInterrupt):
      suites.run(*arguments, str(tmp_path / 'out.json'), dict(options))
  suites.run(*arguments, str(tmp_path / 'out.json'), dict(options))
  # An empty call checks the options. The kill costs only the second window of the corpus.
  assert [n for n in texts if n] == [50, 50, 50, 30, 11]
  assert pairs == [400, 400, 400, 300]
  for end in ('run', 'reranked.run', 'json'):
    assert (tmp_path / f'out.{end}').read_text() == (tmp_path / f'whole.{end}').read_text()


@pytest.mark.parametrize('file, content, message', [
    ('qrels/test.tsv', None, 'qrels/test.tsv cannot be read: No such file'),
    ('corpus.jsonl', None, 'corpus.jsonl cannot be read: No such file'),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\nq1\tmissing\t1\nq1\tlost\t1\n',
     "corpus.jsonl lacks every relevant document of .*, such as 'lost': do the two belong"),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\nq1\tlost\t1\nq1\td1\t0\n',
     'corpus.jsonl lacks every relevant document'),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\nq77\td1\t1\n',
     "names 1 queries that queries.jsonl lacks, such as 'q77'"),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\nq1\td1\t0\n',
     "the query 'q1' has no relevant document"),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\n', 'test.tsv holds no judgment'),
    ('qrels/test.tsv', 'q1\td1\t1\nq2\td1\t1\n', "line 2: no column 'score'"),
    ('qrels/test.tsv', 'query-id\tcorpus-id\tscore\nq1\td1\t0.5\n', 'line 2: the score 0.5 is no'),
    ('corpus.jsonl', '{"_id": "d1", "text": "a"}\n' * 2, "the _id 'd1' occurs twice"),
    ('corpus.jsonl', '{"_id": "d 1", "text": "a"}\n', "'d 1' is empty or contains a space"),
    ('corpus.jsonl', '{"_id": 1, "text": "a"}\n', "line 1: needs a JSON object with the text"),
    ('corpus.jsonl', '', 'corpus.jsonl lacks')])
def test_mistakes(folder, tmp_path, file, content, message):
  for name in ('corpus.jsonl', 'queries.jsonl', 'qrels/test.tsv'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    text = (folder / name).read_text() if name != file else content
    if text is not None:
      (tmp_path / name).write_text(text)
  with pytest.raises(UserError, match=message):
    beir.load(epath.Path(tmp_path), 'test')


def test_wrong_arguments(folder, models, tmp_path):
  for options, message in (({'pooling': 'none'}, 'pooling=none gives no vector'),
                           ({'pooling': 'sum'}, "pooling='sum' is unknown"),
                           ({'max_len': 65}, 'max_len=65 is above the 64 positions'),
                           ({'rerank': models[0]}, 'this model scores no pairs'),
                           ({'seeds': 3}, '--seeds has no effect here'),
                           ({'split': 'dev'}, 'qrels/dev.tsv cannot be read')):
    with pytest.raises(UserError, match=message):
      suites.run(models[0], 'retrieval', str(folder), str(tmp_path / 'out.json'), options)
  assert not list(tmp_path.glob('out.*'))
