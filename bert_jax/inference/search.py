"""Exact search: the vectors of a file with the largest dot products with each query.

The file is read in blocks: it may exceed the memory. Several devices share each block.
"""

from collections.abc import Callable
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.parallel import mesh as mesh_lib

_BLOCK = 32768  # vectors scored at once
_QUERIES = 1024  # queries scored at once: their scores of a block take 128 MiB
_GROUP = 32  # vectors in a group; the search compares the best scores of groups first


Restore = Callable[[np.ndarray], np.ndarray]  # stored vectors -> [n, D] float32


class Hits(NamedTuple):
  """The best vectors for each query, best first; equal scores by number."""

  scores: Any  # [Q, k] float32, in NumPy or JAX
  numbers: Any  # [Q, k] int32, rows of the file


def _best_of(hits: Hits, queries: jax.Array, block: jax.Array, start: jax.Array,
             total: jax.Array) -> Hits:
  """Merges `hits` with a block [B, D] whose first vector has the number `start`.

  `lax.top_k` is slow on wide rows. The k best vectors are in the k groups with the
  largest maxima: only these are compared.
  """
  k = hits.scores.shape[-1]
  # Default precision is bfloat16 on a TPU, which changes the order of near documents.
  scores = jnp.einsum('qd,bd->qb', queries, block.astype(jnp.float32), precision='highest')
  index = start + jnp.arange(block.shape[0], dtype=jnp.int32)
  scores = jnp.where(index < total, scores, -jnp.inf)
  groups = scores.reshape(len(queries), -1, _GROUP)  # [Q, G, 32]
  # Sorted, because top_k takes the first of equal values: the smaller number.
  chosen = jnp.sort(jax.lax.top_k(groups.max(-1), min(k, groups.shape[1]))[1])  # [Q, k]
  candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1)  # [Q, k, 32]
  numbers = index.reshape(-1, _GROUP)[chosen]
  candidates, numbers = (jnp.concatenate([old, new.reshape(len(queries), -1)], axis=1)
                         for old, new in zip(hits, (candidates, numbers)))
  best, places = jax.lax.top_k(candidates, k)
  return Hits(best, jnp.take_along_axis(numbers, places, axis=1))


@functools.partial(jax.jit, static_argnames='mesh')
def _step(mesh: Mesh, hits: Hits, queries: jax.Array, block: jax.Array, starts: jax.Array,
          total: jax.Array) -> Hits:
  """Merges `hits` [n, C, Q, k] with one block; each of n devices scores its part.

  The queries [C, Q, D] run in C batches, one after another.
  """
  shared, whole = mesh_lib.batch_sharding(mesh).spec, mesh_lib.replicated(mesh).spec

  def on_device(hits, queries, block, starts, total):
    def best_of_batch(batch):
      return _best_of(*batch, block, starts[0], total)

    hits = jax.tree.map(lambda x: x[0], hits)
    return jax.tree.map(lambda x: x[None], jax.lax.map(best_of_batch, (hits, queries)))

  return jax.shard_map(
      on_device, mesh=mesh, in_specs=(shared, whole, shared, shared, whole),
      out_specs=shared, check_vma=False)(hits, queries, block, starts, total)


def open_vectors(path: str | os.PathLike, short: bool = False) -> np.ndarray:
  """Memory-maps a .npy file of vectors.

  Raises:
    UserError: it is not [n, D] of float32 or float16, or of int8 if `short`.
  """
  try:
    vectors = np.load(os.fspath(path), mmap_mode='r')
  except (OSError, ValueError) as e:
    raise UserError(f'{path} cannot be read as an array (.npy): {e}') from e
  known = (np.int8,) if short else (np.float32, np.float16)
  require(vectors.ndim == 2 and vectors.dtype in known,
          f'{path} holds {vectors.dtype}{list(vectors.shape)}: vectors [n, D] of '
          f'{" or ".join(kind.__name__ for kind in known)} are needed')
  return vectors


def _block(path: str | os.PathLike, first: int, rows: int,
           restore: Restore | None) -> np.ndarray:
  """Reads [rows, D] vectors from `first` on, with zeros after the last vector."""
  # Map each block again: the pages of one map would count as memory of the process.
  vectors = open_vectors(path, bool(restore))[first:first + rows]
  if restore:
    vectors = restore(vectors)
  return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))


def search(queries: np.ndarray, path: str | os.PathLike, k: int,
           restore: Restore | None = None) -> Hits:
  """Finds the k vectors with the largest dot products with each query.

  Args:
    queries: [Q, D] float32, at least one.
    path: a .npy file [n, D] of float32 or float16.
    k: number of hits of each query; all n if the file has fewer vectors.
    restore: for a file of int8 vectors, a function of `short_vectors.restorer`.

  Raises:
    UserError: the file has no vectors, or vectors of another size than the queries.
  """
  vectors = open_vectors(path, bool(restore))
  total, width = len(vectors), (restore(vectors[:1]) if restore else vectors).shape[1]
  require(width == queries.shape[1] and total > 0,
          f'{path} holds {total} vectors of {width}: vectors of {queries.shape[1]} are needed')
  mesh = mesh_lib.make_mesh()
  n, k = mesh.size, min(k, total)
  # All blocks have one shape, and a device gets whole groups: one compilation.
  rows = min(_BLOCK // n, -(-total // n))  # of a device
  rows = -(-rows // _GROUP) * _GROUP
  batches = -(-len(queries) // _QUERIES)
  size = -(-len(queries) // batches)
  whole = np.pad(queries, ((0, batches * size - len(queries)), (0, 0)))
  padded = jnp.asarray(whole.reshape(batches, size, width), jnp.float32)

  put = functools.partial(jax.device_put, device=mesh_lib.batch_sharding(mesh))
  hits = put(Hits(np.full((n, batches, size, k), -np.inf, np.float32),
                  np.full((n, batches, size, k), -1, np.int32)))
  for first in range(0, total, n * rows):
    block = put(_block(path, first, n * rows, restore))
    # One block is read while another is scored. A third would only take memory.
    jax.block_until_ready(hits)
    starts = first + rows * np.arange(n, dtype=np.int32)
    hits = _step(mesh, hits, padded, block, put(starts), np.int32(total))
  return _merged(jax.device_get(hits), len(queries), k)


def _merged(hits: Hits, queries: int, k: int) -> Hits:
  """Merges the hits of all devices: [n, C, Q, k] -> [queries, k]."""
  scores, index = (np.moveaxis(x, 0, 2).reshape(-1, len(x) * k)[:queries] for x in hits)
  order = np.lexsort((index, -scores))[:, :k]  # the last key comes first
  return Hits(np.take_along_axis(scores, order, 1), np.take_along_axis(index, order, 1))
