"""Where Chinese words start, compared with a loop over characters."""

import hypothesis
from hypothesis import strategies as st
import rjieba

from bert_jax.data import chinese_words
from bert_jax.data.tokenizers import older, training
from bert_jax.data.tokenizers.base import SPECIAL_TOKENS

_CHARACTERS = '-中国人民大学生活在北京的研究所里。，ab c9é\u0301😀$～の한\u3000\u200b'
_SENTENCES = st.text(_CHARACTERS, max_size=12).map(str.strip).filter(bool)
_WORDPIECE = older.wordpiece(
    [*SPECIAL_TOKENS, *'中国人民大学生活在北京的里。ab9', '##b', '##9', 'e'])
_WHOLE_WORDS = _WORDPIECE.extended(['c-9', '大-学'])
_TOGETHER = older.wordpiece(_WORDPIECE.vocab, split_chinese=False)
_BPE = training.train('bpe', lambda: ['中国人民大学', '北京的研究所里 ab c9'] * 4, 300, False)


def _slow(tokenizer, sentences):
  starts = []
  for sentence, (_, spans) in zip(sentences, tokenizer.encode_with_spans(sentences)):
    begins, at = set(), 0
    for word in rjieba.cut(sentence):
      begins.add(at)
      at += len(word)
    before = None
    for begin, _ in spans:
      starts.append(begin in begins and begin != before)
      before = begin
  if tokenizer.kind == 'wordpiece':  # a piece inside a word starts no word
    flat = [i for ids in tokenizer.encode_batch(sentences) for i in ids]
    starts = [start and not tokenizer.vocab[i].startswith('##') for start, i in zip(starts, flat)]
  return starts


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(_SENTENCES, max_size=6))
def test_chinese_word_starts_equal_a_loop_over_characters(sentences):
  for tokenizer in (_WORDPIECE, _WHOLE_WORDS, _TOGETHER, _BPE):
    tokens, is_start = chinese_words.encode(tokenizer, sentences)
    assert tokens == tokenizer.encode_batch(sentences)
    assert is_start.tolist() == _slow(tokenizer, sentences)
