"""The words of a tagger, for every kind of vocabulary."""

import json
import types

import pytest

from bert_jax.data.tokenizers import base, training
from bert_jax.data.tokenizers.library import LibraryTokenizer
from bert_jax.tasks import token_classification
from tests.data.test_tokenizer import TEXTS


def test_words_as_berts_own_tokenizer_splits_them():
  text = ' In London,  3 cafe\u0301s: 猫坐'
  assert [text[a:b] for a, b in token_classification.find_words(text)] == [
      'In', 'London', ',', '3', 'cafe\u0301s', ':', '猫', '坐']
  assert token_classification.find_words(' ') == []


@pytest.mark.parametrize('kind, size', [('wordpiece', 120), ('sentencepiece', 90), ('bpe', 300)])
def test_words_get_the_pieces_that_follow_a_space(kind, size):
  t = training.train(kind, lambda: TEXTS, size, True)
  words = TEXTS[0].split()
  by_text = token_classification.word_pieces([words, ['\u200b'], words[:1]], t)
  spaced = t.encode_batch([' ' + ' '.join(words)])[0]
  assert [i for pieces in by_text[0] for i in pieces] == spaced
  assert by_text[2] == by_text[0][:1] and all(t.word_starts()[pieces[0]] for pieces in by_text[0])
  if kind == 'wordpiece':
    assert by_text[1] == [[t.unk_id]]


def test_words_of_a_published_bpe_start_with_a_space():
  """A RoBERTa reads the first word of a text without a space, as another token."""
  settings = json.loads(training.train('bpe', lambda: TEXTS, 300, True).serialized())
  settings['pre_tokenizer']['add_prefix_space'] = False
  t = LibraryTokenizer(settings)
  word = TEXTS[0].split()[0]
  (pieces,), = token_classification.word_pieces([[word]], t)
  assert pieces == t.encode_batch([' ' + word])[0] != t.encode_batch([word])[0]


@pytest.mark.parametrize('around', [((7,), ()), ((7,), (8,)), ((), (8, 8))])
def test_marks_stand_on_first_pieces_whatever_surrounds_a_text(around):
  t = types.SimpleNamespace(around=base.Around(around, around + ((),)))
  f = token_classification._features([[[1, 2], [3], [4, 5, 6]]], t, 16, tags=[[10, 20, 30]])
  first = len(around[0])
  assert f.inputs[0].ids == [*around[0], 1, 2, 3, 4, 5, 6, *around[1]]
  assert len(f.token_targets[0]) == len(f.inputs[0].ids)
  assert {first: 11, first + 2: 21, first + 3: 31} == {
      place: mark for place, mark in enumerate(f.token_targets[0].tolist()) if mark}
