import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from benchmarks import pairs as benchmark
from bert_jax.data import pairs as pairs_lib
from bert_jax.data import rows as rows_lib
from bert_jax.data.pairs import RowLayout
from tests.data.made import FIRST, TOKENIZER, arrays, make_records, varied

_DOCUMENTS = [[3, 2, 3, 2], [2, 3, 2]]  # abc de fgh ij   kl mno pq

CORPORA = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=2, max_size=25)


def source(records, max_len=32, seed=0, pairs=4, sequences='next_sentence', **kwargs):
  layout = RowLayout(max_len, pairs, sequences)
  return rows_lib.RowSource(records, layout, seed, TOKENIZER, **kwargs)


def pairs_of(batch, i):
  """Checks row i; returns (label, A, B) of each of its pairs."""
  ids, pair, types = batch.tokens.ids[i], batch.tokens.text_ids[i], batch.tokens.type_ids[i]
  triples = []
  end = 0
  for p in range(1, batch.starts.shape[1] + 1):
    here = np.flatnonzero(pair == p)
    if not len(here):
      assert batch.labels[i, p - 1] == batch.starts[i, p - 1] == 0
      assert batch.pair_weights[i, p - 1] == 0
      continue
    assert here[0] == end == batch.starts[i, p - 1]  # one after the other, without a gap
    end = here[-1] + 1
    np.testing.assert_array_equal(here, np.arange(here[0], end))
    np.testing.assert_array_equal(batch.tokens.positions[i, here], np.arange(len(here)))
    assert ids[here[0]] == TOKENIZER.cls_id and ids[end - 1] == TOKENIZER.sep_id
    ordinary = ids[here] >= FIRST
    a, b = ids[here][ordinary & (types[here] == 0)], ids[here][ordinary & (types[here] == 1)]
    assert ids[here[0] + 1 + len(a)] == TOKENIZER.sep_id
    assert batch.pair_weights[i, p - 1] == (len(b) > 0)  # a single text has no label
    segments = 3 if len(b) else 2
    assert len(here) == len(a) + len(b) + segments  # no other special token
    np.testing.assert_array_equal(types[here], [0] * (len(a) + 2) + [1] * (len(here) - len(a) - 2))
    for part in (a, b):
      np.testing.assert_array_equal(part, np.arange(part[0], part[0] + len(part)) if len(part)
                                    else part)
    triples.append((int(batch.labels[i, p - 1]), a, b))
  assert (ids[end:] == 0).all() and (pair[end:] == 0).all() and (types[end:] == 0).all()
  return triples


@pytest.mark.parametrize('seed', (3, 0))
def test_the_rows_drawn_in_the_docstring_are_real(seed):
  walk = source(make_records(_DOCUMENTS), 24, seed, 3)
  rows = walk.batch(0, walk.rows)
  full = int(np.argmax(rows.tokens.text_ids.any(1)))  # the other row is empty
  letters = dict(zip((TOKENIZER.pad_id, TOKENIZER.cls_id, TOKENIZER.sep_id,
                      *range(FIRST, FIRST + 17)), '.CSabcdefghijklmnopq'))
  ids, type_ids, _, text_ids = (field[full].tolist() for field in rows.tokens[:4])
  drawn = [('seed', f'{seed}     ' + ' '.join(letters[i] for i in ids)),
           ('type_ids', '  ' + ' '.join(map(str, type_ids))),
           ('text_ids', '  ' + ' '.join(map(str, text_ids))),
           ('labels', '    ' + ' '.join(map(str, rows.labels[full, :2])))]
  assert '\n'.join(f'  {name} {values}' for name, values in drawn) in pairs_lib.__doc__
  assert not rows.tokens.text_ids[1 - full].any()


def test_segments_begin_at_documents_and_around_sentences_that_stand_alone():
  alone = np.array([False, True, False, False, False])
  np.testing.assert_array_equal(pairs_lib._segments(np.array([0, 3]), alone), [0, 1, 2, 3, 5])
  alone[4] = True  # the last one: nothing is behind it
  np.testing.assert_array_equal(pairs_lib._segments(np.array([0, 3]), alone), [0, 1, 2, 3, 4, 5])


def test_neighboring_texts_are_one_stretch():
  zeros = np.zeros(3, np.int64)
  texts = pairs_lib.Pairs(np.array([12, 0, 5]), np.array([3, 5, 4]), zeros, zeros, zeros)
  for segments, starts, ends in (([0, 12], [0, 12], [9, 15]), ([0, 5, 12], [0, 5, 12], [5, 9, 15])):
    start, end = pairs_lib._stretches(texts, np.array(segments))
    np.testing.assert_array_equal(start, starts)
    np.testing.assert_array_equal(end, ends)


@pytest.mark.medium
@settings(deadline=None, max_examples=120)
@given(documents=CORPORA, max_len=st.sampled_from([8, 16, 32]), pairs=st.sampled_from([1, 3, 8]),
       sequences=st.sampled_from(pairs_lib.SEQUENCES), seed=st.integers(0, 3),
       shards=st.integers(1, 3), block=st.sampled_from([16, 100, 8192]))
def test_an_epoch_uses_each_token_once_with_true_labels(documents, max_len, pairs, sequences,
                                                        seed, shards, block):
  records = make_records(documents, block, shards)
  walk = source(records, max_len, seed, pairs, sequences)
  sizes = np.array([sum(d) for d in documents])
  ends = FIRST + np.cumsum(sizes)
  document = lambda token: int(np.searchsorted(ends, token, side='right'))
  bounds = {FIRST, *(FIRST + np.cumsum([n for d in documents for n in d])).tolist()}
  first_bounds = {FIRST, *ends.tolist()}  # of documents
  assert records.num_documents == len(documents) and records.num_tokens == sizes.sum()
  for epoch in range(2):
    used = []
    for start in range(epoch * walk.rows, (epoch + 1) * walk.rows, 4):
      batch = rows_lib.gather(records, walk._pairs(np.arange(start, min(
          start + 4, (epoch + 1) * walk.rows))), walk.layout, TOKENIZER, np.arange(4)[
              :(epoch + 1) * walk.rows - start])
      for i in range(len(batch.tokens.ids)):
        for label, a, b in pairs_of(batch, i):
          used += [a, b]
          assert len(a)
          assert document(a[0]) == document(a[-1])
          if not len(b):
            assert label == 0
            continue
          assert sequences != 'full_sentences' and document(b[0]) == document(b[-1])
          # Labelled pairs are whole sentences.
          assert {a[0], a[-1] + 1, b[0], b[-1] + 1} <= bounds
          # Every label is true to the source.
          if sequences == 'sentence_order':
            assert (b[-1] + 1 == a[0]) if label else (a[-1] + 1 == b[0])
            assert a[0] not in first_bounds and b[0] not in first_bounds
          elif label:
            assert document(a[0]) != document(b[0])
          else:
            assert a[-1] + 1 == b[0]
    used = np.concatenate(used)
    assert len(used) == len(set(used.tolist())) == sizes.sum()  # every token is used once


def test_labels_are_balanced_and_independent_of_length():
  for max_len in (64, 512):
    walk = source(varied(3000), max_len)
    pairs, _ = benchmark.epoch(walk, 10**9)
    a, b, random = (x[pairs.has_b] for x in (pairs.a_length, pairs.b_length, pairs.label == 1))
    assert abs(random.mean() - 0.5) < 0.002
    for length in (a, b, a + b):
      assert stats.ks_2samp(length[random], length[~random]).pvalue > 0.01


@functools.cache
def prose(chinese):
  """Records like Wikipedia's; token classes that mark how sentences begin and end."""
  rng = np.random.default_rng(0)
  documents = []
  for _ in range(6000):
    lengths = rng.lognormal(3.7 if chinese else 3.1, 0.5, rng.integers(4, 35)).astype(int) + 3
    documents.append(np.where(rng.random(len(lengths)) < 0.02, lengths * 9, lengths).tolist())
  records = make_records(documents)
  lengths = np.concatenate(documents)
  end = np.cumsum(lengths)
  capital, letter, digit, mark, other = range(5)
  inner = letter if chinese else capital
  classes = rng.choice(5, (end[-1], 1), p=[0.08, 0.75, 0.04, 0.1, 0.03]).repeat(2, 1)
  draw = lambda common, rare, n: np.where(rng.random(n) < 0.95, common, rare)
  classes[end - lengths, 0] = draw(inner, digit, len(end))
  classes[end - 1, 1] = draw(mark, letter, len(end))
  first = np.cumsum([sum(d) for d in documents])[:-1]  # of a document, which begins with its title
  classes[first, 0] = rng.choice([inner, other], len(first))
  return records, np.concatenate([np.full((FIRST, 2), other), classes])


@pytest.mark.parametrize('chinese', [False, True])
@pytest.mark.parametrize('sequences', pairs_lib.SEQUENCES[:2])
def test_bounds_lengths_punctuation_and_capitals_do_not_predict_the_label(sequences, chinese):
  # If pairs are cut inside sentences, the rule guesses 0.64 to 0.85 of the labels.
  records, classes = prose(chinese)
  pairs, _ = benchmark.epoch(source(records, 128, pairs=8, sequences=sequences), 9)
  label = pairs.label[pairs.has_b]
  assert len(label) > 12_000 and abs(label.mean() - 0.5) < 0.01
  rule = benchmark.accuracy_of_rule(benchmark.features(records, pairs, classes), label)
  assert rule <= 0.52


def test_packed_rows_are_full():
  rng = np.random.default_rng(0)
  sentences = lambda: list(rng.lognormal(3.2, 0.5, rng.integers(5, 40)).astype(int) + 2)
  records = make_records([sentences() for _ in range(3000)])  # as long as Wikipedia's
  for max_len, least in ((128, 0.97), (512, 0.985)):
    walk = source(records, max_len, pairs=8)
    batch = walk.batch(0, walk.rows)
    assert (batch.tokens.text_ids > 0).mean() >= least
    assert walk.sample().fill == pytest.approx((batch.tokens.text_ids > 0).mean(), abs=0.005)
    unpacked = source(records, max_len, pairs=1).batch(0, 500)
    assert (batch.tokens.text_ids > 0).mean() > 1.1 * (unpacked.tokens.text_ids > 0).mean()


def test_labels_are_true_if_one_document_has_most_of_the_text():
  # Its chunks can be exchanged only with the few chunks of the other document.
  records = make_records([[5] * 400, [5] * 8], block=100)
  walk = source(records, 16)
  batch = walk.batch(0, walk.rows)
  labels = [pair for i in range(walk.rows) for pair in pairs_of(batch, i) if len(pair[2])]
  document = lambda token: token >= FIRST + 2000
  assert any(label for label, _, _ in labels)
  assert all(label == (document(a[0]) != document(b[0])) for label, a, b in labels)


def test_rows_by_hand():
  records = make_records([[2, 3], [4, 1]])  # tokens 5 6 | 7 8 9 || 10 11 12 13 | 14
  pairs = pairs_lib.Pairs(*(np.array(x) for x in (
      [[0, 5], [5, 2], [0, 0]], [[1, 1], [4, 2], [0, 0]], [[2, 1], [9, 0], [0, 0]],
      [[2, 1], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 0]])))
  layout, row = RowLayout(12, 2), np.array([7, 8, 9])
  rows = rows_lib.gather(records, pairs, layout, TOKENIZER, row, words=True)
  np.testing.assert_array_equal(rows.tokens.ids, [
      [1, 5, 2, 7, 8, 2, 1, 10, 2, 6, 2, 0], [1, 10, 11, 12, 13, 2, 14, 2, 1, 7, 8, 2], [0] * 12])
  np.testing.assert_array_equal(rows.tokens.type_ids, [
      [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 12])
  np.testing.assert_array_equal(rows.tokens.text_ids, [
      [1] * 6 + [2] * 5 + [0], [1] * 8 + [2] * 4, [0] * 12])
  np.testing.assert_array_equal(rows.tokens.positions, [
      [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0], [*range(8), *range(4)], [0] * 12])
  np.testing.assert_array_equal(rows.labels, [[1, 0], [0, 0], [0, 0]])
  np.testing.assert_array_equal(rows.starts, [[0, 6], [0, 8], [0, 0]])
  np.testing.assert_array_equal(rows.pair_weights, [[1, 1], [1, 0], [0, 0]])
  np.testing.assert_array_equal(rows.row, [7, 8, 9])
  np.testing.assert_array_equal(rows.word_start, (rows.tokens.text_ids > 0))


def test_words_start_at_segments_and_where_the_records_say():
  # Every third token starts a word: 6 9 12 ... A segment that begins inside a word starts one too.
  records = make_records([[6, 6], [6, 6]], words=lambda tokens: tokens % 3 == 0)
  pairs = pairs_lib.Pairs(*(np.array([[x]]) for x in (2, 4, 6, 3, 0)))  # 7 8 9 10 | 11 12 13
  rows = rows_lib.gather(records, pairs, RowLayout(12, 1), TOKENIZER, np.array([0]), words=True)
  np.testing.assert_array_equal(rows.tokens.ids[0], [1, 7, 8, 9, 10, 2, 11, 12, 13, 2, 0, 0])
  np.testing.assert_array_equal(rows.word_start[0], [1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0])


def test_a_step_is_reproducible_and_its_slices_make_up_the_batch():
  records = varied(block=200, shards=3)
  walked = source(records)
  epochs = 3 * walked.rows // 16 + 1
  batches = [walked.batch(step, 16) for step in range(epochs)]
  for step in (0, epochs - 1, epochs // 2):  # a new source seeks to the steps of the other source
    fresh = source(records).batch(step, 16)
    for name, x in arrays(fresh).items():
      np.testing.assert_array_equal(x, arrays(batches[step])[name])
  for parts in (2, 4):
    size = 16 // parts
    shares = [source(records).batch(31, 16, slice(i * size, i * size + size)) for i in range(parts)]
    for name, whole in arrays(batches[31]).items():
      np.testing.assert_array_equal(np.concatenate([arrays(s)[name] for s in shares]), whole)
  assert (source(records, seed=1).batch(0, 16).tokens.ids != batches[0].tokens.ids).any()


def test_windows_of_a_huge_corpus_begin_at_the_right_rows():
  """Tokens times rows exceed 64 bits."""
  walked = source(varied(block=200, shards=3))
  walked._weights = np.full(len(walked._weights), 10**10)
  walked.rows = 10**10
  _, first = walked._permutation(0)
  expected = [int(b) * 10**10 // len(walked._weights) for b in walked._first_block]
  assert first.tolist() == expected and first[-1] == 10**10


def test_shards_do_not_change_the_rows():
  # A block also ends where its shard ends. One block per document makes the blocks equal.
  documents = [[5, 6, 7]] * 40
  one, three = make_records(documents, block=2), make_records(documents, block=2, shards=3)
  of_three = arrays(source(three).batch(3, 16))
  for name, x in arrays(source(one).batch(3, 16)).items():
    np.testing.assert_array_equal(x, of_three[name])


def test_epochs_make_new_pairs():
  walk = source(varied(40), pairs=1)
  batches = [walk.batch(epoch, walk.rows) for epoch in range(3)]
  seen = [{tuple(row) for row in b.tokens.ids[b.pair_weights[:, 0] > 0].tolist()} for b in batches]
  for one, two in ((0, 1), (1, 2)):
    assert len(seen[one] & seen[two]) < 0.2 * len(seen[one])


def test_rows_of_a_batch_come_from_all_over_the_corpus():
  walk = source(varied(3000, block=200), 64)
  batch = walk.batch(1, 64)
  first = np.sort(batch.tokens.ids[:, 1]) / walk.records.num_tokens
  assert stats.kstest(first, 'uniform').pvalue > 1e-3


def test_evaluation_rows_are_fixed_and_cover_the_epoch():
  walk = source(varied(40))
  one, two = (list(walk.epoch_batches(16)) for _ in range(2))
  assert all((a.tokens.ids == b.tokens.ids).all() for a, b in zip(one, two))
  ids = np.concatenate([batch.tokens.ids for batch in one])
  assert (ids >= FIRST).sum() == walk.records.num_tokens
  np.testing.assert_array_equal(np.concatenate([batch.row for batch in one]), np.arange(len(ids)))
