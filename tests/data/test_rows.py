import pathlib
import tempfile
import types

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from bert_jax.data import records as records_lib
from bert_jax.data import rows as rows_lib

TOKENIZER = types.SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
FIRST = 5  # ordinary tokens are numbered from here, each token of a corpus differently


def make_records(documents: list[list[int]]) -> records_lib.Records:
  """Records whose documents have sentences of these lengths; token i of the corpus is FIRST + i."""
  lengths = [n for d in documents for n in d]
  total = sum(lengths)
  return records_lib.Records(
      tokens=np.arange(FIRST, FIRST + total, dtype=np.uint32),
      sentences=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
      documents=np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64),
      digest='')


def source(records, max_len=32, seed=0):
  return rows_lib.RowSource(records, max_len, seed, TOKENIZER)


CORPORA = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=2, max_size=25)


@settings(deadline=None, max_examples=150)
@given(documents=CORPORA, max_len=st.sampled_from([8, 16, 32]), seed=st.integers(0, 3))
def test_properties_of_a_plan(documents, max_len, seed):
  records = make_records(documents)
  if sum(map(sum, documents)) < 2 or max(map(sum, documents)) < 2:
    return
  plan = rows_lib.make_plan(records, max_len, (seed, 0))
  a, b = plan.a_end - plan.a_start, plan.b_end - plan.b_start
  assert (a >= 1).all() and (b >= 1).all() and (a + b + 3 <= max_len).all()
  bounds = records.sentences[records.documents]
  document = lambda token: np.searchsorted(bounds, token, side='right') - 1
  # Every label is true to the source: B follows A, or comes from another document.
  np.testing.assert_array_equal(plan.b_start[~plan.random], plan.a_end[~plan.random])
  assert (document(plan.a_start) == document(plan.a_end - 1)).all()
  assert (document(plan.b_start) == document(plan.b_end - 1)).all()
  assert (document(plan.a_start) != document(plan.b_start))[plan.random].all()
  assert (document(plan.a_start) == document(plan.b_start))[~plan.random].all()
  # Every token is used once, less what is said to be cut or dropped.
  used = np.zeros(len(records.tokens), int)
  for start, end in ((plan.a_start, plan.a_end), (plan.b_start, plan.b_end)):
    for s, e in zip(start, end):
      used[s:e] += 1
  assert used.max() == 1
  assert len(used) - used.sum() == plan.tokens_cut + plan.tokens_dropped
  assert plan.real_tokens() == used.sum() + 3 * len(plan.random)


def _corpus(documents=300, seed=0):
  rng = np.random.default_rng(seed)
  return make_records([list(rng.integers(3, 25, rng.integers(4, 30))) for _ in range(documents)])


def test_labels_are_half_and_half_and_length_does_not_tell():
  plan = rows_lib.make_plan(_corpus(2000), 64, (0, 0))
  assert abs(plan.random.mean() - 0.5) < 0.005
  for length in (plan.b_end - plan.b_start, plan.a_end - plan.a_start,
                 plan.b_end - plan.b_start + plan.a_end - plan.a_start):
    difference = abs(length[plan.random].mean() - length[~plan.random].mean())
    assert difference < 3 * length.std() / np.sqrt(len(length) / 4)
  assert plan.tokens_cut < 0.001 * plan.real_tokens()


def test_several_sentences_fill_a_row():
  rng = np.random.default_rng(0)
  records = make_records([list(rng.integers(3, 25, 1000)) for _ in range(4)])
  plan = rows_lib.make_plan(records, 128, (0, 0))
  # A row is closed when the next sentence, 13.5 tokens on average, no longer fits.
  assert plan.real_tokens() / len(plan.random) / 128 > 1 - 14 / 128


def test_long_sentences_are_used_in_pieces_and_counted():
  records = make_records([[100, 3], [4, 5]])
  plan = rows_lib.make_plan(records, 16, (0, 0))
  assert plan.sentences_split == 1
  assert plan.tokens_cut + plan.tokens_dropped + plan.real_tokens() - 3 * len(plan.random) == 112


def test_one_frequent_document_gives_no_false_label():
  # One document has most chunks: only as many of them as others can be exchanged.
  records = make_records([[5] * 400, [5] * 8])
  plan = rows_lib.make_plan(records, 16, (0, 0))
  document = lambda token: token >= 2000
  assert plan.random.any()
  assert (document(plan.a_start) != document(plan.b_start))[plan.random].all()
  np.testing.assert_array_equal(plan.b_start[~plan.random], plan.a_end[~plan.random])


def test_rows_by_hand():
  records = make_records([[2, 3], [4, 1]])
  plan = rows_lib.Plan(*(np.array(x) for x in ([0, 5], [2, 9], [2, 9], [5, 10], [False, True])),
                       0, 0, 0)
  rows = rows_lib.gather(records, plan, np.array([0, 1, -1]), 10, TOKENIZER, np.array([7, 8, 9]))
  np.testing.assert_array_equal(rows.ids, [
      [1, 5, 6, 2, 7, 8, 9, 2, 0, 0], [1, 10, 11, 12, 13, 2, 14, 2, 0, 0], [0] * 10])
  np.testing.assert_array_equal(rows.type_ids, [
      [0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1, 0, 0], [0] * 10])
  np.testing.assert_array_equal(rows.pair_index, [[1] * 8 + [0] * 2] * 2 + [[0] * 10])
  np.testing.assert_array_equal(rows.positions, [[*range(8), 0, 0]] * 2 + [[0] * 10])
  np.testing.assert_array_equal(rows.next_sentence, [[0], [1], [0]])
  np.testing.assert_array_equal(rows.pair_weights, [[1], [1], [0]])
  np.testing.assert_array_equal(rows.row, [7, 8, 9])


def test_a_step_is_a_pure_function_and_shares_make_up_the_batch():
  records = _corpus()
  walked = source(records)
  batches = [walked.batch(step, 16) for step in range(60)]
  for step in (0, 59, 31):  # a new source seeks to where the other one walked
    fresh = source(records).batch(step, 16)
    for a, b in zip(fresh, batches[step]):
      np.testing.assert_array_equal(a, b)
  parts = [source(records).batch(31, 16, slice(i * 4, i * 4 + 4)) for i in range(4)]
  for field, whole in zip(zip(*parts), batches[31]):
    np.testing.assert_array_equal(np.concatenate(field), whole)
  other = source(records, seed=1).batch(0, 16)
  assert (other.ids != batches[0].ids).any()


def test_every_epoch_uses_every_token_once_in_new_pairs():
  records = _corpus(40)
  walk = source(records)
  sizes = [len(walk.plan(epoch).random) for epoch in range(3)]
  rows = np.concatenate([walk.batch(step, 1).ids for step in range(sum(sizes))])
  ends = np.cumsum([0, *sizes])
  seen = []
  for epoch in range(3):
    part = rows[ends[epoch]:ends[epoch + 1]]
    ordinary = part[part >= FIRST]
    assert len(ordinary) == len(set(ordinary.tolist()))
    plan = walk.plan(epoch)
    assert len(ordinary) == len(records.tokens) - plan.tokens_cut - plan.tokens_dropped
    seen.append({tuple(row) for row in part.tolist()})
  assert len(seen[0] & seen[1]) < 0.2 * sizes[0]


def test_evaluation_rows_are_fixed_and_cover_the_epoch():
  walk = source(_corpus(40))
  one, two = (list(walk.epoch_batches(16)) for _ in range(2))
  assert all((a.ids == b.ids).all() for a, b in zip(one, two))
  assert sum(batch.pair_weights.sum() for batch in one) == len(walk.plan(0).random)
  rows = np.concatenate([batch.row for batch in one])
  np.testing.assert_array_equal(rows, np.arange(len(rows)))


def test_records_round_trip_and_damage():
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    writer = records_lib.Writer(folder / 'r', vocab_size=70_000)
    writer.add([[1, 2], [], [69_999]])
    writer.add([])
    writer.add([[4]])
    written = writer.close()
    assert written.tokens.dtype == np.uint32 and written.num_documents == 2
    np.testing.assert_array_equal(written.tokens, [1, 2, 69_999, 4])
    np.testing.assert_array_equal(written.sentences, [0, 2, 3, 4])
    np.testing.assert_array_equal(written.documents, [0, 2, 3])
    assert written.counts(70_000)[[1, 2, 4, 69_999]].tolist() == [1, 1, 1, 1]
    assert records_lib.open_records(folder / 'r').digest == written.digest
    with (folder / 'r' / 'tokens.bin').open('ab') as f:
      f.write(b'x')
    with pytest.raises(Exception, match='tokens.bin has 17 bytes, 16 were written'):
      records_lib.open_records(folder / 'r')
