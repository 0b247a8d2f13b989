"""Ends a process with one line, after cleanup, and explains failures of the machine."""

from collections.abc import Callable
import contextlib
import errno
import os
import sys

_STORAGE = {'the disk is full': (errno.ENOSPC, errno.EDQUOT),
            'the disk cannot be written': (errno.EROFS, errno.EIO, errno.ESTALE)}

# Cleanup that `end` runs first: `os._exit` skips `finally` blocks and atexit handlers.
before_end: list[Callable[[], None]] = []


def end(message: str, status: int):
  """Prints one line on standard error and ends the process with an exit status."""
  # The reader of a pipe may have ended before this process.
  with contextlib.suppress(BrokenPipeError):
    print(f'bert_jax: {" ".join(str(message).split())}', file=sys.stderr, flush=True)
  for action in before_end:
    action()
  # Not sys.exit: it waits for writer threads, and one may hang on a full disk.
  with contextlib.suppress(BrokenPipeError):
    sys.stdout.flush()
  os._exit(status)


def storage_trouble(error: BaseException | None) -> str:
  """Names the storage failure that caused `error`; '' if it has another cause."""
  while error is not None:
    # Libraries wrap an OSError, or keep only its text.
    text = str(error).lower()
    for what, numbers in _STORAGE.items():
      if isinstance(error, OSError) and error.errno in numbers or any(
          os.strerror(number).lower() in text for number in numbers):
        return what
    error = error.__cause__ or error.__context__
  return ''


def machine_trouble(error: Exception) -> str:
  """Explains an error of the disk or the memory in one line; '' for any other error."""
  # The disk first: tensorstore reports a full disk as RESOURCE_EXHAUSTED, too.
  if trouble := storage_trouble(error):
    return (f'{trouble}: {error}. Completed files are intact: fix this and run the same '
            'command again')
  if 'RESOURCE_EXHAUSTED' in str(error) or isinstance(error, MemoryError):
    return ('out of memory: use a smaller batch, shorter rows or a smaller model '
            f'(bert_jax.plan shows what a step needs): {error}')
  return ''
