"""Whole words, spans and n-grams: exact counts, and the published distributions."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bert_jax.objectives import masking, masking_units

V, SPECIAL, MASK = 1000, (0, 100, 101, 102, 103), 103
ORDINARY = np.setdiff1d(np.arange(V), SPECIAL)


def make_rows(count=64, length=128, pairs=1, seed=0, longest=4):
  """Rows of packed pairs [CLS] A [SEP] B [SEP] of words with 1 to `longest` tokens."""
  rng = np.random.default_rng(seed)
  ids, text_ids, word_start = np.zeros((3, count, length), np.int32)
  for row in range(count):
    ends = np.sort(rng.choice(np.arange(10, length), pairs, replace=False))
    begin = 0
    for pair, end in enumerate(ends, 1):
      if end - begin < 8:
        continue
      ids[row, begin:end] = rng.choice(ORDINARY, end - begin)
      middle = rng.integers(begin + 2, end - 2)
      ids[row, [begin, middle, end - 1]] = [101, 102, 102]
      text_ids[row, begin:end] = pair
      at = begin
      while at < end:
        word_start[row, at] = 1
        at += rng.integers(1, longest + 1)
      word_start[row, [begin, begin + 1, middle, middle + 1, end - 1]] = 1
      begin = end
  return ids, text_ids, word_start


def masked_by(config, rows, pairs=1, seed=0, frequencies=None, **kwargs):
  ids, text_ids, word_start = rows
  run = jax.jit(lambda *a: masking.mask(
      jax.random.key(seed), *a[:3], config, masking.Vocabulary(V, SPECIAL, MASK, frequencies),
      pairs=pairs, word_start=a[3], **kwargs))
  return jax.tree.map(np.asarray, run(ids, text_ids, np.arange(len(ids)), word_start))


def drawn(masked, shape):
  """[B, L] bool: the predicted positions."""
  predicted = np.zeros(shape, bool)
  for row, (positions, weights) in enumerate(zip(masked.positions, masked.weights)):
    predicted[row, positions[weights > 0]] = True
  return predicted


def words_of(rows):
  """By row: the words of ordinary tokens, as the positions of each."""
  ids, _, word_start = rows
  word, ordinary = np.cumsum(word_start, axis=1), ~np.isin(ids, SPECIAL)
  return [[np.flatnonzero(of_row & (word[row] == w)) for w in np.unique(word[row, of_row])]
          for row, of_row in enumerate(ordinary)]


def budget_of(rate, ordinary):
  return max(1, round(np.float32(rate) * np.float32(ordinary)))


@pytest.mark.parametrize('pairs', [1, 4])
def test_spans_fill_the_budget_of_each_pair_and_cut_at_most_one_word(pairs):
  rows = ids, text_ids, _ = make_rows(300, pairs=pairs, seed=1)
  taken = drawn(masked_by(masking.MaskingConfig(unit='span'), rows, pairs), ids.shape)
  assert not (taken & np.isin(ids, SPECIAL)).any() and not (taken & (text_ids == 0)).any()
  for row, words in enumerate(words_of(rows)):
    for pair in range(1, pairs + 1):
      of_pair = [word for word in words if text_ids[row, word[0]] == pair]
      if of_pair:
        assert taken[row, np.concatenate(of_pair)].sum() == budget_of(0.15, sum(map(len, of_pair)))
        assert sum(0 < taken[row, word].sum() < len(word) for word in of_pair) <= 1


@pytest.mark.medium
@pytest.mark.parametrize('unit', ['whole_word', 'ngram'])
@pytest.mark.parametrize('pairs', [1, 8])
def test_words_are_masked_whole_and_at_the_rate_on_average(unit, pairs):
  rows = ids, text_ids, _ = make_rows(800, pairs=pairs, seed=1)
  taken = drawn(masked_by(masking.MaskingConfig(unit=unit), rows, pairs), ids.shape)
  assert not (taken & np.isin(ids, SPECIAL)).any() and not (taken & (text_ids == 0)).any()
  more = []
  for row, words in enumerate(words_of(rows)):
    if words:
      budget = budget_of(0.15, sum(map(len, words)))
      assert taken[row].any()
      assert all(len(set(taken[row, word])) == 1 for word in words if len(word) <= budget)
      more.append(taken[row].sum() - budget)
  longest = 4 * {'whole_word': 1, 'ngram': 3}[unit]
  assert max(map(abs, more)) < longest and min(more) < 0 < max(more)
  assert abs(np.mean(more)) < 4 * np.std(more) / np.sqrt(len(more))


def test_long_words_are_drawn_as_often_as_short_ones():
  """Also in short packed pairs, whose own share of predictions is less than a word of six."""
  rows = ids, text_ids, _ = make_rows(1500, pairs=8, longest=6)
  masked = masked_by(masking.MaskingConfig(unit='whole_word'), rows, 8)
  taken = drawn(masked, ids.shape)
  # For each length of a word: the words, the drawn words, and their expected number.
  count, hits, expected, variance = np.zeros((4, 7))
  in_short = np.zeros(2)  # words of five and six in pairs of at most 16 tokens
  for row, words in enumerate(words_of(rows)):
    tokens = sum(map(len, words))
    rate = budget_of(0.15, tokens) / max(tokens, 1)
    for word in words:
      hit = taken[row, word[0]]
      count[len(word)] += 1
      hits[len(word)] += hit
      expected[len(word)] += rate
      variance[len(word)] += rate * (1 - rate)
      if len(word) > 4 and (text_ids[row] == text_ids[row, word[0]]).sum() <= 16:
        in_short += hit, rate
  assert (count[1:] > 1500).all()
  assert (abs(hits - expected)[1:] < 4 * np.sqrt(variance)[1:]).all(), hits / np.maximum(count, 1)
  assert in_short[1] > 100 and abs(in_short[0] - in_short[1]) < 4 * np.sqrt(in_short[1])


def test_every_word_of_a_row_is_drawn_equally_often():
  ids = np.full((1, 64), 500, np.int32)
  ids[0, [0, 63]] = 101, 102
  text_ids = np.ones_like(ids)
  word_start = np.zeros_like(ids)
  starts = np.concatenate([[0], np.cumsum(np.tile([1, 2, 3], 10)) + 1 - np.tile([1, 2, 3], 10)])
  word_start[0, starts] = 1
  word_start[0, [1, 61, 62, 63]] = 1
  rows = [np.repeat(x, 4000, 0) for x in (ids, text_ids, word_start)]
  masked = masked_by(masking.MaskingConfig(unit='whole_word', rate=0.3), rows)
  counts = drawn(masked, rows[0].shape)[:, starts[1:]].sum(0)
  n = 59 + 3  # ordinary tokens: the last word has one more, and 61 and 62 are words of their own
  ordinary = (~np.isin(ids, SPECIAL)).sum()
  assert ordinary == n
  p = budget_of(0.3, n) / n
  assert stats.chisquare([counts.sum(), counts.size * 4000 - counts.sum()],
                         [p * counts.size * 4000, (1 - p) * counts.size * 4000]).pvalue > 1e-4
  assert stats.chisquare(counts).pvalue > 1e-4


def _of_words(low, high, length, pairs=1, count=400):
  """Full rows of words with `low` to `high` tokens."""
  rng = np.random.default_rng(low)
  ids, text_ids, word_start = np.zeros((3, count, length), np.int32)
  ids[:] = rng.choice(ORDINARY, ids.shape)
  for row in range(count):
    begins = np.cumsum(np.concatenate([[1], rng.integers(low, high + 1, length)]))
    word_start[row, begins[begins < length]] = 1
    for pair, part in enumerate(np.array_split(np.arange(length), pairs), 1):
      text_ids[row, part] = pair
      ids[row, part[[0, -1]]] = 101, 102
      word_start[row, [part[0], part[0] + 1, part[-1]]] = 1
  return ids, text_ids, word_start


@pytest.mark.medium
@pytest.mark.parametrize('unit', ['whole_word', 'ngram'])
@pytest.mark.parametrize('length, pairs', [(128, 1), (32, 3)])
def test_long_words_keep_the_rate_and_every_row_has_predictions(length, pairs, unit):
  lengths = [(5, 30), (10, 60), (7, 7), (200, 200), (1, 90), (3, 12)]  # tokens in a word
  groups = [_of_words(low, high, length, pairs) for low, high in lengths]
  rows = ids, *_ = [np.concatenate(field) for field in zip(*groups)]
  config = masking.MaskingConfig(unit=unit)
  taken = drawn(masked_by(config, rows, pairs), ids.shape)
  budget = budget_of(0.15, length - 2 * pairs)
  ordinary = ~np.isin(ids[0], SPECIAL)
  for of_group in np.array_split(taken, len(groups)):
    count = of_group.sum(1)
    assert count.min() >= 1 and count.max() <= config.predictions(length, pairs)
    assert abs(count.mean() - budget) <= 4 * count.std() / np.sqrt(len(count))
    # Every token is equally likely.
    expected = len(count) * budget / ordinary.sum()
    assert abs(of_group[:, ordinary].sum(0) - expected).max() < 6 * np.sqrt(expected)


def test_cuts_of_long_units_by_hand():
  word_start = jnp.array([1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1], bool)
  unit_start = word_start.at[jnp.array([10])].set(False)  # a unit of the words at 8 and 10
  cut = lambda n: np.flatnonzero(masking_units.cut_long(unit_start, word_start, n)).tolist()
  assert cut(7) == cut(100) == [0, 1, 8, 13, 14]
  assert cut(5) == [0, 1, 5, 8, 13, 14]  # the word of seven in 4 and 3
  assert cut(4) == [0, 1, 5, 8, 10, 13, 14]  # the unit of five in its words
  assert cut(3) == [0, 1, 4, 7, 8, 10, 13, 14]
  assert cut(2) == [0, 1, 3, 5, 7, 8, 10, 12, 13, 14]
  assert cut(1) == list(range(15))


def test_words_of_few_pieces_are_masked_without_a_cut():
  # A word has 6 tokens at most, and the budget of each of these rows is larger.
  rows = make_rows(100, pairs=1, longest=6)
  long = [x[(rows[1] > 0).sum(1) > 80] for x in rows]
  config = masking.MaskingConfig(unit='whole_word')
  masked = masked_by(config, long)
  with mock.patch.object(masking_units, 'cut_long', lambda start, *_: start):
    for field, before in zip(masked, masked_by(config, long)):
      np.testing.assert_array_equal(field, before)


def test_a_row_without_room_leaves_the_last_word_out_and_cuts_none():
  rows = ids, *_ = make_rows(600, pairs=1, longest=6)
  config = masking.MaskingConfig(unit='whole_word', max_predictions=7)
  taken = drawn(masked_by(config, rows), ids.shape)
  assert taken.sum(1).max() == 7
  for row, words in enumerate(words_of(rows)):
    budget = budget_of(0.15, sum(map(len, words)))
    assert all(len(set(taken[row, word])) == 1 for word in words if len(word) <= budget)


def _unit_lengths(unit, seed=0):
  """The words in each unit of long rows, without the last unit, which the end of the row cuts."""
  length, rows = 512, 200
  word_start = np.ones((rows, length), bool)
  special = np.zeros((rows, length), bool)
  special[:, 0] = True
  probabilities = masking.MaskingConfig(unit=unit).unit_lengths()
  keys = jax.random.split(jax.random.key(seed), rows)
  starts = np.asarray(jax.jit(jax.vmap(
      lambda k, w, s: masking_units.join_words(k, w, s, probabilities)))(keys, word_start, special))
  assert starts[:, :2].all()
  return probabilities, np.concatenate([np.diff(np.flatnonzero(row[1:])) for row in starts])


@pytest.mark.parametrize('unit, expected', [
    ('span', [0.2 * 0.8**n / (1 - 0.8**10) for n in range(10)]),
    ('ngram', [6 / 11, 3 / 11, 2 / 11])])
def test_lengths_of_spans_and_ngrams_follow_their_distributions(unit, expected):
  probabilities, lengths = _unit_lengths(unit)
  np.testing.assert_allclose(probabilities, expected, rtol=1e-12)
  counts = np.bincount(lengths, minlength=len(expected) + 1)[1:]
  assert len(counts) == len(expected)
  assert stats.chisquare(counts, len(lengths) * np.array(expected)).pvalue > 1e-4
  # Lengths are independent: units after a long unit are as long as units after a short one.
  after = [lengths[1:][lengths[:-1] == n] for n in (1, len(expected))]
  assert abs(after[0].mean() - after[1].mean()) < 5 * lengths.std() / np.sqrt(len(after[1]))


def test_units_of_joined_words_by_hand():
  word_start = jnp.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1], bool)
  special = jnp.array([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1], bool)
  always = lambda n: np.eye(4)[n - 1]
  join = lambda n: np.flatnonzero(masking_units.join_words(jax.random.key(0), word_start, special,
                                                   always(n))).tolist()
  assert join(1) == [0, 1, 3, 4, 5, 6, 7, 9, 10]
  assert join(2) == [0, 1, 4, 5, 6, 9, 10]
  assert join(3) == [0, 1, 5, 6, 10]
  assert join(4) == [0, 1, 5, 6, 10]


def test_a_span_is_replaced_as_a_whole_and_words_token_by_token():
  rows = make_rows(1500, seed=2)
  ids, _, word_start = rows
  for unit, whole in (('span', True), ('whole_word', False)):
    masked = masked_by(masking.MaskingConfig(unit=unit, replace_random=0.0), rows)
    taken = drawn(masked, ids.shape)
    became_mask = (masked.ids == MASK) & taken
    n = taken.sum()
    if not whole:
      assert stats.binomtest(int(became_mask.sum()), int(n), 0.8).pvalue > 1e-4
    # A span replaces neighbors in a word alike. A whole word replaces them independently.
    same_word = taken[:, 1:] & taken[:, :-1] & (word_start[:, 1:] == 0)
    equal = (became_mask[:, 1:] == became_mask[:, :-1])[same_word]
    if whole:
      assert equal.all()
    else:
      assert stats.binomtest(int(equal.sum()), len(equal), 0.8**2 + 0.2**2).pvalue > 1e-4


def test_random_tokens_follow_the_frequencies():
  counts = np.zeros(V, np.int64)
  counts[[5, 6, 7]], counts[101] = [600, 300, 100], 10_000
  cumulative = jnp.asarray(masking.cumulative_frequencies(counts, SPECIAL))
  config = masking.MaskingConfig(replace_mask=0.0, replace_random=1.0, random_by_frequency=True)
  rows = make_rows(500, seed=3)
  masked = masked_by(config, rows, frequencies=cumulative)
  new = np.take_along_axis(masked.ids, masked.positions, 1)[masked.weights > 0]
  histogram = np.bincount(new, minlength=V)
  assert histogram.sum() == histogram[[5, 6, 7]].sum()
  assert stats.chisquare(histogram[[5, 6, 7]], len(new) * np.array([0.6, 0.3, 0.1])).pvalue > 1e-4


def test_each_row_is_masked_at_its_own_rate():
  config = masking.MaskingConfig(rate=0.3, final_rate=0.1)
  assert [config.rate_at(s, 101) for s in (0, 50, 100)] == pytest.approx([0.3, 0.2, 0.1])
  assert masking.MaskingConfig().rate_at(50, 101) == 0.15
  assert masking.MaskingConfig(rate=0.1, final_rate=0.4).predictions(100) == 40
  ids, text_ids, _ = rows = make_rows(40, seed=4)
  rate = np.where(np.arange(40) < 20, 0.3, 0.1).astype(np.float32)
  masked = masked_by(config, rows, rate=rate)
  for row in range(40):
    n = ((text_ids[row] > 0) & ~np.isin(ids[row], SPECIAL)).sum()
    assert masked.weights[row].sum() == max(1, round(rate[row] * np.float32(n)))


def test_predictions_bound_packed_rows_of_any_pairs():
  rng = np.random.default_rng(0)
  for rate in (0.05, 0.15, 0.4):
    config = masking.MaskingConfig(rate=rate)
    for length, pairs in ((128, 8), (64, 8), (512, 8), (32, 4)):
      bound = config.predictions(length, pairs)
      for _ in range(200):
        tokens = rng.multinomial(length, rng.dirichlet(np.full(pairs, rng.choice([0.2, 1, 50]))))
        ordinary = np.maximum(tokens - 3, 0)
        assert sum(max(1, round(rate * n)) for n in ordinary if n) <= bound
  assert masking.MaskingConfig().predictions(128, 8) == 24
  whole, ngram = (masking.MaskingConfig(unit=unit) for unit in ('whole_word', 'ngram'))
  assert [c.predictions(128, 8) for c in (whole, ngram)] == [25, 29]  # the last word stays whole
