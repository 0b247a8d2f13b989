"""Keeps the frozen base model of a LoRA run in the workdir, as a checkpoint of bert_jax.

The checkpoints of the run hold only the trained parameters. A resumed run must continue
bit for bit even if `init_from` is gone or has changed. So the base is written before the
first step, in the format of `convert`, with a fingerprint of every array. Loading rejects
a damaged base.
"""

import dataclasses

from etils import epath
import jax
from ml_collections import ConfigDict

from bert_jax.errors import require
from bert_jax.interop import native
from bert_jax.model.parameters import count_parameters
from bert_jax.runs import initial
from bert_jax.runtime import processes
from bert_jax.training import checkpoint, lora
from bert_jax.training.job import Job


def with_lora(job: Job, config: ConfigDict, workdir: epath.Path) -> Job:
  """Adds the LoRA factors of the config to a job; returns the same job for rank 0.

  The base comes from `job.start`; a resumed run reads it from its workdir.

  Raises:
    UserError: the run has no base, the kept base is damaged, or a target matches nothing.
  """
  if not config.lora.rank:
    return job
  folder, start = workdir / checkpoint.BASE, job.start
  require(bool(config.init_from) or folder.exists(),
          f'lora.rank={config.lora.rank} freezes a pretrained model: give its folder as '
          'init_from')
  require(bool(start) or folder.exists(), f'{workdir} holds a run with lora.rank=0 (now '
          f'{config.lora.rank}): that is another run, use another --workdir')
  # The heads are trained whole, so they are part of the start, not of the base.
  if start:
    base = dataclasses.replace(start, params=lora.base_of(start.params), task='', labels=(),
                               problem='')
    start = dataclasses.replace(start, params=lora.heads_of(start.params))
  else:
    base = initial.load_on_host(str(folder))
  task = lora.with_factors(job.task, config.lora, initial.boxed(base))
  trained = count_parameters(jax.eval_shape(task.init, jax.random.key(0)), base.config)
  line = (f'rank {config.lora.rank} on {", ".join(config.lora.targets)}: {trained:,} '
          'trained parameters')
  return dataclasses.replace(job, task=task, start=start, base=base, lora_line=line)


def save(job: Job, workdir: epath.Path):
  """Writes the base before the first checkpoint; all processes call this together."""
  if not (job.base and job.start):
    return
  folder = workdir / checkpoint.BASE
  # A run that was killed before its first checkpoint may leave an incomplete base.
  if not jax.process_index() and folder.exists():
    folder.rmtree()
  processes.barrier()  # the others wait for the deletion
  native.save(job.base, folder)
