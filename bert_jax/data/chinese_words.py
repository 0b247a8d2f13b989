"""The starts of words in Chinese, which writes no spaces: jieba segments the text.

A tokenizer gives the characters of each token as Python objects, which takes as long as the tokens
themselves. In a sentence of Han characters, punctuation, and Latin letters and digits, the start of
each word of WordPiece follows from the characters alone.
"""

from collections.abc import Iterable, Sequence
import functools
import itertools
import unicodedata

import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer

_OTHER, _ALONE, _JOINED, _SPACE = range(4)  # how WordPiece splits a character from its neighbours


@functools.cache
def _kinds() -> np.ndarray:
  """[65536] uint8: the kind of each character, _OTHER for all that need a closer look."""
  kinds = np.full(1 << 16, _OTHER, np.uint8)
  kinds[0x3400:0x4dc0] = kinds[0x4e00:0xa000] = _ALONE
  for i in range(len(kinds)):
    if unicodedata.category(chr(i)).startswith('P') or chr(i) in '$+<=>^`|~':
      kinds[i] = _ALONE
    elif chr(i) in ' \u3000':
      kinds[i] = _SPACE
    elif i < 128 and chr(i).isalnum():
      kinds[i] = _JOINED
  return kinds


def load():
  """Loads jieba's dictionary, which takes half a second, and the table of characters."""
  _jieba_starts([''])
  _kinds()


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
  return np.fromiter(itertools.chain.from_iterable(lists), np.int64)


def _jieba_starts(sentences: Sequence[str]) -> np.ndarray:
  """[C] bool over the characters of all sentences: True where a word starts."""
  import rjieba  # other languages do without it

  # A word starts where the one before it ends.
  ends = np.cumsum(_flat(map(len, rjieba.cut(sentence)) for sentence in sentences))
  is_start = np.zeros(sum(map(len, sentences)) + 1, bool)
  is_start[0], is_start[ends] = True, True
  return is_start[:-1]


def _by_offsets(tokenizer: Tokenizer, sentences: Sequence[str],
                is_start: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
  """`encode` for any tokenizer, by the characters of each token."""
  encoded = tokenizer.encode_with_spans(sentences)
  tokens = [ids for ids, _ in encoded]
  sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
  before = np.repeat(np.cumsum(sizes) - sizes, [len(ids) for ids in tokens])
  begins = before + _flat(itertools.chain.from_iterable(spans) for _, spans in encoded)[::2]
  return tokens, is_start[begins] & (np.diff(begins, prepend=-1) != 0)


def encode(tokenizer: Tokenizer,
           sentences: Sequence[str]) -> tuple[list[list[int]], np.ndarray]:
  """Encodes Chinese sentences and marks the starts of words.

  Args:
    tokenizer: of any kind.
    sentences: none of them is empty.

  Returns:
    The tokens of each sentence, and [T] bool over all tokens: True where a word starts. Of the
    pieces of one character, as a byte-level BPE has them, only the first can start a word.
  """
  is_start = _jieba_starts(sentences)
  if not (tokenizer.splits_as_bert and tokenizer.kind == 'wordpiece'):
    return _by_offsets(tokenizer, sentences, is_start)
  tokens = tokenizer.encode_batch(sentences)
  is_first = tokenizer.word_starts()[_flat(tokens)]  # of a word of WordPiece
  count = len(sentences)
  sentence_of_token = np.repeat(np.arange(count), list(map(len, tokens)))
  sentence_of = np.repeat(np.arange(count), list(map(len, sentences)))  # [C]
  codes = np.frombuffer(''.join(sentences).encode('utf-32-le'), np.uint32)
  kinds = np.where(codes < len(_kinds()), _kinds()[codes & 0xffff], _OTHER)
  is_joined = kinds == _JOINED
  goes_on = is_joined[1:] & is_joined[:-1] & (sentence_of[1:] == sentence_of[:-1])
  begins = (kinds == _ALONE) | (is_joined & ~np.concatenate([[False], goes_on])[:len(kinds)])

  def of_sentence(where, sentence):
    return np.bincount(sentence[where], minlength=count)

  # Settings of the tokenizer, or entries of several words, can split the text otherwise.
  is_sure = ((of_sentence(kinds == _OTHER, sentence_of) == 0)
             & (of_sentence(begins, sentence_of) == of_sentence(is_first, sentence_of_token)))
  starts = np.zeros(len(is_first), bool)
  starts[is_first & is_sure[sentence_of_token]] = is_start[begins & is_sure[sentence_of]]
  others = [sentence for sentence, sure in zip(sentences, is_sure) if not sure]
  if others:
    _, of_others = _by_offsets(tokenizer, others, is_start[~is_sure[sentence_of]])
    starts[~is_sure[sentence_of_token]] = of_others
  return tokens, starts & is_first
