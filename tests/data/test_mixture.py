"""Mixtures of corpora: shares, order and rows, by counting."""

import numpy as np
import pytest

from bert_jax.data import mixture
from bert_jax.data import rows as rows_lib
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.errors import UserError
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.parallel.mesh import Feed
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from tests.data.made import TOKENIZER, arrays, varied

SHARES = ((0.7, 0.7), (0.3, 0.3))
CHANGING = ((0.7, 0.3), (0.2, 0.2), (0.1, 0.5))


@pytest.mark.parametrize('source, expected', [
    ('wiki/*.gz=0.7,books/*.gz=0.3', [('wiki/*.gz', 0.7, 0.7), ('books/*.gz', 0.3, 0.3)]),
    ('a=3,b=1', [('a', 0.75, 0.75), ('b', 0.25, 0.25)]),
    ('a=1:0,b=1:4', [('a', 0.5, 0.0), ('b', 0.5, 1.0)]),
    ('tfds:wikipedia/20230601.en=2,builtin=2',
     [('tfds:wikipedia/20230601.en', 0.5, 0.5), ('builtin', 0.5, 0.5)]),
    ('corpus/*.txt.gz', []), ('dumps/date=today/*.txt', []), ('builtin', [])])
def test_sources_and_weights(source, expected):
  assert [tuple(part) for part in mixture.parse(source)] == expected


def test_a_folder_with_a_date_in_its_name_is_one_corpus(tmp_path):
  (tmp_path / 'date=20240101').mkdir()
  assert mixture.parse(f'{tmp_path}/date=20240101') == ()


@pytest.mark.parametrize('source, message', [
    ('a=0.7,b', "'b' has no weight"), ('a=0,b=0', 'the weights sum to 0'),
    ('a=1:0,b=1:0', 'the weights sum to 0'), ('a=1.2.3,b=1', 'a weight that is not a number')])
def test_wrong_weights_are_refused(source, message):
  with pytest.raises(UserError, match=message):
    mixture.parse(source)


@pytest.mark.parametrize('weights', [SHARES, ((1 / 3, 1 / 3),) * 3,
                                     ((0.999, 0.999), (0.001, 0.001)), CHANGING])
def test_shares_hold_over_any_thousand_rows(weights):
  plan = mixture.Plan(weights, 50_000)
  corpus, rank = plan.locate(np.arange(50_000))
  for i, (start, end) in enumerate(weights):
    of_corpus = np.concatenate([[0], np.cumsum(corpus == i)])
    np.testing.assert_array_equal(rank[corpus == i], np.arange(of_corpus[-1]))  # none is left out
    share = (of_corpus[1000:] - of_corpus[:-1000]) / 1000
    middle = (np.arange(len(share)) + 500) / 50_000
    assert np.abs(share - start - (end - start) * middle).max() <= 0.005
    assert [plan.before(n)[i] for n in (0, 1, 999, 1000, 31_234, 50_000)] == [
        of_corpus[n] for n in (0, 1, 999, 1000, 31_234, 50_000)]


@pytest.mark.parametrize('weights', [
    ((1 / 3, 1 / 3),) * 3, ((0.9999, 0.9999), (0.0001, 0.0001)), ((0.99951, 0.99951),
    (0.00049, 0.00049)), ((1 / 7, 1 / 7), (2 / 7, 2 / 7), (4 / 7, 4 / 7)),
    ((0.9992, 0.9992),) + ((0.0001, 0.0001),) * 8, SHARES])
def test_no_stretch_drifts_from_the_exact_shares(weights):
  rows = 300_000
  corpus, _ = mixture.Plan(weights, rows).locate(np.arange(rows))
  for i, (share, _) in enumerate(weights):
    surplus = np.concatenate([[0], np.cumsum((corpus == i) - share)])
    assert np.ptp(surplus) < len(weights)  # of any stretch of any length
    assert abs(surplus[-1]) < 1


def test_changing_shares_are_exact_at_every_row():
  rows = 40_000
  plan = mixture.Plan(((0.6, 0.0), (0.4, 0.9998), (0.0, 0.0002)), rows)
  corpus, rank = plan.locate(np.arange(rows))
  done = np.arange(1, rows + 1)
  for i, (start, end) in enumerate(plan.weights):
    exact = start * done + (end - start) * done**2 / 2 / rows
    assert abs(np.cumsum(corpus == i) - exact).max() < 1.5
    np.testing.assert_array_equal(rank[corpus == i], np.arange((corpus == i).sum()))
  assert np.bincount(corpus).tolist() == [12_000, 27_996, 4]


def test_a_row_is_located_without_the_rows_before_it():
  plan = mixture.Plan(CHANGING, 256_000_000)
  number = 200_000_000 + np.arange(4000)
  corpus, rank = plan.locate(number)
  for share in (slice(0, 1), slice(1000, 1256), slice(3000, None)):
    np.testing.assert_array_equal(plan.locate(number[share]), (corpus[share], rank[share]))
  np.testing.assert_array_equal(
      plan.before(int(number[-1]) + 1) - plan.before(int(number[0])), np.bincount(corpus))


def test_whole_shares_keep_the_row_order_of_earlier_versions():
  corpus, _ = mixture.Plan(((0.5, 0.5), (0.3, 0.3), (0.2, 0.2)), 2000).locate(np.arange(2000))
  block = np.concatenate([(np.arange(n) + 0.5) / n for n in (500, 300, 200)])
  order = np.repeat([0, 1, 2], (500, 300, 200))[np.argsort(block, kind='stable')]
  np.testing.assert_array_equal(corpus, np.tile(order, 2))


def test_a_corpus_without_a_row_gives_a_warning_unless_its_weight_is_zero():
  for source in ('a=1,b=0.0001', 'a=1,b=1e-4', 'a=1,b=1e-4:0', 'b=3E-5,a=0.5'):
    weights = [part[1:] for part in mixture.parse(source)]
    warning, = mixture.unread(source, mixture.Plan(weights, 4000))
    assert 'b has ' in warning and 'of the 4,000 rows' in warning and 'train longer' in warning
    assert not list(mixture.unread(source, mixture.Plan(weights, 40_000)))
  assert not list(mixture.unread('a=1,b=0', mixture.Plan(((1, 1), (0, 0)), 4000)))


def mixed(phases, weights=SHARES, seed=3):
  parts = varied(120, seed=0), varied(80, seed=1)
  layouts = [RowLayout(phase.max_len, 4) for phase in phases]
  records = mixture.MixedRecords(parts, weights)
  return parts, mixture.mixed_rows(records, layouts, phases, seed, TOKENIZER, words=True)


def test_a_mixture_takes_the_rows_of_each_corpus_in_order():
  phases = Phases.create(((40, 32, 12),), 40, 0, 0)
  parts, (rows,) = mixed(phases)
  sources = [RowSource(part, RowLayout(32, 4), 3, TOKENIZER, words=True) for part in parts]
  corpus, _ = rows.plan.locate(np.arange(480))
  assert np.bincount(corpus).tolist() == [336, 144]
  taken = [0, 0]
  for step in range(40):
    batch = rows.batch(step, 12)
    np.testing.assert_array_equal(batch.row, np.arange(12))
    for i in range(12):
      source = corpus[step * 12 + i]
      expected = sources[source].take(np.array([taken[source]]), np.array([i]))
      taken[source] += 1
      for name, alone in arrays(expected).items():
        np.testing.assert_array_equal(arrays(batch)[name][i], alone[0], name)
  parts_of_batch = [rows.batch(7, 12, share) for share in (slice(0, 5), slice(5, 12))]
  for name, whole in arrays(rows.batch(7, 12)).items():
    shares = [arrays(share)[name] for share in parts_of_batch]
    np.testing.assert_array_equal(whole, np.concatenate(shares))


@pytest.mark.parametrize('weight, share', [(0.5, 0.5), (0.75, 0.5), (0.7, 0.3), (0.8, 0.25)])
def test_each_corpus_has_its_share_of_causal_rows(weight, share):
  """Both are even: counted by row, all causal rows could be of one corpus."""
  phases = Phases.create(((100, 32, 16),), 100, 0, 0)
  _, sources = mixed(phases, ((weight, weight), (1 - weight, 1 - weight)))
  task = Pretraining(None, MaskingConfig(causal_rows=share), None)
  data = PretrainingData(task, None, phases, 0, sources, (), Feed((0, 1), 2))
  causal = np.concatenate([data.rows(step).tokens.causal for step in range(100)])
  corpus, _ = sources[0].plan.locate(np.arange(1600))
  for i in range(2):
    assert abs(causal[corpus == i].sum() - share * (corpus == i).sum()) < 1
  half = PretrainingData(task, None, phases, 0, sources, (), Feed((1,), 2)).rows(3)
  np.testing.assert_array_equal(half.tokens.causal, causal[3 * 16:][half.row])


def test_each_corpus_continues_where_the_previous_phase_ended(monkeypatch):
  monkeypatch.setattr(rows_lib, '_WINDOW', 50)  # many windows in a small corpus
  phases = Phases.create(((30, 32, 10), (20, 64, 10)), 50, 0, 0)
  parts, (short, long) = mixed(phases)
  counts = short.plan.before(300)
  for source_of_short, source_of_long, count, first in zip(
      short.sources, long.sources, counts, long.first):
    assert first == source_of_long.row_after(source_of_short, count) > 0
  corpus, rank = long.plan.locate(np.arange(300, 310))
  expected = long.sources[corpus[0]].take(
      np.array([long.first[corpus[0]] + rank[0] - counts[corpus[0]]]), np.array([0]))
  np.testing.assert_array_equal(long.batch(0, 10).tokens.ids[0], expected.tokens.ids[0])


def test_held_out_rows_come_from_all_corpora():
  phases = Phases.create(((4, 32, 8),), 4, 0, 0)
  parts, (rows,) = mixed(phases)
  batches = list(rows.epoch_batches(8))
  tokens = sum((batch.tokens.ids >= 5).sum() for batch in batches)
  assert tokens == sum(part.num_tokens for part in parts)
  # The first batches come from all corpora, in proportion to their numbers of batches.
  of_each = [[batch.tokens.ids for batch in source.epoch_batches(8)] for source in rows.sources]
  owners = [next(i for i, ids in enumerate(of_each) if any((batch.tokens.ids == x).all()
                                                             for x in ids))
            for batch in batches]
  share = len(of_each[0]) / len(batches)
  for count in range(1, len(batches)):
    assert abs(owners[:count].count(0) - share * count) <= 1
