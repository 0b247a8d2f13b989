"""Makes the model's inputs from texts: adds special tokens, places inputs into rows.

A text that is longer than an input is cut, or split into chunks. In Sun et al. 2019
(https://arxiv.org/abs/1905.05583, section 5.3), head_tail gives the best results.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.data.tokens import Tokens

# The share of an input that the start of a text gets, as a fraction; the end of the text
# gets the rest. head_tail is the paper's: the first 128 and the last 382 of 510 tokens.
_CUTS = {'head': (1, 1), 'tail': (0, 1), 'head_tail': (128, 510)}
_CHUNKS = ('chunks_mean', 'chunks_max', 'chunks_attention')
LONG = (*_CUTS, *_CHUNKS)  # the ways to read a text longer than max_len


class Input(NamedTuple):
  """One text or pair, with special tokens."""

  ids: Sequence[int]
  type_ids: Sequence[int]  # 0 before the second text, 1 from its first token on
  hidden: int = 0  # the number of tokens at the end that no other token sees


def count_special(tokenizer: Tokenizer, texts: int) -> int:
  """The number of special tokens that `join` adds to one or two texts."""
  return sum(map(len, tokenizer.around.one if texts == 1 else tokenizer.around.two))


def start_of_second(tokenizer: Tokenizer, first: Sequence[int]) -> int:
  """The position of the second text's first token in the result of `join`."""
  before, between, _ = tokenizer.around.two
  return len(before) + len(first) + len(between)


def join(tokenizer: Tokenizer, first: Sequence[int],
         second: Sequence[int] | None = None) -> Input:
  """Makes [CLS] first [SEP], or [CLS] first [SEP] second [SEP].

  The tokenizer sets the special tokens: RoBERTa has two [SEP] between texts.
  """
  if second is None:
    before, after = tokenizer.around.one
    a = [*before, *first, *after]
    return Input(a, [0] * len(a))
  before, between, after = tokenizer.around.two
  a, b = [*before, *first, *between], [*second, *after]
  return Input(a + b, [0] * len(a) + [1] * len(b))


def is_text(tokenizer: Tokenizer, row: Input) -> np.ndarray:
  """[tokens] bool, False for the special tokens that `join` adds."""
  # By position: a text may contain [SEP] itself.
  end, start = len(row.ids), len(row.ids) - sum(row.type_ids)  # of the second text
  one, two = tokenizer.around
  before, between, after = (one[0], (), one[1]) if start == end else two
  keep = np.ones(end, bool)
  for first, special in ((0, before), (start - len(between), between),
                         (end - len(after), after)):
    keep[first:first + len(special)] = False
  return keep


def cut_pair(first: Sequence[int], second: Sequence[int],
             room: int) -> tuple[Sequence[int], Sequence[int]]:
  """Cuts a pair to `room` tokens: the longer text first, until both fill half the room.

  The longer text keeps the odd token. Of two equally long texts, the second keeps it, as
  in the truncation `longest_first` of `tokenizers`.
  """
  if len(first) + len(second) <= room:
    return first, second
  half = (room + (len(first) > len(second))) // 2
  first = first[:max(room - len(second), half)]
  return first, second[:room - len(first)]


def pieces(ids: Sequence[int], room: int, how: str) -> list[Sequence[int]]:
  """Cuts a text into chunks of at most `room` tokens, or to one piece of `room` tokens.

  `how` is one of LONG.
  """
  if len(ids) <= room:
    return [ids]
  if how in _CHUNKS:
    return [ids[i:i + room] for i in range(0, len(ids), room)]
  share, whole = _CUTS[how]
  head = room * share // whole
  return [[*ids[:head], *ids[len(ids) - (room - head):]]]


def encode(texts: Sequence[Sequence[str]],
           tokenizer: Tokenizer) -> list[tuple[list[int], ...]]:
  """The token ids of each string of each text."""
  # One call for all strings: the library encodes a batch on all cores.
  ids = iter(tokenizer.encode_batch([string for text in texts for string in text]))
  return [tuple(next(ids) for _ in text) for text in texts]


def text_inputs(texts: Sequence[Sequence[str]], tokenizer: Tokenizer, max_len: int,
                long: str = 'head') -> tuple[list[Input], np.ndarray]:
  """Makes inputs of at most `max_len` tokens from texts and pairs.

  Args:
    texts: (text,) or (text, text) each.
    tokenizer: adds its special tokens.
    max_len: tokens of an input.
    long: one of LONG. chunks_* split a longer text into several inputs; others cut it.

  Returns:
    (the inputs, [inputs] int64 the index of each input's text).
  """
  inputs, owners = [], []
  for i, ids in enumerate(encode(texts, tokenizer)):
    room = max_len - count_special(tokenizer, len(ids))
    # A pair is always cut: chunks of one text would lose the other.
    if len(ids) == 2:
      cut = [cut_pair(*ids, room)]
    else:
      cut = [(piece,) for piece in pieces(*ids, room, long)]
    inputs += [join(tokenizer, *piece) for piece in cut]
    owners += [i] * len(cut)
  return inputs, np.array(owners, np.int64)


class InputRows(NamedTuple):
  """R rows with several inputs in each."""

  tokens: Tokens  # [R, L] each; `text_ids` is the slot + 1
  starts: np.ndarray  # [R, P] int32 first position of each input; 0 in an empty slot
  index: np.ndarray  # [R, P] int64 number of the input; -1 in an empty slot


def one_per_row(inputs: Sequence[Input], pad_id: int, *, rows: int = 0,
                length: int = 0) -> InputRows:
  """Places each input into its own row; by default rows as long as the longest input."""
  numbers = np.arange(len(inputs))
  return place_in_rows(inputs, numbers, numbers, rows=rows or len(inputs), slots=1,
                       length=length or max(len(x.ids) for x in inputs), pad_id=pad_id,
                       hides=any(x.hidden for x in inputs))


def place_in_rows(inputs: Sequence[Input], members: np.ndarray, row_of: np.ndarray, *,
                  rows: int, length: int, slots: int, pad_id: int,
                  hides: bool = False) -> InputRows:
  """Places inputs into rows.

  Args:
    inputs: all inputs.
    members: [N] int64, the indices of the inputs to place.
    row_of: [N] int64, the row of each member.
    rows: R.
    length: L, the tokens of a row.
    slots: P, the largest number of inputs in a row.
    pad_id: the id of [PAD].
    hides: whether inputs have hidden tokens; then the rows have `Tokens.hidden`.
  """
  # Inputs of a row keep their order: results are returned by slot.
  order = np.argsort(row_of, kind='stable')
  members = members[order]
  row_of = row_of[order]
  sizes = np.array([len(inputs[i].ids) for i in members], np.int64)
  first = np.searchsorted(row_of, np.arange(rows))  # [R] the first input of each row
  slot = np.arange(len(members)) - first[row_of]
  before = np.cumsum(sizes) - sizes
  start = before - before[first[row_of]]
  # The position of each token in the flattened rows.
  target = np.arange(sizes.sum()) + np.repeat(row_of * length + start - before, sizes)

  # The first four fields of `Tokens`: ids, type_ids, positions, text_ids.
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
  tokens = Tokens(*flat.reshape(4, rows, length))
  if hides:
    shown = [len(inputs[i].ids) - inputs[i].hidden for i in members]
    hidden = np.zeros(rows * length, bool)
    hidden[target] = flat[2, target] >= np.repeat(shown, sizes)
    tokens = tokens._replace(hidden=hidden.reshape(rows, length))
  return InputRows(tokens, starts, index)
