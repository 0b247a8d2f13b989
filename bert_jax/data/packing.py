"""Packs pairs into rows by best-fit decreasing (Johnson 1973), and fills the gaps."""

import numpy as np

SHORTEST_PIECE = 8  # ordinary tokens; a smaller gap stays empty


def pack(sizes: np.ndarray, max_len: int, most: int,
         fillers: int = 0) -> tuple[np.ndarray, int]:
  """Puts each item into a row: the longest first, each into the fullest row with space.

  Args:
    sizes: [C] int64, each at most `max_len`. Items of equal length keep their order.
    max_len: L.
    most: P, the largest number of items in a row.
    fillers: items up to this length are fillers, which never open a row unless P is 1.

  Returns:
    ([C] int64 row of each item, -1 for a filler without a row; number of rows).
  """
  if most == 1:
    return np.arange(len(sizes)), len(sizes)
  row_of = [0] * len(sizes)
  rows = 0
  open_rows = [[] for _ in range(max_len + 1)]  # by the space left: (row, its items)
  # Bit s is set if an open row has s tokens of space left. One integer replaces a search
  # over all rows.
  spaces = 0
  shortest = int(sizes.min(initial=max_len))
  order = np.argsort(-sizes, kind='stable')
  for item, size in zip(order.tolist(), sizes[order].tolist()):
    fitting = spaces >> size
    if fitting:
      # The lowest bit is the smallest sufficient space: the fullest row.
      space = size + (fitting & -fitting).bit_length() - 1
      row, items = open_rows[space].pop()
      if not open_rows[space]:
        spaces ^= 1 << space
    elif size <= fillers:
      row_of[item] = -1
      continue
    else:
      row, items, space = rows, 0, max_len
      rows += 1
    row_of[item] = row
    space -= size
    # A row that can take no further item is closed.
    if space >= shortest and items + 1 < most:
      open_rows[space].append((row, items + 1))
      spaces |= 1 << space
  return np.array(row_of, np.int64), rows


def pour(start: np.ndarray, end: np.ndarray, *, space: np.ndarray, slots: np.ndarray,
         max_len: int, max_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
  """Cuts spans of text into pieces that fill the gaps of rows in order, then new rows.

  Args:
    start: [T] int64, the first token of each span in the corpus.
    end: [T] int64, one more than the last token of each span.
    space: [R] int64 tokens left in each row; a piece takes two for [CLS] and [SEP].
    slots: [R] int64 items that each row may still take.
    max_len: L, of new rows.
    max_items: the largest number of items in a new row.

  Returns:
    ([N] int64 start, [N] length and [N] row of each piece; number of rows).
  """
  space, slots = space.tolist(), slots.tolist()
  least = min(SHORTEST_PIECE, max_len - 2)
  pieces = []
  row = 0
  for at, last in zip(start.tolist(), end.tolist()):
    while at < last:
      # A gap below `least` stays empty, unless the rest of the span fits into it.
      while row < len(space) and (
          not slots[row] or space[row] - 2 < min(least, last - at)):
        row += 1
      if row == len(space):
        space.append(max_len)
        slots.append(max_items)
      length = min(last - at, space[row] - 2)
      pieces.append((at, length, row))
      space[row] -= length + 2
      slots[row] -= 1
      at += length
  return *np.array(pieces, np.int64).reshape(-1, 3).T, len(space)
