"""Cross-encoders: losses by hand and by sentence-transformers, training, export, mistakes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
import torch

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.inference import predictions
from bert_jax.interop import conversion
from bert_jax.labelled.packed_examples import Batch
from bert_jax.runs import initial, run
from bert_jax.tasks import reranking
from bert_jax.tasks.reranking import Reranking, RerankingFiles
from tests import made_tasks


def make_config(tmp_path, **overrides):
  c = config_lib.finetuning('reranking')
  c.update_from_flattened_dict({
      'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 8, 'train_epochs': 4.0,
      'max_len': 32, 'optimizer.learning_rate': 3e-3, 'model.scan_unroll': 1, 'eval_every': 1000,
      **made_tasks.files('reranking', tmp_path, 80, 40), **overrides})
  return c


# Three queries, with three, two and no documents, in a batch of four slots each.
LOGITS = np.array([[1.5, -0.5, 0.25, 9], [-2.0, 3.0, 9, 9], [9, 9, 9, 9]], np.float32)
GRADES = np.array([[2, 0, 1, 0], [0, 3, 0, 0], [0, 0, 0, 0]], np.float32)
MEMBERS = np.array([[0, 1, 2, -1], [4, 5, -1, -1], [-1, -1, -1, -1]], np.int32)


def loss(kind: str) -> tuple[float, float]:
  task = Reranking(None, kind=kind, highest=3.0)
  batch = Batch(None, None, MEMBERS, None, GRADES, None)
  logits = task.logits(lambda *_: jnp.asarray(LOGITS)[..., None],
                       batch._replace(tokens=0, starts=0))
  total, count = task.metrics(logits, batch)['loss']
  return float(total), float(count)


def test_the_losses_by_hand():
  x = np.array([1.5, -0.5, 0.25, -2.0, 3.0])
  is_relevant = np.array([1, 0, 1, 0, 1])
  p = special.expit(x)
  expected = -np.sum(np.log(np.where(is_relevant, p, 1 - p)))
  np.testing.assert_allclose(loss('binary'), (expected, 5), rtol=1e-6)
  expected = np.sum((p - np.array([2, 0, 1, 0, 3]) / 3) ** 2)
  np.testing.assert_allclose(loss('graded'), (expected, 5), rtol=1e-6)
  e = np.exp
  first = -np.array([e(2), 1, e(1)]) / (e(2) + 1 + e(1)) @ special.log_softmax(x[:3])
  second = -np.array([1, e(3)]) / (1 + e(3)) @ special.log_softmax(x[3:])
  np.testing.assert_allclose(loss('listwise'), (first + second, 2), rtol=1e-6)


def test_the_listwise_loss_equals_sentence_transformers():
  from sentence_transformers.cross_encoder.losses import ListNetLoss

  class Fixed(torch.nn.Module):
    """Gives the logits as scores, whatever it reads."""

    device, num_labels = torch.device('cpu'), 1

    def preprocess(self, pairs, **_):
      return {}

    def forward(self, _):
      return {'scores': torch.tensor([1.5, -0.5, 0.25, -2.0, 3.0])}

  theirs = ListNetLoss(Fixed(), mini_batch_size=-1)([['a', 'b'], [['x', 'y', 'z'], ['x', 'y']]],
                                [torch.tensor([2., 0, 1]), torch.tensor([0., 3])])
  total, count = loss('listwise')
  assert abs(total / count - theirs.item()) < 1e-6


@pytest.mark.slow
def test_a_run_learns_predicts_and_exports_to_sentence_transformers(tmp_path):
  from sentence_transformers import CrossEncoder

  run.run(make_config(tmp_path), str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  scores = next(x for x in reversed(lines) if 'eval_map' in x)
  assert scores['eval_ndcg_10'] > 0.95 and scores['eval_map'] > 0.95

  groups = [json.loads(x) for x in (tmp_path / 'eval.jsonl').read_text().splitlines()]
  examples = [{'query': g['query'], 'documents': g['negatives'] + g['positives']} for g in groups]
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in examples))
  predictions.run('reranking', str(tmp_path / 'run'), str(tmp_path / 'in.jsonl'),
                  str(tmp_path / 'out.jsonl'))
  answers = [json.loads(x) for x in (tmp_path / 'out.jsonl').read_text().splitlines()]
  ranks = [[d['document'] for d in a['ranking']].index(len(e['documents']) - 1)
           for a, e in zip(answers, examples, strict=True)]
  assert np.mean(1 / (1 + np.array(ranks))) == pytest.approx(scores['eval_mrr_10'], abs=1e-6)

  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'out'), 'huggingface')
  theirs = CrossEncoder(str(tmp_path / 'out'))
  for a, e in zip(answers, examples):
    ranked = theirs.rank(e['query'], e['documents'])
    assert [d['corpus_id'] for d in ranked] == [d['document'] for d in a['ranking']]
    np.testing.assert_allclose([d['score'] for d in a['ranking']], [d['score'] for d in ranked],
                               atol=1e-5)
  again = bert_jax.from_pretrained(str(tmp_path / 'out'))
  assert reranking.rank(again, [(examples[0]['query'], examples[0]['documents'])]) == answers[:1]

  assert (again.model.task, again.model.problem) == ('sequence_classification', 'regression')

  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'st'), 'sentence_transformers')
  pair = examples[0]['query'], examples[0]['documents'][0] + ' and more' * 40
  score = CrossEncoder(str(tmp_path / 'st')).predict([pair])[0]
  trained = bert_jax.from_pretrained(str(tmp_path / 'run'))
  assert reranking.rank(trained, [(pair[0], pair[1:])])[0]['ranking'][0]['score'] == pytest.approx(
      score, abs=1e-5)

  # A folder of sentence-transformers states the length of its inputs.
  CrossEncoder(str(tmp_path / 'out'), max_length=9).save_pretrained(str(tmp_path / 'short'))
  short = bert_jax.from_pretrained(str(tmp_path / 'short'))
  pairs = [(examples[0]['query'], document + ' and more' * 4) for document in 'abc']
  theirs = CrossEncoder(str(tmp_path / 'short')).predict(pairs, activation_fn=torch.nn.Identity())
  np.testing.assert_allclose(reranking.pair_logits(short, pairs), theirs, atol=1e-5)
  assert np.abs(reranking.pair_logits(again, pairs) - theirs).max() > 1e-3


def test_a_reranker_that_is_trained_further_keeps_its_head(tmp_path, monkeypatch):
  source = made_tasks.with_head(tmp_path / 'old', 'sequence_classification', ('LABEL_0',))

  def start(fresh, model, *_):
    assert model.groups == ('pooler', 'classifier')
    raise KeyboardInterrupt  # the parameters are known, and nothing is trained

  monkeypatch.setattr(initial, 'from_model', start)
  with pytest.raises(KeyboardInterrupt):
    run.run(make_config(tmp_path, init_from=source), str(tmp_path / 'run'))


def test_pairs_of_a_query_are_one_group(tmp_path):
  (tmp_path / 'x.tsv').write_text('query\tdocument\tlabel\na\tx\t0\nb\ty\t2\na\tz\t1\n')
  data = config_lib.finetuning('reranking').data
  groups = RerankingFiles.read(str(tmp_path / 'x.tsv'), data, 'validation', [])
  assert [(g.query, g.documents, g.grades) for g in groups] == [
      ('a', ['x', 'z'], [0, 1]), ('b', ['y'], [2])]


def test_a_repeated_document_of_a_query_counts_once(tmp_path):
  """`mine` writes the same hard negatives for each positive of a query."""
  (tmp_path / 'x.jsonl').write_text(
      '{"query": "a", "positive": "p", "negatives": ["n", "q"]}\n'
      '{"query": "a", "positive": "q", "negatives": ["n", "m"]}\n')
  data = config_lib.finetuning('reranking').data
  (group,) = RerankingFiles.read(str(tmp_path / 'x.jsonl'), data, 'validation', [])
  assert (group.documents, group.grades) == (['p', 'n', 'q', 'm'], [1, 0, 1, 0])
  (group,) = RerankingFiles.read(str(tmp_path / 'x.jsonl'), data, 'test', [])
  assert group.documents == ['p', 'n', 'q', 'q', 'n', 'm']  # predictions answer every line


def test_predictions_repeat_query_and_documents(monkeypatch):
  monkeypatch.setattr(reranking, 'rank', lambda bert, pairs: [{'ranking': [1]} for _ in pairs])
  groups = [reranking.Group('', 'q', ['a', 'b'], [])]
  (_, content), = reranking.RerankingKind.write_test(None, None, groups)
  assert json.loads(content) == {'query': 'q', 'documents': ['a', 'b'], 'ranking': [1]}


def test_equal_scores_count_against_the_model():
  groups = [reranking.Group('', 'q', ['a', 'b', 'c', 'd'], [1.0, 0.0, 0.0, 0.0])]

  class Located:
    examples = [0]

  outputs = [reranking.finetuning_data.Output(Located, np.array([[2., 2., 2., 1., -1e9]]))]
  split = reranking.finetuning_data.Split('', groups, None)
  assert RerankingFiles(None).scores(split, outputs) == pytest.approx(
      {'mrr_10': 1 / 3, 'map': 1 / 3, 'ndcg_10': 0.5})


@pytest.mark.parametrize('lines, overrides, message', [
    ('', {'data.loss': 'pairwise'}, 'data.loss=.pairwise. is unknown: use binary'),
    ('{"query": "a", "positives": ["b"], "negatives": "c"}', {}, 'must be lists of texts'),
    ('{"query": "a", "positives": [], "negatives": []}', {}, 'line 1: the query has no document'),
    ('{"query": "a", "negatives": ["b"]}', {}, "line 1: no column 'positive'"),
    ('{"query": "a", "document": "b"}', {}, "no column 'label'"),
    ('{"query": "a", "positives": ["b"]}', {}, 'all documents have the grade 1'),
    ('{"query": "a", "document": "b", "label": 0}', {'data.eval': ''},
     'all documents have the grade 0'),
    ('{"query": "a", "document": "b", "label": 0}\n{"query": "c", "document": "b", "label": 1}',
     {'data.loss': 'listwise', 'data.eval': ''},
     'each query have the same grade, and data.loss=listwise compares'),
    ('{"query": "a", "positives": ["b"]}', {'data.eval': 'BAD'}, 'so every ranking is perfect')])
def test_mistakes(tmp_path, lines, overrides, message):
  (tmp_path / 'bad.jsonl').write_text(lines + '\n')
  bad = str(tmp_path / 'bad.jsonl')
  overrides = ({'data.eval': bad} if overrides.get('data.eval') == 'BAD'
               else {'data.train': bad, **overrides})
  c = make_config(tmp_path, **overrides)
  with pytest.raises(UserError, match=message):
    run.run(c, str(tmp_path / 'run'))


def test_other_models_and_files_without_a_positive_are_refused(tmp_path):
  (tmp_path / 'bad.jsonl').write_text('{"query": "a", "document": "b", "label": 0}\n')
  with pytest.raises(UserError, match="line 1: no document of the query 'a' is relevant"):
    run.run(make_config(tmp_path, **{'data.eval': str(tmp_path / 'bad.jsonl')}),
            str(tmp_path / 'run'))
  bert = bert_jax.from_pretrained(made_tasks.with_head(
      tmp_path / 'sst2', 'sequence_classification', ('no', 'yes')))
  with pytest.raises(UserError, match='scores no pairs: it is for sequence_classification with 2'):
    reranking.rank(bert, [('a', ['b'])])
