import json

from etils import epath
import numpy as np
import pytest

from bert_jax.data import prepare
from bert_jax.errors import UserError
from tests import conftest


def _open(workdir, source, vocab_size=200, **data):
  config = conftest.tiny_config(source).data
  config.update(data)
  return prepare.open_corpus(config, vocab_size, epath.Path(workdir))


def _texts(corpus, records):
  return {' '.join(corpus.tokenizer.tokens(records.tokens[a:b]))
          for a, b in zip(records.sentences[:-1], records.sentences[1:])}


def test_held_out_documents_share_no_sentence_with_the_training_text(tmp_path):
  documents = conftest.make_documents(60)
  copied = documents[:20]  # exact copies land on the same side
  for document in documents[20:40]:
    document.append('A sentence that stands in many documents.')
  source = conftest.write_corpus(tmp_path / 'c.txt', documents + copied)
  corpus = _open(tmp_path / 'w', source)
  assert corpus.heldout.num_documents in range(6, 13)  # 6 different ones, and their copies
  assert corpus.train.num_documents + corpus.heldout.num_documents == 80
  assert not _texts(corpus, corpus.train) & _texts(corpus, corpus.heldout)
  assert any('20 documents are exact copies' in note for note in corpus.notes)


def test_cross_entropy_of_frequencies_by_hand():
  # Add-one smoothing: (3 + 1) / 6 and (1 + 1) / 6.
  assert prepare.cross_entropy(np.array([1, 1]), np.array([3, 1])) == pytest.approx(
      -(np.log(4 / 6) + np.log(2 / 6)) / 2)


def test_kept_in_the_workdir(tmp_path, corpus_file):
  first = _open(tmp_path / 'w', corpus_file)
  again = _open(tmp_path / 'w', corpus_file)
  assert first.train.digest == again.train.digest
  assert first.unigram_entropy == again.unigram_entropy
  np.testing.assert_array_equal(first.train.tokens, again.train.tokens)
  other = _open(tmp_path / 'v', corpus_file)
  assert other.train.digest == first.train.digest  # made anew, it is the same
  with pytest.raises(UserError, match='made with data.heldout=0.1, now it is 0.2'):
    _open(tmp_path / 'w', corpus_file, heldout=0.2)


def test_a_half_made_corpus_is_made_again(tmp_path, corpus_file):
  whole = _open(tmp_path / 'w', corpus_file)
  (tmp_path / 'w/corpus/manifest.json').unlink()
  (tmp_path / 'w/corpus/train/tokens.bin').write_bytes(b'half')
  assert _open(tmp_path / 'w', corpus_file).train.digest == whole.train.digest


def test_a_given_vocabulary(tmp_path, corpus_file):
  trained = _open(tmp_path / 'w', corpus_file)
  given = _open(tmp_path / 'v', corpus_file, vocab=str(tmp_path / 'w/tokenizer/vocab.txt'))
  assert given.tokenizer.vocab == trained.tokenizer.vocab
  assert given.train.digest == trained.train.digest


def test_sentencepiece(tmp_path, corpus_file):
  corpus = _open(tmp_path / 'w', corpus_file, vocab_size=120, tokenizer='sentencepiece')
  assert corpus.tokenizer.kind == 'sentencepiece' and corpus.tokenizer.vocab_size <= 120
  assert corpus.train.counts(corpus.tokenizer.vocab_size)[:5].sum() == 0


def test_chinese_characters_are_tokens(tmp_path):
  documents = [['今天天气很好。我们去公园吧！', f'他有{i}只猫。']  for i in range(8)]
  source = conftest.write_corpus(tmp_path / 'zh.txt', documents)
  corpus = _open(tmp_path / 'w', source, language='zh', heldout=0.0)
  assert {'猫', '公', '园'} <= set(corpus.tokenizer.vocab)
  assert len(corpus.train.sentences) - 1 == 8 * 3


def test_small_corpora(tmp_path):
  three = conftest.write_corpus(tmp_path / 'three.txt', conftest.make_documents(3))
  corpus = _open(tmp_path / 'w', three)
  assert corpus.heldout.num_documents == 0 and corpus.unigram_entropy is None
  assert any('nothing is held out' in note for note in corpus.notes)


@pytest.mark.parametrize('text, message', [
    ('\n \n\n', 'holds no document'),
    ('One.\nTwo.\nThree.\n', 'one document.*blank line'),
    ('Same.\n\nSame.\n\nSame.\n', 'one document'),
])
def test_corpora_without_pairs_are_refused(tmp_path, text, message):
  (tmp_path / 'c.txt').write_text(text)
  with pytest.raises(UserError, match=message):
    _open(tmp_path / 'w', str(tmp_path / 'c.txt'))
  assert not (tmp_path / 'w/corpus/manifest.json').exists()


def test_manifest_says_what_was_asked(tmp_path, corpus_file):
  _open(tmp_path / 'w', corpus_file)
  manifest = json.loads((tmp_path / 'w/corpus/manifest.json').read_text())
  assert manifest['data']['source'] == corpus_file and manifest['data']['vocab_size'] == 200
