"""Embeddings as an array file: .npy, or .safetensors with one tensor `embeddings`."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import tempfile

from etils import epath
import numpy as np
from safetensors.numpy import save

from bert_jax.errors import UserError

SUFFIXES = ('.npy', '.safetensors')


@contextlib.contextmanager
def writer(path: epath.Path) -> Iterator[Callable[[Sequence[float]], None]]:
  """A function that appends a vector to an array file; it raises ValueError for NaN or infinity.

  The file appears when it is whole. The vectors are collected on disk before, because both formats
  begin with their number.
  """
  partial, rows = path.parent / (path.name + '.partial'), 0
  try:
    sink = partial.open('wb')
  except OSError as e:
    raise UserError(f'--output={path} cannot be written: {e.strerror or e}') from e

  def add(vector):
    nonlocal rows
    row = np.asarray(vector, np.float32)
    if not np.isfinite(row).all():
      raise ValueError('NaN or infinity')
    body.write(row.tobytes())
    rows += 1

  try:
    with sink, tempfile.TemporaryFile() as body:
      yield add
      body.flush()
      array = np.memmap(body, np.float32, 'r').reshape(rows, -1)
      if path.name.endswith('.npy'):
        np.save(sink, array)
      else:
        sink.write(save({'embeddings': array}))
  except BaseException:
    partial.unlink()
    raise
  partial.replace(path)
