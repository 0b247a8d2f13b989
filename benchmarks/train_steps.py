"""The bert_jax side of `benchmarks.train`: training steps as in the training loop.

  python -m benchmarks.train_steps --run=run.json

run.json has the argument of `make_job`.
"""

import importlib.metadata
import json
from typing import Any

from absl import app, flags
from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from benchmarks import turns
from bert_jax import config as config_lib
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import pretrain
from bert_jax.runtime import host
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from bert_jax.training.job import Job

_RUN = flags.DEFINE_string('run', None, 'JSON file.')


def make_job(run: dict[str, Any], pack: bool, mesh: Mesh) -> tuple[FrozenConfigDict, Job]:
  """Makes the job of a config with all layers unrolled.

  Args:
    run: 'size', a name of config.SIZES; 'workdir'; 'config', other fields as
      {'group.field': value}.
    pack: see data.pack.
    mesh: the devices of the run.
  """
  c = config_lib.pretraining(run['size'])
  c.model.scan_unroll = c.model.num_layers
  c.update_from_flattened_dict({**run['config'], 'data.pack': pack})
  c = FrozenConfigDict(c)
  return c, pretrain.make_job(c, None, mesh, epath.Path(run['workdir']))


def main(_):
  """Makes steps on request."""
  if not host.has_accelerator():
    host.keep_freed_memory()
  mesh = mesh_lib.make_mesh()
  config, job = make_job(json.loads(epath.Path(_RUN.value).read_text()), True, mesh)
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(**config.optimizer), job.train_steps)
  init, abstract = state_lib.make_init(job.task, optimizer, mesh, config.sharding)
  state = init(state_lib.root_key(0))
  update = state_lib.make_train_step(job.task, optimizer, mesh, config.sharding, abstract, seed=0,
                                     accumulation=1)
  batches = [mesh_lib.put_batch(job.data.rows(i), mesh) for i in range(turns.BATCHES)]
  freed_memory = host.FreedMemory()

  def step(i: int) -> float:
    nonlocal state
    state, metrics = update(state, batches[i % len(batches)])
    total, count = jax.device_get(metrics['mlm_loss'])
    freed_memory.after_step()
    return float(total / count)

  versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'flax'))
  turns.serve(step, versions)


if __name__ == '__main__':
  app.run(main)
