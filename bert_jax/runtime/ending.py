"""The end of a process: what is done before it, and the line for a trouble of the machine."""

from collections.abc import Callable
import errno
import os
import sys

_STORAGE = {'the disk is full': (errno.ENOSPC, errno.EDQUOT),
            'the disk cannot be written': (errno.EROFS, errno.EIO, errno.ESTALE)}

before_end: list[Callable[[], None]] = []  # called before `end` ends the process


def end(message: str, status: int):
  """Prints one line on standard error and ends the process with an exit status."""
  print(f'bert_jax: {" ".join(str(message).split())}', file=sys.stderr, flush=True)
  for action in before_end:
    action()
  # Not sys.exit: a writer thread that hangs on a full disk must not keep the process alive.
  sys.stdout.flush()
  os._exit(status)


def storage_trouble(error: BaseException | None) -> str:
  """Names the trouble of the storage that caused `error`, even if a library wrapped it; or ''."""
  while error is not None:
    text = str(error).lower()
    for what, numbers in _STORAGE.items():
      if isinstance(error, OSError) and error.errno in numbers or any(
          os.strerror(number).lower() in text for number in numbers):
        return what
    error = error.__cause__ or error.__context__
  return ''


def machine_trouble(error: Exception) -> str:
  """The line for an error of the machine: its disk or its memory; '' for any other error."""
  if trouble := storage_trouble(error):  # first: tensorstore calls a full disk RESOURCE_EXHAUSTED
    return (f'{trouble}: {error}. What was complete is sound: mend that and run the same command '
            'again')
  if 'RESOURCE_EXHAUSTED' in str(error) or isinstance(error, MemoryError):
    return ('the memory is too small for this: make the batch, its rows or the model smaller '
            f'(bert_jax.plan says what a step takes): {error}')
  return ''
