"""Records by tokenizers other than WordPiece, and the words of Chinese."""

import json

import numpy as np
import pytest
import sentencepiece

from bert_jax.data import encode, preparation
from bert_jax.data.tokenizers import training
from tests import conftest
from tests.data.corpora import open_corpus, sentences


def test_sentences_of_a_published_bpe_start_with_a_space(tmp_path):
  """RoBERTa's files add no space before a text: a sentence would stick to the one before it."""
  documents = [[f'The cat saw {i} birds.', 'The end came.'] for i in range(12)]
  source = conftest.write_corpus(tmp_path / 'c.txt', documents)
  trained = open_corpus(tmp_path / 'w', source, 300, tokenizer='bpe').tokenizer
  settings = json.loads(trained.serialized())
  settings['pre_tokenizer']['add_prefix_space'] = False
  (tmp_path / 'tokenizer.json').write_text(json.dumps(settings))
  corpus = open_corpus(tmp_path / 'v', source, vocab=str(tmp_path / 'tokenizer.json'), heldout=0.0,
                       lines_are_sentences=True)
  texts = [s for document in sentences(corpus, corpus.train) for s in document]
  expected = corpus.tokenizer.encode_batch([f' {s}' for d in documents for s in d])
  assert texts == [' '.join(corpus.tokenizer.tokens(ids)) for ids in expected]
  starts = corpus.train.word_starts(np.arange(corpus.train.num_tokens))
  words = [s.rstrip('.').split() for d in documents for s in d]
  assert starts.sum() == sum(map(len, words))


def test_sentencepiece(tmp_path, corpus_file):
  corpus = open_corpus(tmp_path / 'w', corpus_file, vocab_size=120, tokenizer='sentencepiece')
  assert corpus.tokenizer.kind == 'sentencepiece' and corpus.tokenizer.vocab_size <= 120
  assert corpus.counts[:5].sum() == 0
  position = np.arange(corpus.train.num_tokens)
  pieces = corpus.tokenizer.tokens(corpus.train.tokens(position))
  assert corpus.train.word_starts(position).tolist() == [p.startswith('\u2581') for p in pieces]


@pytest.mark.parametrize('special', [['[CLS]', '[SEP]', '[MASK]'], []])
def test_each_token_is_a_word_if_no_piece_has_a_space(tmp_path, special):
  documents = [['今日は学校に行く。', f'先生が猫を{i}匹見る。'] for i in range(12)]
  with (tmp_path / 'ja.model').open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(s for d in documents for s in d), model_writer=file, vocab_size=45,
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2, pad_id=0, unk_id=1,
        bos_id=-1, eos_id=-1, control_symbols=special)
  source = conftest.write_corpus(tmp_path / 'ja.txt', documents)
  corpus = open_corpus(tmp_path / 'w', source, vocab=str(tmp_path / 'ja.model'), heldout=0.0,
                       language='ja')
  assert not any('\u2581' in piece for piece in corpus.tokenizer.vocab)
  assert corpus.train.num_sentences == 24 and corpus.train.num_tokens > 72
  assert corpus.train.word_starts(np.arange(corpus.train.num_tokens)).all()


def test_chinese_words_are_marked(tmp_path):
  documents = [['今天天气很好。我们去公园吧！', f'他有{i}只iPhone手机。']  for i in range(8)]
  source = conftest.write_corpus(tmp_path / 'zh.txt', documents)
  corpus = open_corpus(tmp_path / 'w', source, language='zh', heldout=0.0)
  assert {'猫', '公', '园'} - {'猫'} <= set(corpus.tokenizer.vocab)
  assert corpus.train.num_sentences == 8 * 3
  position = np.arange(corpus.train.num_tokens)
  pieces = corpus.tokenizer.tokens(corpus.train.tokens(position))
  words = []
  for piece, start in zip(pieces, corpus.train.word_starts(position)):
    if start:
      words.append('')
    words[-1] += piece.removeprefix('##')
  assert {'今天天气', '公园', '手机', 'iphone', '我们', '。'} <= set(words)
  assert '园' not in words and '机' not in words


@pytest.mark.parametrize('kind, size', [('sentencepiece', 60), ('bpe', 330)])
def test_sentencepiece_and_bpe_mark_chinese_words(tmp_path, kind, size):
  documents = [['今天天气很好。我们去公园吧！', f'他有{i}只手机。']  for i in range(8)]
  source = conftest.write_corpus(tmp_path / 'zh.txt', documents)
  corpus = open_corpus(tmp_path / 'w', source, language='zh', heldout=0.0, tokenizer=kind,
                       vocab_size=size)
  t = corpus.tokenizer
  (ids, offsets), = t.encode_with_offsets(['今天天气很好。'])
  encoded = encode.Encoder(t, preparation.Settings('', language='zh')).documents(['今天天气很好。'])
  assert encoded.tokens.tolist() == ids
  starts = [offsets[i][0] for i in np.flatnonzero(encoded.words)]
  assert starts == sorted(set(starts)) and starts[0] == 0 and len(starts) > 1
  assert set(starts) <= {0, 4, 5, 6}  # 今天天气, 很, 好, 。


def test_a_chinese_alphabet_has_up_to_a_third_of_the_entries():
  han = [chr(0x4e00 + i) for i in range(400)]
  texts = [' '.join(han)] * 3
  kept = {x for x in training.train('wordpiece', lambda: texts, 900, False).vocab if x in han}
  assert kept == set(han[:300])
  kept = {x for x in training.train('wordpiece', lambda: texts, 1500, False).vocab if x in han}
  assert kept == set(han)
