"""How long a checkpoint blocks the training loop, compared with one copy of the state.

  python -m benchmarks.saving --configs=configs/tiny.py,configs/base.py

Saving is asynchronous: the loop waits only for the copy to host memory, the fingerprints,
and the start of the writes. Prints medians of --repeats saves, each started after the
previous one ended.
"""

import os
import pathlib
import runpy
import statistics
import tempfile
import time

from absl import app, flags
from etils import epath
import jax
import numpy as np

from bert_jax import config as config_lib
from bert_jax import config_fields
from bert_jax.data.phases import Phase
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import programs
from bert_jax.training import checkpoint
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib

_CONFIGS = flags.DEFINE_list('configs', ['configs/tiny.py', 'configs/small.py', 'configs/base.py'],
                             'What to save the state of.')
_REPEATS = flags.DEFINE_integer('repeats', 5, 'Saves of each.')


def _seconds(function) -> float:
  began = time.perf_counter()
  function()
  return time.perf_counter() - began


def _measure(path: str, folder: pathlib.Path) -> tuple[float, float, float]:
  """Returns GB of the state, seconds of a copy, and seconds that a save blocks."""
  config = runpy.run_path(path)['get_config']()
  mesh = mesh_lib.make_mesh(**config.mesh)
  config = config_fields.changed(config, config_lib.dtype_on(config, mesh))
  task = programs.pretraining(config, Phase(10, 128, mesh.size)).task
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(**config.optimizer), 100_000)
  init, _ = state_lib.make_init(task, optimizer, mesh, config.sharding)
  state = jax.block_until_ready(init(state_lib.root_key(0)))
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  copies = [_seconds(lambda: [np.array(x) for x in jax.tree.leaves(state)])
            for _ in range(_REPEATS.value)]
  saved, held = checkpoint.Checkpoints(epath.Path(folder), 1), []
  for step in range(1, _REPEATS.value + 2):
    held.append(_seconds(lambda step=step: saved.save(state, step)))
    saved.wait()
    os.sync()  # or pending kernel writes would slow the next save
  saved.close()
  return size / 1e9, statistics.median(copies), statistics.median(held[1:])  # the first compiles


def main(_):
  """Prints a table."""
  print('| state of | GB | one copy in memory | a save blocks the loop | beyond the copy |')
  print('| --- | --- | --- | --- | --- |')
  for path in _CONFIGS.value:
    with tempfile.TemporaryDirectory() as folder:
      size, copy, held = _measure(path, pathlib.Path(folder) / 'run')
    beyond = 1000 * (held - copy)
    print(f'| `{path}` | {size:.2f} | {copy:.3f} s | {held:.3f} s | {beyond:.0f} ms |', flush=True)


if __name__ == '__main__':
  app.run(main)
