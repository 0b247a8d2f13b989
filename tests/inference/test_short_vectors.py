"""int8 and binary vectors equal sentence-transformers', in files and in a search."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from sentence_transformers import util as library

from bert_jax.errors import UserError
from bert_jax.evaluation import suites
from bert_jax.inference import predictions, search, short_vectors
from tests import made_tasks

VECTORS = np.random.default_rng(0).normal(0, 0.3, (200, 32)).astype(np.float32)


@pytest.mark.parametrize('precision', ['int8', 'binary'])
def test_arrays_equal_sentence_transformers(precision):
  quantize = library.quantize_embeddings
  ranges = short_vectors.ranges_of(VECTORS)
  theirs = quantize(VECTORS, precision, **({'ranges': ranges} if precision == 'int8' else {}))
  ours = short_vectors.quantize(VECTORS, precision, ranges)
  np.testing.assert_array_equal(ours, theirs)
  assert ours.dtype == np.int8 and ours.shape == (200, 32 if precision == 'int8' else 4)


def test_restored_vectors():
  ranges = short_vectors.ranges_of(VECTORS)
  short = short_vectors.quantize(VECTORS, 'int8', ranges)
  restored = short_vectors.restorer('int8', ranges)(short)
  step = (ranges[1] - ranges[0]) / 255
  assert (np.abs(restored - VECTORS) <= 1.001 * step).all()
  signs = short_vectors.restorer('binary')(short_vectors.quantize(VECTORS, 'binary'))
  np.testing.assert_array_equal(signs, np.where(VECTORS > 0, 1, -1))
  # A query beyond the ranges, and an entry that never varies.
  far = short_vectors.quantize(VECTORS[:2] * 100, 'int8', ranges)
  assert set(np.unique(far)) <= {*range(-128, 128)} and {-128, 127} <= set(np.unique(far))
  still = short_vectors.quantize(np.ones((3, 8), np.float32), 'int8', np.ones((2, 8), np.float32))
  assert (still == -128).all()


@pytest.mark.parametrize('precision, least', [('int8', 0.98), ('binary', 0.5)])
def test_a_search_reads_short_vectors(precision, least, tmp_path):
  ranges = short_vectors.ranges_of(VECTORS)
  np.save(tmp_path / 'short.npy', short_vectors.quantize(VECTORS, precision, ranges))
  np.save(tmp_path / 'whole.npy', VECTORS)
  restore = short_vectors.restorer(precision, ranges)
  queries = VECTORS[:20] + 0.1
  hits = search.search(queries, tmp_path / 'short.npy', 10, restore)
  scores = queries @ restore(np.load(tmp_path / 'short.npy')).T
  np.testing.assert_allclose(hits.scores, -np.sort(-scores, axis=1)[:, :10], atol=1e-5)
  np.testing.assert_allclose(hits.scores, np.take_along_axis(scores, hits.numbers, 1), atol=1e-5)
  whole = search.search(queries, tmp_path / 'whole.npy', 10)
  kept = np.mean([len({*a} & {*b}) / 10 for a, b in zip(hits.numbers, whole.numbers)])
  assert least <= kept <= 1
  with pytest.raises(UserError, match='short.npy holds int8.*: vectors .* of float32 or float16'):
    search.search(queries, tmp_path / 'short.npy', 10)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return made_tasks.model(tmp_path_factory.mktemp('model'))


def test_files_of_predict(model, tmp_path):
  (tmp_path / 'in.jsonl').write_text(''.join(
      json.dumps({'text': f'w{i} good w{i % 7}'}) + '\n' for i in range(20)))
  arrays = {}
  for name, precision in (('a.npy', 'float32'), ('b.npy', 'int8'), ('c.safetensors', 'int8'),
                          ('d.npy', 'binary')):
    predictions.run('embed', model, str(tmp_path / 'in.jsonl'), str(tmp_path / name),
                    precision=precision)
    arrays[name] = (load_file(tmp_path / name) if name.endswith('safetensors')
                    else np.load(tmp_path / name))
  ranges = short_vectors.ranges_of(arrays['a.npy'])
  expected = short_vectors.quantize(arrays['a.npy'], 'int8', ranges)
  np.testing.assert_array_equal(arrays['b.npy'], expected)
  np.testing.assert_array_equal(arrays['c.safetensors']['embeddings'], expected)
  np.testing.assert_array_equal(arrays['c.safetensors']['ranges'], ranges)
  assert arrays['d.npy'].shape == (20, 4)


def test_the_retrieval_table_has_float_and_int8_rows(model, tmp_path, monkeypatch):
  (tmp_path / 'qrels').mkdir()
  lines = [{'_id': f'd{i}', 'text': f'w{i % 20} n{i % 5} w{i % 3}'} for i in range(60)]
  (tmp_path / 'corpus.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  (tmp_path / 'queries.jsonl').write_text('\n'.join(
      json.dumps(x | {'_id': f'q{i}'}) for i, x in enumerate(lines[:9])))
  (tmp_path / 'qrels/test.tsv').write_text('query-id\tcorpus-id\tscore\n' + ''.join(
      f'q{i}\td{i}\t1\n' for i in range(9)))
  out = tmp_path / 'out.json'
  searched, find = [], search.search
  monkeypatch.setattr(search, 'search', lambda queries, file, *more: (
      searched.append(file.name) or find(queries, file, *more)))
  suites.run(model, 'retrieval', str(tmp_path), str(out), {'precision': 'int8'})
  assert searched == ['out.corpus.npy', 'out.corpus.int8.npy']
  rows = {row['hits of']: row for row in json.loads(out.read_text())['rows']}
  assert set(rows) == {'search', 'search in int8'}
  assert rows['search in int8']['NDCG@10'] > 0.9 * rows['search']['NDCG@10'] > 0
  short = np.load(tmp_path / 'out.corpus.int8.npy')
  assert short.dtype == np.int8 and short.shape == (60, 32)


def test_mistakes(model, tmp_path):
  (tmp_path / 'in.jsonl').write_text('{"text": "w1"}\n')
  source = str(tmp_path / 'in.jsonl')
  for output, precision, message in (
      ('x.npy', 'int4', "--precision='int4' is unknown"),
      ('x.jsonl', 'int8', '--precision=int8 has no effect here: it is for --output=FILE.npy')):
    with pytest.raises(UserError, match=message):
      predictions.run('embed', model, source, str(tmp_path / output), precision=precision)
  with pytest.raises(UserError, match='packs eight entries into a byte: vectors of 12 do not fit'):
    predictions.run('embed', model, source, str(tmp_path / 'x.npy'), predictions.Options(dim=12),
                    precision='binary')
