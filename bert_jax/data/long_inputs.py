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


def by_text(vectors: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The vectors of chunks, text by text: ([texts, C, D], [texts, C] bool which of them exist).

  Args:
    vectors: [chunks, D].
    owners: [chunks] the text of each, ascending from 0 without gaps.
  """
  counts = np.bincount(owners)
  there = np.arange(counts.max()) < counts[:, None]
  grouped = np.zeros((*there.shape, vectors.shape[1]), vectors.dtype)
  grouped[there] = vectors
  return grouped, there
