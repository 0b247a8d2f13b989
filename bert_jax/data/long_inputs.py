"""Texts longer than the position table: cut, or read in chunks (Sun et al. 2019, section 5.3).

https://arxiv.org/abs/1905.05583 compares them on IMDB reviews; head and tail together did best.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError

CUTS = ('head', 'tail', 'head_tail')
CHUNKS = ('chunks_mean', 'chunks_max', 'chunks_attention')
# Of the 510 tokens beside [CLS] and [SEP] the paper keeps the first 128 and the last 382.
_HEAD, _ROOM = 128, 510


def check(how: str):
  """Raises UserError for an unknown way."""
  if how not in CUTS + CHUNKS:
    raise UserError(f'long={how!r} is unknown: use {", ".join(CUTS + CHUNKS)}')


def pieces(ids: Sequence[int], room: int, how: str) -> list[Sequence[int]]:
  """The parts of a text that are read: one, or its chunks of `room` tokens one after another.

  Args:
    ids: token ids of the text, without special tokens.
    room: most tokens of a part.
    how: one of CUTS or CHUNKS.
  """
  if len(ids) <= room:
    return [ids]
  if how == 'head':
    return [ids[:room]]
  if how == 'tail':
    return [ids[len(ids) - room:]]
  if how == 'head_tail':
    head = room * _HEAD // _ROOM
    return [[*ids[:head], *ids[len(ids) - (room - head):]]]
  return [ids[i:i + room] for i in range(0, len(ids), room)]


def combine(vectors: np.ndarray, how: str) -> np.ndarray:
  """One vector of a text's chunks: [C, D] -> [D].

  chunks_attention has no weights of its own: every chunk attends to all with scaled dot products,
  and the mean of what they see is taken.
  """
  if len(vectors) == 1 or how == 'chunks_mean':
    return vectors.mean(0)
  if how == 'chunks_max':
    return vectors.max(0)
  scores = vectors @ vectors.T / np.sqrt(vectors.shape[1])  # [C, C]
  weights = np.exp(scores - scores.max(1, keepdims=True))
  return (weights / weights.sum(1, keepdims=True) @ vectors).mean(0)
