"""Finds word starts in Chinese, which has no spaces, by jieba's segmentation.

A tokenizer returns the offsets of tokens as Python objects, which doubles the time of
tokenization. Most sentences do not need them. If a sentence has only Han characters,
punctuation, and Latin letters and digits, its characters alone show where each WordPiece
word starts.
"""

from collections.abc import Iterable, Sequence
import functools
import itertools
import unicodedata

import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer

# How WordPiece splits a character from its neighbors.
_OTHER, _ALONE, _JOINED, _SPACE = range(4)


@functools.cache
def _kinds() -> np.ndarray:
  """[65536] uint8: the kind of each character; _OTHER = only the tokenizer knows."""
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
  """Loads jieba's dictionary (half a second) and the table of characters."""
  _jieba_starts([''])
  _kinds()


def _flat(lists: Iterable[Iterable[int]]) -> np.ndarray:
  return np.fromiter(itertools.chain.from_iterable(lists), np.int64)


def _jieba_starts(sentences: Sequence[str]) -> np.ndarray:
  """[C] bool over the characters of all sentences: True where a word starts."""
  import rjieba  # other languages do not need it

  # A word starts where the word before it ends.
  ends = np.cumsum(_flat(map(len, rjieba.cut(sentence)) for sentence in sentences))
  is_start = np.zeros(sum(map(len, sentences)) + 1, bool)
  is_start[0], is_start[ends] = True, True
  return is_start[:-1]


def _by_offsets(tokenizer: Tokenizer, sentences: Sequence[str],
                is_start: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
  """Does the work of `encode` for any tokenizer, by the offsets of each token."""
  encoded = tokenizer.encode_with_spans(sentences)
  tokens = [ids for ids, _ in encoded]
  sizes = np.fromiter(map(len, sentences), np.int64, len(sentences))
  before = np.repeat(np.cumsum(sizes) - sizes, [len(ids) for ids in tokens])
  # Each span is flattened to (start, end): every second number is a start.
  begins = before + _flat(
      itertools.chain.from_iterable(spans) for _, spans in encoded)[::2]
  # Several tokens can share one character. Only the first of them starts a word.
  return tokens, is_start[begins] & (np.diff(begins, prepend=-1) != 0)


def encode(tokenizer: Tokenizer,
           sentences: Sequence[str]) -> tuple[list[list[int]], np.ndarray]:
  """Encodes Chinese sentences and marks the starts of words.

  Args:
    tokenizer: any tokenizer.
    sentences: non-empty strings.

  Returns:
    (the token ids of each sentence, [T] bool over all tokens: True where a word starts).
    If a character has several tokens, as in byte-level BPE, only the first can start a
    word.
  """
  is_start = _jieba_starts(sentences)
  if not (tokenizer.splits_as_bert and tokenizer.kind == 'wordpiece'):
    return _by_offsets(tokenizer, sentences, is_start)
  tokens = tokenizer.encode_batch(sentences)
  is_first = tokenizer.word_starts()[_flat(tokens)]  # in a WordPiece word
  count = len(sentences)
  sentence_of_token = np.repeat(np.arange(count), list(map(len, tokens)))
  sentence_of_char = np.repeat(np.arange(count), list(map(len, sentences)))  # [C]
  # UTF-32 gives one code for each character, also beyond 0xffff.
  codes = np.frombuffer(''.join(sentences).encode('utf-32-le'), np.uint32)
  kinds = np.where(codes < len(_kinds()), _kinds()[codes & 0xffff], _OTHER)
  # A word is a single _ALONE character, or a run of _JOINED characters in one sentence.
  is_joined = kinds == _JOINED
  continues = is_joined[1:] & is_joined[:-1] & (
      sentence_of_char[1:] == sentence_of_char[:-1])
  begins = (kinds == _ALONE) | (
      is_joined & ~np.concatenate([[False], continues])[:len(kinds)])

  def count_by(where, sentence):
    return np.bincount(sentence[where], minlength=count)

  # Tokenizer settings, or entries of several words, can split a sentence differently.
  # Then its number of words differs too.
  num_words = count_by(begins, sentence_of_char)
  is_sure = ((count_by(kinds == _OTHER, sentence_of_char) == 0)
             & (num_words == count_by(is_first, sentence_of_token)))
  starts = np.zeros(len(is_first), bool)
  starts[is_first & is_sure[sentence_of_token]] = is_start[
      begins & is_sure[sentence_of_char]]
  others = [sentence for sentence, sure in zip(sentences, is_sure) if not sure]
  if others:
    _, other_starts = _by_offsets(tokenizer, others, is_start[~is_sure[sentence_of_char]])
    starts[~is_sure[sentence_of_token]] = other_starts
  return tokens, starts & is_first
