"""The programs of a run, compiled for devices that need not be here, without its data."""

import re
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
import numpy as np

from bert_jax import config as config_lib
from bert_jax.data.phases import Phase
from bert_jax.data.rows import Rows
from bert_jax.data.windows import Layout
from bert_jax.objectives import catalogue
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.objectives.masking import Vocabulary
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import initial
from bert_jax.tasks.finetuning_data import FineTuningData
from bert_jax.tasks.pretraining import Batch
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.task import Task
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib

# Only larger products than this many MiB become loops.
_WHOLE_GATHERS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Work(NamedTuple):
  """What a step of one phase of a run does."""

  task: Task
  batch: Any  # a tree of ShapeDtypeStructs
  phase: Phase  # its batch_size counts rows

  def with_model(self, config: ConfigDict) -> 'Work':
    """The same with the model that the config describes."""
    return self._replace(task=self.task.with_config(config_lib.bert_config(config.model)))


def pretraining(config: ConfigDict, phase: Phase) -> Work:
  """The step of a phase of pretraining, without a corpus."""
  masking = MaskingConfig(**config.masking)
  layout = Layout.create(phase.max_len, config.data.pack, config.data.sequences)
  b, p = phase.batch_size, layout.pairs
  tokens, pairs = (jax.ShapeDtypeStruct((b, n), jnp.int32) for n in (phase.max_len, p))
  one = jax.ShapeDtypeStruct((b,), jnp.int32)
  rows = Rows(tokens, tokens, tokens, tokens, pairs, pairs,
              jax.ShapeDtypeStruct((b, p), jnp.float32), one,
              tokens if masking.unit != 'token' else None)
  teacher = initial.teacher(config)
  objective = catalogue.create(config.objective, config.data.sequences,
                               config_lib.bert_config(config.model), teacher and teacher.config)
  size = config.model.vocab_size
  frequencies = np.ones(size, np.float32) if masking.random_by_frequency else None
  vocabulary = Vocabulary(size, special_ids=(0, 1, 2, 3, 4), mask_id=4, frequencies=frequencies)
  task = Pretraining(objective, masking, vocabulary, initial.frozen(teacher))
  rate = jax.ShapeDtypeStruct((b,), jnp.float32) if masking.final_rate else None
  return Work(task, Batch(rows, rate), phase)


def finetuning(data: FineTuningData, steps: int) -> Work:
  """The first step of fine-tuning on the examples of a run."""
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data.rows(0))
  rows, length = batch.inputs.ids.shape
  return Work(data.task, batch, Phase(steps, length, rows))


class OutOfMemory(Exception):
  """The compiler says that a program does not fit."""

  def __init__(self, used: float, limit: float):
    super().__init__(f'{used} of {limit} bytes')
    self.used, self.limit = used, limit


class Compiled(NamedTuple):
  """A program for each device, and what the compiler says of it."""

  program: jax.stages.Compiled
  seconds: float  # that it took to compile

  @property
  def memory(self) -> dict[str, int]:
    """Bytes on each device: arguments, temporaries, results (but for reused arguments), code."""
    m = self.program.memory_analysis()
    return {'arguments': m.argument_size_in_bytes, 'temporaries': m.temp_size_in_bytes,
            'results': m.output_size_in_bytes - m.alias_size_in_bytes,
            'code': m.generated_code_size_in_bytes}

  @property
  def flops(self) -> float:
    """FLOPs of each device, the body of a loop counted once."""
    return self.program.cost_analysis().get('flops', 0.0)

  @property
  def traffic(self) -> float:
    """Bytes to and from memory of each device, the body of a loop counted once."""
    return self.program.cost_analysis().get('bytes accessed', 0.0)


def _compile(lowered: jax.stages.Lowered, options: dict[str, str] | None = None) -> Compiled:
  began = time.monotonic()
  try:
    program = lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as e:
    found = re.search(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm', str(e)) or re.search(
        r'\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)', str(e))
    if not found:
      raise
    used, limit = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
    raise OutOfMemory(used, limit) from None
  return Compiled(program, time.monotonic() - began)


def _placed(work: Work, mesh: Mesh) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=mesh_lib.batch_sharding(mesh)), work.batch)


def train_step(work: Work, config: ConfigDict, mesh: Mesh, whole_gathers: bool = False) -> Compiled:
  """Compiles the training step.

  Args:
    work: of the phase.
    config: of the run.
    mesh: of the devices.
    whole_gathers: gather parameters before their products and not piece by piece in loops around
      them, as the TPU compiler prefers: it counts the body of a loop once.

  Raises:
    OutOfMemory: it does not fit.
  """
  settings = optimizer_lib.OptimizerConfig(**config.optimizer)
  # The schedule is data to the program: its length changes no figure.
  optimizer = optimizer_lib.make_optimizer(settings, max(settings.warmup_steps, 1) * 10)
  _, abstract = state_lib.make_init(work.task, optimizer, mesh, config.sharding)
  step = state_lib.make_train_step(work.task, optimizer, mesh, config.sharding, abstract,
                                   seed=config.seed, accumulation=settings.accumulation)
  on_tpu = mesh.devices.flat[0].platform == 'tpu'
  return _compile(step.lower(abstract, _placed(work, mesh)),
                  _WHOLE_GATHERS if whole_gathers and on_tpu else None)


def eval_step(work: Work, config: ConfigDict, mesh: Mesh) -> Compiled:
  """Compiles the evaluation step.

  Raises:
    OutOfMemory: it does not fit.
  """
  optimizer = optimizer_lib.make_optimizer(optimizer_lib.OptimizerConfig(), 100_000)
  _, abstract = state_lib.make_init(work.task, optimizer, mesh, config.sharding)
  step = state_lib.make_eval_step(work.task, mesh, config.sharding)
  return _compile(step.lower(abstract, _placed(work, mesh)))
