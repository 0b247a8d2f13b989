"""Embeddings as an array file: .npy, or .safetensors with one tensor `embeddings`."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import tempfile

from etils import epath
import numpy as np
from safetensors.numpy import save

from bert_jax.inference import json_lines

SUFFIXES = ('.npy', '.safetensors')


@contextlib.contextmanager
def writer(path: epath.Path) -> Iterator[Callable[[Sequence[float]], None]]:
  """A function that appends a vector to an array file; it raises ValueError for NaN or infinity.

  The vectors are collected on disk before, because both formats begin with their number.
  """
  rows = 0

  def add(vector):
    nonlocal rows
    row = np.asarray(vector, np.float32)
    if not np.isfinite(row).all():
      raise ValueError('NaN or infinity')
    body.write(row.tobytes())
    rows += 1

  with json_lines.partial(path, binary=True) as (sink, _), tempfile.TemporaryFile() as body:
    yield add
    body.flush()
    array = np.memmap(body, np.float32, 'r').reshape(rows, -1)
    if path.name.endswith('.npy'):
      np.save(sink, array)
    else:
      sink.write(save({'embeddings': array}))
