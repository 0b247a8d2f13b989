"""Inputs of the model: a text or a pair with its special tokens, and several of them in a row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.tokenizer import Tokenizer


class Input(NamedTuple):
  """One text or pair, with the special tokens."""

  ids: Sequence[int]
  type_ids: Sequence[int]  # 0 up to the first [SEP], 1 after it


def special_tokens(tokenizer: Tokenizer, texts: int) -> int:
  """The number of special tokens that `join` puts around one text or two."""
  return 2 + (texts - 1) * tokenizer.separators


def join(tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int] | None = None) -> Input:
  """[CLS] first [SEP], or [CLS] first [SEP] second [SEP]; two [SEP] between them in RoBERTa."""
  a = [tokenizer.cls_id, *first, tokenizer.sep_id]
  if second is None:
    return Input(a, [0] * len(a))
  a += [tokenizer.sep_id] * (tokenizer.separators - 1)
  b = [*second, tokenizer.sep_id]
  return Input(a + b, [0] * len(a) + [1] * len(b))


def cut_pair(first: Sequence[int], second: Sequence[int],
             room: int) -> tuple[Sequence[int], Sequence[int]]:
  """Cuts a pair to `room` tokens: the second text down to half of the room, then the first.

  The first gets the odd token, as in google-research/bert `_truncate_seq_pair`.
  """
  if len(first) + len(second) <= room:
    return first, second
  first = first[:max(room - len(second), (room + 1) // 2)]
  return first, second[:room - len(first)]


class InputRows(NamedTuple):
  """Several inputs in each row."""

  ids: np.ndarray  # [R, L] int32, like the next three
  type_ids: np.ndarray
  positions: np.ndarray  # of a token in its own input
  pair_index: np.ndarray  # 0 on padding, 1 + slot on the tokens of an input
  starts: np.ndarray  # [R, P] int32 first position of each input; 0 in an empty slot
  index: np.ndarray  # [R, P] int64 number of the input; -1 in an empty slot


def place(inputs: Sequence[Input], row_of: np.ndarray, rows: int, length: int, slots: int,
          pad_id: int) -> InputRows:
  """Lays inputs out in R = `rows` rows of L = `length` tokens and P = `slots` inputs at most.

  `row_of` [inputs] holds the row of each input.
  """
  members = np.argsort(row_of, kind='stable')
  row_of = row_of[members]
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
  return InputRows(*flat.reshape(4, rows, length), starts, index)
