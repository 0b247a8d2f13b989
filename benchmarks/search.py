"""Exact search: seconds, CPU seconds and memory against numpy's argpartition, in turns.

  python -m benchmarks.search --folder=DIR [--vectors=1000000] [--queries=1000] [--rounds=3]

Each turn is a separate process that searches a file of random vectors for the best 100 of
every query. Imports do not count, compilation does. The command writes this file (1.5 GB)
into --folder.
"""

import json
import pathlib
import resource
import subprocess
import sys
import time

from absl import app, flags
import numpy as np

from bert_jax.runtime import host

_FOLDER = flags.DEFINE_string('folder', None, 'Folder of the vectors.', required=True)
_VECTORS = flags.DEFINE_integer('vectors', 1_000_000, 'Vectors of the corpus.')
_QUERIES = flags.DEFINE_integer('queries', 1000, 'Queries.')
_WIDTH = flags.DEFINE_integer('width', 384, 'Width of a vector.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Turns of each side.')
_SIDE = flags.DEFINE_string('side', '', 'bert_jax or numpy: makes one turn; make: the vectors.')
_K, _BLOCK = 100, 16384


def _numpy_search(queries, path, k):
  scores = np.full((len(queries), k), -np.inf, np.float32)
  index = np.zeros((len(queries), k), np.int64)
  total = len(np.load(path, mmap_mode='r'))
  for first in range(0, total, _BLOCK):
    block = np.array(np.load(path, mmap_mode='r')[first:first + _BLOCK])
    new = queries @ block.T
    best = np.argpartition(new, -min(k, len(block)), axis=1)[:, -k:]
    scores = np.concatenate([scores, np.take_along_axis(new, best, 1)], axis=1)
    index = np.concatenate([index, first + best], axis=1)
    best = np.argpartition(scores, -k, axis=1)[:, -k:]
    scores, index = (np.take_along_axis(x, best, 1) for x in (scores, index))
  order = np.lexsort((index, -scores))
  return np.take_along_axis(scores, order, 1), np.take_along_axis(index, order, 1)


def _make(path: pathlib.Path, count: int, seed: int):
  rng = np.random.default_rng(seed)
  vectors = np.lib.format.open_memmap(path, 'w+', np.float32, (count, _WIDTH.value))
  for first in range(0, count, _BLOCK):
    block = rng.normal(size=(min(_BLOCK, count - first), _WIDTH.value)).astype(np.float32)
    vectors[first:first + _BLOCK] = block / np.linalg.norm(block, axis=1, keepdims=True)


def _turn(folder: pathlib.Path):
  host.keep_freed_memory()  # as in the commands
  queries = np.load(folder / 'queries.npy')
  if _SIDE.value == 'numpy':
    search = _numpy_search
  else:
    from bert_jax.inference import search as search_lib
    search = search_lib.search
  began, cpu_began = time.perf_counter(), time.process_time()
  scores, index = search(queries, folder / 'corpus.npy', _K)
  seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
  np.savez(folder / f'{_SIDE.value}.npz', scores=scores, index=index)
  print(json.dumps({'seconds': seconds, 'cpu': cpu, 'gigabytes': resource.getrusage(
      resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}))


def _child(side: str) -> str:
  return subprocess.run(
      [sys.executable, '-m', 'benchmarks.search', *sys.argv[1:], f'--side={side}'], check=True,
      stdout=subprocess.PIPE, text=True).stdout


def _main(_):
  folder = pathlib.Path(_FOLDER.value)
  folder.mkdir(parents=True, exist_ok=True)
  if _SIDE.value == 'make':
    _make(folder / 'corpus.npy', _VECTORS.value, 0)
    return _make(folder / 'queries.npy', _QUERIES.value, 1)
  if _SIDE.value:
    return _turn(folder)
  _child('make')  # the peak memory of a child starts at its parent's
  results = {'bert_jax': [], 'numpy': []}
  for _ in range(_ROUNDS.value):
    for side, turns in results.items():
      turns.append(json.loads(_child(side).splitlines()[-1]))
  for side, turns in results.items():
    print(side, *(f'{name} {np.median([turn[name] for turn in turns]):.2f}' for name in turns[0]))
  ours, theirs = (np.load(folder / f'{side}.npz') for side in results)
  print(f'equal hits {np.mean(ours["index"] == theirs["index"]):.6f}, scores differ by at most '
        f'{np.abs(ours["scores"] - theirs["scores"]).max():.1e}')


if __name__ == '__main__':
  app.run(_main)
