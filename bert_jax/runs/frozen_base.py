"""The frozen model of a LoRA run: kept once in the workdir, as a checkpoint of bert_jax.

A run must go on to the bit although `init_from` is gone or has changed, and its checkpoints hold
the trained parameters alone. So the base is written before the first step, with the fingerprint of
every array, in the format that `convert` writes: it is read by the same code, which refuses a
damaged one.
"""

import dataclasses

from etils import epath
import jax
from ml_collections import ConfigDict

from bert_jax.errors import require
from bert_jax.interop import native
from bert_jax.model.heads import count_parameters
from bert_jax.runs import initial
from bert_jax.runtime import processes
from bert_jax.training import checkpoint, lora
from bert_jax.training.job import Job


def adapt(job: Job, config: ConfigDict, workdir: epath.Path) -> Job:
  """The job with the factors of the config group `lora` on its base; itself for a rank of 0.

  The base comes from `job.start`; a run that goes on reads it from its workdir. Raises UserError
  if neither exists, the latter is damaged, or a target matches nothing.
  """
  if not config.lora.rank:
    return job
  folder, start = workdir / checkpoint.BASE, job.start
  require(bool(config.init_from) or folder.exists(),
          f'lora.rank={config.lora.rank} freezes a pretrained model: give its folder as init_from')
  require(bool(start) or folder.exists(), f'{workdir} holds a run with lora.rank=0 (now '
          f'{config.lora.rank}): that is another run, use another --workdir')
  if start:
    base = dataclasses.replace(start, params=lora.base(start.params), task='', labels=(),
                               problem='')
    start = dataclasses.replace(start, params=lora.heads(start.params))
  else:
    base = initial.load_on_host(str(folder))
  task = lora.adapt(job.task, config.lora, initial.boxed(base))
  trained = count_parameters(jax.eval_shape(task.init, jax.random.key(0)), base.config)
  adapter = (f'rank {config.lora.rank} on {", ".join(config.lora.targets)}: {trained:,} parameters '
             'are trained')
  return dataclasses.replace(job, task=task, start=start, base=base, adapter=adapter)


def save(job: Job, workdir: epath.Path):
  """Writes the base of a run that has no checkpoint yet; all processes do this together."""
  if not (job.base and job.start):
    return
  folder = workdir / checkpoint.BASE
  if not jax.process_index() and folder.exists():  # of a run that was killed before it saved
    folder.rmtree()
  processes.anywhere(False)  # the others wait here until it is deleted
  native.save(job.base, folder)
