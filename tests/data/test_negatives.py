"""Where false next sentences come from: what an exchange keeps, and what style gives away."""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers

from benchmarks import pairs as benchmark
from bert_jax.data import negatives
from bert_jax.data import rows as rows_lib
from bert_jax.data.pairs import RowLayout
from tests.data.made import FIRST, TOKENIZER, make_records

MARK, CAPITAL, DIGIT, OTHER = range(4)


@settings(deadline=None, max_examples=150)
@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 6)),
                        max_size=60),
       kind=st.sampled_from(negatives.NEGATIVES), seed=st.integers(0, 5))
def test_an_exchange_is_mutual_and_fits(lengths, kind, seed):
  a, b, document = np.array(lengths, np.int64).reshape(-1, 3).T
  longest = 80
  rng = np.random.default_rng(seed)
  style = rng.integers(0, 5, (len(a), 3))
  source = negatives.exchange(a, b, document, longest, rng, kind, style)
  np.testing.assert_array_equal(source[source], np.arange(len(a)))
  swapped = source != np.arange(len(a))
  assert swapped.sum() <= 2 * (len(a) // 4 + 1)
  assert (a + b[source])[swapped].max(initial=0) <= longest
  in_one_document = swapped & (document == document[source])
  assert kind == 'same_document' or not in_one_document.any()
  assert abs(b - b[source])[in_one_document].max(initial=0) <= longest / 8


def test_classes_of_tokens():
  entries = ['[PAD]', '##.', ',', 'The', '##the', '\u2581Zoo', '\u0120zoo', '42', '##7', '猫',
             '\u2581', '「']
  tokenizer = mock.Mock(vocab_size=len(entries), tokens=lambda ids: [entries[i] for i in ids],
                        is_bytewise=False)
  assert negatives.token_classes(tokenizer).tolist() == [
      MARK, MARK, MARK, CAPITAL, OTHER, CAPITAL, OTHER, DIGIT, DIGIT, OTHER, OTHER, MARK]


def test_classes_of_byte_level_tokens():
  """The entries of a byte-level BPE spell the bytes of a letter: é is Ã©."""
  words = ['é', 'É', 'я', 'Я', '\u201c', 'x7']
  spelled = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  entries = ['\u0120a', *(spelled.pre_tokenize_str(word)[0][0] for word in words), '\u00c3']
  tokenizer = mock.Mock(vocab_size=len(entries), tokens=lambda ids: [entries[i] for i in ids],
                        is_bytewise=True)
  assert negatives.token_classes(tokenizer).tolist() == [
      OTHER, OTHER, CAPITAL, OTHER, CAPITAL, MARK, OTHER, MARK]  # a part of a letter is a mark


def test_styles_by_hand():
  records = make_records([[3, 4], [2, 2]])  # tokens 5 to 15
  classes = np.array([OTHER] * FIRST + [0, 1, 2, 3, 3, 0, 0, 1, 2, 2, 2])
  counts = negatives.styles(records, classes, np.array([0, 5, 10]), np.array([5, 4, 1]))
  assert counts.tolist() == [[1, 1, 1], [2, 1, 1], [0, 0, 1]]


def _corpus():
  """Documents of different style, and the [V] classes of their tokens."""
  rng = np.random.default_rng(0)
  documents, classes = [], [np.full(FIRST, OTHER)]
  for _ in range(1000):
    lengths = rng.integers(5, 30, rng.integers(20, 60))
    documents.append(lengths.tolist())
    shares = rng.dirichlet([4, 4, 2, 24])
    classes.append(rng.choice(4, lengths.sum(), p=shares))
  return make_records(documents), np.concatenate(classes).astype(np.uint8)


def _pairs(records, classes, kind):
  with mock.patch.object(negatives, 'token_classes', lambda _: classes):
    source = rows_lib.RowSource(records, RowLayout(128, 8, negatives=kind), 0, TOKENIZER)
  pairs, _ = benchmark.epoch(source, 10**9)
  return pairs.take(pairs.has_b)


@pytest.fixture(scope='module')
def corpus():
  return _corpus()


@pytest.mark.parametrize('kind, least, most', [
    ('other_document', 0.6, 1.0), ('similar_style', 0.5, 0.54), ('same_document', 0.48, 0.54)])
def test_style_predicts_the_label_only_if_any_other_document_is_allowed(corpus, kind, least, most):
  records, classes = corpus
  pairs = _pairs(records, classes, kind)
  assert abs(pairs.label.mean() - 0.5) < 0.005
  style = benchmark.style_features(records, pairs, classes)
  assert least < benchmark.accuracy_of_rule(style, pairs.label, categorical=()) < most
  lengths = np.stack([pairs.a_length, pairs.b_length, pairs.a_length + pairs.b_length], 1)
  assert benchmark.accuracy_of_rule(lengths, pairs.label, categorical=()) < 0.525


def test_same_document_negatives_come_mostly_from_the_document_of_their_pair(corpus):
  records, classes = corpus
  ends = np.cumsum(np.diff(records.shards[0].documents, append=records.num_sentences))
  token = np.concatenate([[0], np.cumsum(records.shards[0].sentences.astype(np.int64))])[ends]
  document = lambda at: np.searchsorted(token, at, side='right')
  for kind, least, most in (('other_document', 0, 0), ('similar_style', 0, 0),
                            ('same_document', 0.5, 0.99)):
    pairs = _pairs(records, classes, kind)
    false = pairs.take(pairs.label == 1)
    same = document(false.a_start) == document(false.b_start)
    assert least <= same.mean() <= most
    assert (false.a_start + false.a_length != false.b_start).all()  # none follows its A
    true = pairs.take(pairs.label == 0)
    assert (true.a_start + true.a_length == true.b_start).all()
