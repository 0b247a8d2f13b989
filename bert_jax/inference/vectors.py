"""Embeddings as an array file: .npy, or .safetensors with one tensor `embeddings`."""

from collections.abc import Sequence
import tempfile
from typing import BinaryIO

import numpy as np
from safetensors.numpy import save

SUFFIXES = ('.npy', '.safetensors')


class Writer:
  """Collects vectors on disk, because both formats begin with their number; writes on exit."""

  def __init__(self, sink: BinaryIO, name: str):
    self._sink, self._npy = sink, name.endswith('.npy')
    self._body, self._rows = tempfile.TemporaryFile(), 0

  def __enter__(self):
    return self

  def add(self, vector: Sequence[float]):
    """Appends one vector, as float32; raises ValueError if it is not finite."""
    row = np.asarray(vector, np.float32)
    if not np.isfinite(row).all():
      raise ValueError('NaN or infinity')
    self._body.write(row.tobytes())
    self._rows += 1

  def __exit__(self, kind, error, traceback):
    with self._body:
      if kind is None:
        self._body.flush()
        array = np.memmap(self._body, np.float32, 'r').reshape(self._rows, -1)
        if self._npy:
          np.save(self._sink, array)
        else:
          self._sink.write(save({'embeddings': array}))
