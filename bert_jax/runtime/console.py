"""Console output: two-column summaries, notes and durations."""

from collections.abc import Iterable, Sequence
import functools
import os
import sys
from typing import Any, TextIO


def print_lines(lines: Iterable[tuple[str, str]]):
  """Prints (name, value) lines in two columns."""
  for name, value in lines:
    print(f'  {name:<16}{value}', flush=True)


def print_summary(lines: Iterable[tuple[str, str]]):
  """Prints (name, value) lines in two columns; only the first process prints."""
  # A local import, because `prepare` prints lines without starting JAX.
  import jax
  if not jax.process_index():
    print_lines(lines)


def markdown_table(rows: Iterable[Sequence[Any]]) -> str:
  """Formats rows as a Markdown table; the first row is the header."""
  head, *rest = ([str(cell).replace('|', r'\|') for cell in row] for row in rows)
  lines = [head, ['---'] * len(head), *rest]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


@functools.cache
def note(message: str):
  """Prints a note for the user on standard error, once per process."""
  print(f'bert_jax: note: {message}', file=sys.stderr, flush=True)


class _Lasting:
  """A stream that drops its text once its reader has ended."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def _drop(self):
    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

  def write(self, text: str) -> int:
    try:
      return self._stream.write(text)
    except BrokenPipeError:
      self._drop()
      return len(text)

  def flush(self):
    try:
      self._stream.flush()
    except BrokenPipeError:
      self._drop()


def outlive_readers():
  """Lets this process continue after the reader of its output has ended.

  In `main | tee log`, Ctrl-C ends `tee` too, before the run has saved its checkpoint.
  """
  sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)


def duration(seconds: float) -> str:
  """Formats a duration in at most two units: 45 s, 12 min, 3 h 20 min, 4 d 6 h."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f'{days} d {hours} h'
  if hours:
    return f'{hours} h {minutes} min'
  return f'{minutes} min' if minutes else f'{seconds} s'
