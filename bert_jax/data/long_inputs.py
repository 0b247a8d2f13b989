"""Texts longer than the position table: cut, or read in chunks.

Sun et al. 2019 (https://arxiv.org/abs/1905.05583, section 5.3) get the best results with head_tail.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError

CUTS = ('head', 'tail', 'head_tail')
CHUNKS = ('chunks_mean', 'chunks_max', 'chunks_attention')
_HEAD_SHARE = 128, 510  # the paper keeps the first 128 and the last 382 of 510 tokens


def check(how: str):
  """Raises UserError for an unknown method."""
  if how not in CUTS + CHUNKS:
    raise UserError(f'long={how!r} is unknown: use {", ".join(CUTS + CHUNKS)}')


def pieces(ids: Sequence[int], room: int, how: str) -> list[Sequence[int]]:
  """One piece of at most `room` tokens for a method of CUTS, all chunks of a text for CHUNKS."""
  if len(ids) <= room:
    return [ids]
  if how == 'head':
    return [ids[:room]]
  if how == 'tail':
    return [ids[len(ids) - room:]]
  if how == 'head_tail':
    kept, of = _HEAD_SHARE
    head = room * kept // of
    return [[*ids[:head], *ids[len(ids) - (room - head):]]]
  return [ids[i:i + room] for i in range(0, len(ids), room)]


def by_text(vectors: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The vectors [chunks, D] of texts, by text: ([texts, C, D], [texts, C] bool, True for a chunk).

  `owners` [chunks] holds the text of each chunk, ascending from 0 without gaps.
  """
  counts = np.bincount(owners)
  is_chunk = np.arange(counts.max()) < counts[:, None]
  grouped = np.zeros((*is_chunk.shape, vectors.shape[1]), vectors.dtype)
  grouped[is_chunk] = vectors
  return grouped, is_chunk
