"""The bert_jax side of `benchmarks.train`: training steps as in the training loop.

  python -m benchmarks.train_steps --run=run.json

run.json has the argument `run` of `make_job`.
"""

import collections
import importlib.metadata
import json
import pathlib
import re
import tempfile
from typing import Any

from absl import app, flags
from etils import epath
import jax
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from benchmarks import turns
from bert_jax import config as config_lib
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import hlo, traffic
from bert_jax.runs import pretrain
from bert_jax.runtime import host
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from bert_jax.training.job import Job

_RUN = flags.DEFINE_string('run', None, 'JSON file.')
_PROFILE = flags.DEFINE_string('profile', None, 'Text file: the time of each module, at the end.')
_SHOWN = 60  # modules


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


def _kernel_name(name: str) -> str:
  """The name of an operation's kernel: `loop_add_fusion_2` for `loop_add_fusion.2`."""
  return re.sub('[^A-Za-z0-9]+', '_', name)


def modules(folder: pathlib.Path, program: str) -> list[str]:
  """The share of time of each module and operation in a trace, the longest first."""
  computations = hlo.Module(program).computations.values()
  instructions = {_kernel_name(x.name): x for y in computations for x in y.values()}
  times, counts = collections.Counter(), collections.Counter()
  for path in folder.glob('**/*.xplane.pb'):
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      for line in plane.lines:
        for event in line.events:
          # Within a CUDA graph, `hlo_op` names the graph, and the event names the kernel.
          names = [value for key, value in event.stats if key == 'hlo_op'] + [event.name]
          known = [instructions[x] for x in map(_kernel_name, names) if x in instructions]
          if known:
            place = traffic.parse_op_name(known[0])
          elif plane.name.startswith('/device:GPU'):
            place = event.name[:60],  # a kernel of a library
          else:
            continue
          times[place] += event.duration_ns
          counts[place] += 1
  total = sum(times.values()) or 1
  return [f'{100 * ns / total:5.1f}%  {ns / 1e6:8.3f} ms  {counts[place]:5}  {"  ".join(place)}'
          for place, ns in times.most_common(_SHOWN)]


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
  program = update.lower(state, batches[0]).compile()
  freed_memory, is_accelerator = host.FreedMemory(), jax.default_backend() != 'cpu'

  def step(i: int) -> jax.Array:
    nonlocal state
    state, metrics = program(state, batches[i % len(batches)])
    if not is_accelerator:
      jax.block_until_ready(metrics)
      freed_memory.after_step()
    total, count = metrics['mlm_loss']
    return total / count

  versions = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'flax'))
  turns.serve(step, versions, warm=2 if is_accelerator else 0, runs_ahead=is_accelerator)
  if _PROFILE.value:
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        float(step(0))
      text = '\n'.join(modules(pathlib.Path(folder), program.as_text()))
      epath.Path(_PROFILE.value).write_text(f'One step\n{text}\n')


if __name__ == '__main__':
  app.run(main)
