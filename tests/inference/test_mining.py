"""Mined negatives equal a whole sort, by rank and margin; both tasks read them."""

import json
import types

import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.inference import mining
from bert_jax.tasks import reranking
from bert_jax.tasks.late_interaction import LateFiles
from bert_jax.tasks.reranking import RerankingFiles
from bert_jax.tasks.sentence_embedding import EmbeddingFiles
from tests import made_tasks


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """A model, a corpus of 60 texts, 12 pairs of 10 queries, of which two have two positives."""
  path, rng = tmp_path_factory.mktemp('mine'), np.random.default_rng(0)
  texts = [' '.join(f'w{n}' for n in rng.integers(0, 20, 5)) for _ in range(60)]
  pairs = [(f'w{i} w{i + 3}', texts[i]) for i in range(10)]
  pairs += [(pairs[0][0], texts[20]), (pairs[1][0], 'w1 is not in the corpus')]
  (path / 'corpus.jsonl').write_text(''.join(
      json.dumps({'_id': f'd{i}', 'title': text[:2], 'text': text[2:].strip()}) + '\n'
      if text[2] == ' ' else json.dumps({'_id': f'd{i}', 'text': text}) + '\n'
      for i, text in enumerate(texts)))
  (path / 'pairs.tsv').write_text('q\tp\n' + ''.join(f'{q}\t{p}\n' for q, p in pairs))
  return made_tasks.model(path / 'model'), path, texts, pairs


def mine(files, output, **options):
  model, path, _, _ = files
  mining.mine(model, str(path / 'pairs.tsv'), str(path / 'corpus.jsonl'), str(output),
              **{'columns': ('q', 'p'), **options})
  return [json.loads(line) for line in output.read_text().splitlines()]


def test_negatives_equal_a_whole_sort(files, tmp_path):
  model, _, texts, pairs = files
  lines = mine(files, tmp_path / 'out.jsonl', ranks=(3, 12), count=2, margin=0.02)
  bert = bert_jax.from_pretrained(model)
  expected, cut = [], 0
  for query, positive in pairs:
    others = [t for t in texts if (query, t) not in pairs]
    cosines = bert.similarity([query], others)[0]
    order = np.argsort(-cosines, kind='stable')[2:12]
    limit = bert.similarity([query], [positive])[0, 0] - 0.02
    right = [others[i] for i in order if cosines[i] <= limit][:2]
    cut += cosines[order[0]] > limit
    if len(right) == 2:
      expected.append({'query': query, 'positive': positive, 'negatives': right,
                       **{f'negative_{n + 1}': text for n, text in enumerate(right)}})
  assert lines == expected
  assert cut > 2 and 0 < len(lines) < len(pairs)  # the margin changes some pairs and drops some


def test_a_teacher_adds_scores_that_a_task_reads(files, tmp_path):
  teacher = made_tasks.with_head(tmp_path / 'teacher', 'sequence_classification', ('score',))
  lines = mine(files, tmp_path / 'out.jsonl', count=2, margin=0.0, teacher=teacher)
  bert = bert_jax.from_pretrained(teacher)
  for line in lines:
    documents = [line['positive'], *line['negatives']]
    logits = reranking.pair_logits(bert, [(line['query'], text) for text in documents])
    np.testing.assert_allclose(line['scores'], logits, atol=1e-6)
  c = config_lib.finetuning('late_interaction')
  c.data.update({'text_column': 'query', 'text_pair_column': 'positive',
                 'negative_column': 'negative_1,negative_2', 'scores_column': 'scores'})
  examples = [*LateFiles.read(str(tmp_path / 'out.jsonl'), c.data, 'train', [])]
  assert [list(e.score) for e in examples] == [line['scores'] for line in lines]
  with pytest.raises(UserError, match='this model scores no pairs'):
    mine(files, tmp_path / 'other.jsonl', teacher=files[0])


def test_a_line_has_a_repeated_text_once(files, tmp_path):
  model, path, *_ = files
  one, two = path / 'corpus.jsonl', tmp_path / 'corpus.jsonl'
  lines = one.read_text().splitlines()
  two.write_text('\n'.join(x for line in lines for x in (line, line.replace('"d', '"e'))) + '\n')
  written = [tmp_path / 'once.jsonl', tmp_path / 'twice.jsonl']
  for corpus, last, output in zip((one, two), (10, 20), written):
    mining.mine(model, str(path / 'pairs.tsv'), str(corpus), str(output), columns=('q', 'p'),
                ranks=(1, last), count=3, margin=0.0)
  assert written[0].read_text() == written[1].read_text()
  assert len({*json.loads(written[1].read_text().splitlines()[0])['negatives']}) == 3


def test_a_positive_without_its_title_is_not_mined_as_a_negative(files, tmp_path):
  model, path, *_ = files
  lines = [{'_id': 'a', 'title': 'w1', 'text': 'w2 w3 w4'}, {'_id': 'b', 'text': 'w2 w3 w5'}]
  (tmp_path / 'corpus.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
  (tmp_path / 'pairs.tsv').write_text('query\tpositive\nw2\tw2 w3 w4\nw3\tw9 w9\n')
  mining.mine(model, str(tmp_path / 'pairs.tsv'), str(tmp_path / 'corpus.jsonl'),
              str(tmp_path / 'out.jsonl'), margin=-2.0, count=1)
  first, second = map(json.loads, (tmp_path / 'out.jsonl').read_text().splitlines())
  assert first['negatives'] == ['w2 w3 w5'] and len(second['negatives']) == 1


def test_each_pair_with_an_absent_positive_is_counted(capsys):
  pairs = [('q', 'w1'), ('q', 'absent'), ('r', 'absent')]
  texts = types.SimpleNamespace(read=lambda: [('a', 'w1', 'w1')])
  assert mining._positives(pairs, texts) == {'q': {0}, 'r': set()}
  assert '2 of 3 pairs have a positive that is not in the corpus' in capsys.readouterr().out


def test_both_tasks_read_mined_negatives(files, tmp_path):
  lines = mine(files, tmp_path / 'out.jsonl', margin=-2.0, count=3)
  assert len(lines) == 12 and {len(line['negatives']) for line in lines} == {3}
  data = config_lib.finetuning('sentence_embedding').data
  data.text_column, data.text_pair_column, data.negative_column = 'query', 'positive', 'negative_1'
  examples = list(EmbeddingFiles.read(str(tmp_path / 'out.jsonl'), data, 'train', []))
  assert [e.texts for e in examples] == [
      (line['query'], line['positive'], line['negative_1']) for line in lines]
  groups = RerankingFiles.read(str(tmp_path / 'out.jsonl'),
                          config_lib.finetuning('reranking').data, 'train', [])
  assert len(groups) == 10
  assert groups[2].documents == [lines[2]['positive'], *lines[2]['negatives']]
  assert groups[2].grades == [1, 0, 0, 0]


def test_mistakes(files, tmp_path):
  for options, message in (
      ({'ranks': (0, 5)}, '--ranks=0,5 must be a first rank from 1 on'),
      ({'ranks': (5,)}, '--ranks=5 must be'), ({'columns': ('q',)}, '--columns=q must name'),
      ({'columns': ('q', 'r')}, "line 2: no column 'r'"),
      ({'ranks': (3, 5), 'count': 4}, '--count=4 negatives do not fit into --ranks=3,5'),
      ({'margin': 3.0}, 'no pair has 1 negatives: widen --ranks'),
      ({'pooling': 'none'}, 'pooling=none gives no vector of a text')):
    with pytest.raises(UserError, match=message):
      mine(files, tmp_path / 'out.jsonl', **options)
  with pytest.raises(UserError, match='give --corpus'):
    mining.mine(files[0], 'x', '', 'y')
