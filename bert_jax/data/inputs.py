"""Texts to inputs of the model: tokens with the special ones, and several inputs in a row.

A text that is longer than the position table is cut, or read in chunks. Sun et al. 2019
(https://arxiv.org/abs/1905.05583, section 5.3) get the best results with head_tail.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens

CUTS = ('head', 'tail', 'head_tail')
CHUNKS = ('chunks_mean', 'chunks_max', 'chunks_attention')
LONG = CUTS + CHUNKS  # how a text above max_len is read
_HEAD, _HEAD_OF = 128, 510  # the paper keeps the first 128 and the last 382 of 510 tokens


class Input(NamedTuple):
  """One text or pair, with the special tokens."""

  ids: Sequence[int]
  type_ids: Sequence[int]  # 0 up to the first [SEP], 1 after it


def special_tokens(tokenizer: Tokenizer, texts: int) -> int:
  """The number of special tokens that `join` puts around one text or two."""
  return sum(map(len, tokenizer.around.one if texts == 1 else tokenizer.around.two))


def second_starts(tokenizer: Tokenizer, first: Sequence[int]) -> int:
  """The position of the second text's first token in what `join` makes."""
  before, between, _ = tokenizer.around.two
  return len(before) + len(first) + len(between)


def join(tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None = None) -> Input:
  """[CLS] first [SEP], or [CLS] first [SEP] second [SEP]; two [SEP] between them in RoBERTa."""
  if second is None:
    before, after = tokenizer.around.one
    a = [*before, *first, *after]
    return Input(a, [0] * len(a))
  before, between, after = tokenizer.around.two
  a, b = [*before, *first, *between], [*second, *after]
  return Input(a + b, [0] * len(a) + [1] * len(b))


def cut_pair(first: Sequence[int], second: Sequence[int],
             room: int) -> tuple[Sequence[int], Sequence[int]]:
  """Cuts a pair to `room` tokens: the longer text first, until both have half of the room.

  The text that was longer keeps the odd token; of two equally long ones the second, as in
  `tokenizers`, truncation `longest_first`.
  """
  if len(first) + len(second) <= room:
    return first, second
  half = (room + (len(first) > len(second))) // 2
  first = first[:max(room - len(second), half)]
  return first, second[:room - len(first)]


def pieces(ids: Sequence[int], room: int, how: str) -> list[Sequence[int]]:
  """One piece of at most `room` tokens for a method of CUTS, all chunks of a text for CHUNKS."""
  if len(ids) <= room:
    return [ids]
  if how == 'head':
    return [ids[:room]]
  if how == 'tail':
    return [ids[len(ids) - room:]]
  if how == 'head_tail':
    head = room * _HEAD // _HEAD_OF
    return [[*ids[:head], *ids[len(ids) - (room - head):]]]
  return [ids[i:i + room] for i in range(0, len(ids), room)]


def encode(texts: Sequence[Sequence[str]], tokenizer: Tokenizer) -> list[tuple[list[int], ...]]:
  """The token ids of each string of each text."""
  ids = iter(tokenizer.encode_batch([string for text in texts for string in text]))
  return [tuple(next(ids) for _ in text) for text in texts]


def text_inputs(texts: Sequence[Sequence[str]], tokenizer: Tokenizer, max_len: int,
                long: str = 'head') -> tuple[list[Input], np.ndarray]:
  """The inputs of texts (text,) and pairs (text, text), and the number of each input's text.

  An input has at most `max_len` tokens. long='chunks_...' splits a longer text into several
  inputs, the other ways cut it.
  """
  inputs, owners = [], []
  for i, ids in enumerate(encode(texts, tokenizer)):
    room = max_len - special_tokens(tokenizer, len(ids))
    if len(ids) == 2:
      cut = [cut_pair(*ids, room)]
    else:
      cut = [(piece,) for piece in pieces(*ids, room, long)]
    inputs += [join(tokenizer, *piece) for piece in cut]
    owners += [i] * len(cut)
  return inputs, np.array(owners, np.int64)


class InputRows(NamedTuple):
  """R rows with several inputs in each."""

  tokens: Tokens  # [R, L] each; `text_ids` is 1 + slot
  starts: np.ndarray  # [R, P] int32 first position of each input; 0 in an empty slot
  index: np.ndarray  # [R, P] int64 number of the input; -1 in an empty slot


def place(inputs: Sequence[Input], members: np.ndarray, row_of: np.ndarray, *, rows: int,
          length: int, slots: int, pad_id: int) -> InputRows:
  """Lays inputs out in R = `rows` rows of L = `length` tokens and P = `slots` inputs at most.

  `members` [n] holds the numbers of the inputs to lay out, `row_of` [n] the row of each.
  """
  order = np.argsort(row_of, kind='stable')
  members = members[order]
  row_of = row_of[order]
  sizes = np.array([len(inputs[i].ids) for i in members], np.int64)
  first = np.searchsorted(row_of, np.arange(rows))  # [R] the first input of each row
  slot = np.arange(len(members)) - first[row_of]
  before = np.cumsum(sizes) - sizes
  start = before - before[first[row_of]]
  target = np.arange(sizes.sum()) + np.repeat(row_of * length + start - before, sizes)  # flat

  flat = np.zeros((4, rows * length), np.int32)
  flat[0] = pad_id
  if len(members):
    flat[0, target] = np.concatenate([inputs[i].ids for i in members])
    flat[1, target] = np.concatenate([inputs[i].type_ids for i in members])
    flat[2, target] = np.arange(sizes.sum()) - np.repeat(before, sizes)
    flat[3, target] = np.repeat(slot + 1, sizes)
  starts = np.zeros((rows, slots), np.int32)
  index = np.full((rows, slots), -1, np.int64)
  starts[row_of, slot] = start
  index[row_of, slot] = members
  return InputRows(Tokens(*flat.reshape(4, rows, length)), starts, index)
