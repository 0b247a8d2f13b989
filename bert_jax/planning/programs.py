"""Compiles the programs of a run for devices that need not exist on this machine."""

from collections.abc import Sequence
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
import numpy as np
import optax

from bert_jax import config_fields
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phase
from bert_jax.data.rows import Rows
from bert_jax.data.tokens import Tokens
from bert_jax.model import architectures
from bert_jax.objectives import masking, objectives
from bert_jax.parallel import chip_figures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.planning import collectives, flops, traffic
from bert_jax.planning.collectives import Collective
from bert_jax.planning.traffic import Operation
from bert_jax.runs import initial
from bert_jax.runtime import platforms
from bert_jax.tasks import pretraining as pretraining_lib
from bert_jax.tasks.finetuning_data import FineTuningData
from bert_jax.tasks.task import Task
from bert_jax.training import lora
from bert_jax.training import state as state_lib

_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Work(NamedTuple):
  """The shapes of a step in one phase of a run."""

  task: Task
  batch: Any  # a tree of ShapeDtypeStructs
  phase: Phase  # batch_size counts rows


def pretraining(config: ConfigDict, phase: Phase) -> Work:
  """The work of a pretraining phase, from the config alone: it reads no corpus."""
  settings = masking.MaskingConfig(**config.masking)
  layout = RowLayout.create(phase.max_len, config.data.pack, config.data.sequences)
  b, p = phase.batch_size, layout.pairs
  tokens = jax.ShapeDtypeStruct((b, phase.max_len), jnp.int32)
  pairs = jax.ShapeDtypeStruct((b, p), jnp.int32)
  # These must be the shapes of a real batch. Otherwise the program would differ.
  causal = jax.ShapeDtypeStruct((b,), bool) if settings.causal_rows else None
  rows = Rows(Tokens(*[tokens] * 4, causal), starts=pairs, labels=pairs,
              pair_weights=jax.ShapeDtypeStruct((b, p), jnp.float32),
              row=jax.ShapeDtypeStruct((b,), jnp.int32),
              word_start=tokens if settings.unit != 'token' else None,
              mask_rate=(jax.ShapeDtypeStruct((b,), jnp.float32) if settings.final_rate
                         else None))
  teacher = initial.load_teacher(config)
  objective = objectives.create(
      config.objective, config.data.sequences, architectures.make_config(config.model),
      teacher and teacher.config)
  # Only the size of the vocabulary changes the cost; its content is arbitrary.
  size = config.model.vocab_size
  vocabulary = masking.Vocabulary(
      size, special_ids=(0, 1, 2, 3, 4), mask_id=4,
      frequencies=np.ones(size, np.float32) if settings.random_by_frequency else None)
  task = pretraining_lib.Pretraining(objective, settings, vocabulary,
                                     initial.teacher_params(teacher))
  return Work(lora.with_factors(task, config.lora), rows, phase)


def finetuning(config: ConfigDict, data: FineTuningData, steps: int) -> Work:
  """The work of a fine-tuning run, with the shapes of its largest batch."""
  # The whole batch, not the rows of this process: the devices may have several hosts.
  batches = data.train.batches
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                       batches.batch(batches.largest_step))
  rows, length = batch.tokens.ids.shape
  return Work(lora.with_factors(data.task, config.lora), batch,
              Phase(steps, length, rows))


class Figures(NamedTuple):
  """The compiler's figures for a program on each device.

  A loop body counts once, except in the FLOPs for a GPU, which come from the text.
  """

  memory: dict[str, int] | None = None  # bytes by kind; None = rejected by the compiler
  missing: float = 0.0  # bytes that a device lacks; 0 = it fits
  seconds: float = 0.0  # compile time
  flops: float = 0.0
  # Only for the training step of the run's own model:
  operations: Sequence[Operation] = ()
  of_products: float = 0.0  # bytes that matrix products move
  collectives: Sequence[Collective] = ()
  program: jax.stages.Compiled | None = None


def _compile(lowered: jax.stages.Lowered, device: jax.Device) -> Figures:
  """Compiles for devices like `device`."""
  began, limit = time.monotonic(), chip_figures.memory_limit(device)
  try:
    program = lowered.compile()
  except jax.errors.JaxRuntimeError as e:
    # The TPU compiler rejects a program that does not fit, in two wordings.
    match = (re.search(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm', str(e))
             or re.search(r'\(([\d.]+)([KMGT]?)\) exceeds available HBM '
                          r'\(([\d.]+)([KMGT]?)\)', str(e)))
    if not match:
      raise
    used, used_unit, available, unit = match.groups()
    lacks = float(used) * _UNITS[used_unit] - float(available) * _UNITS[unit]
    # The message rounds both figures, so they may be equal.
    return Figures(missing=max(lacks, 1.0))
  seconds, costs = time.monotonic() - began, program.cost_analysis()
  sizes = program.memory_analysis()
  # The new state aliases the donated one: only the rest of the results needs memory.
  memory = {'arguments': sizes.argument_size_in_bytes,
            'temporaries': sizes.temp_size_in_bytes,
            'results': sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
            'code': sizes.generated_code_size_in_bytes}
  # The GPU compiler counts nothing for a GPU that is not in this machine.
  counted = (flops.products(program.as_text()) if device.platform in platforms.GPU
             else costs.get('flops', 0.0))
  return Figures(memory, max(0.0, sum(memory.values()) - limit), seconds, flops=counted,
                 program=program)


def _batch(work: Work, mesh: Mesh) -> Any:
  sharding = mesh_lib.batch_sharding(mesh)
  return jax.tree.map(lambda x: x.update(sharding=sharding), work.batch)


def train_step(work: Work, config: ConfigDict, mesh: Mesh) -> Figures:
  """Compiles the training step."""
  # The length of the schedule changes no figure: it is only a constant in the program.
  steps = max(config.optimizer.warmup_steps, 1) * 10
  _, state, step = state_lib.make_programs(work.task, config, mesh, steps)
  return _compile(step.lower(state, _batch(work, mesh)), mesh.devices.flat[0])


def eval_step(work: Work, config: ConfigDict, mesh: Mesh) -> Figures:
  """Compiles the evaluation step."""
  # The program drops the moments: an evaluation does not read them.
  _, state = state_lib.make_init(work.task, optax.identity(), mesh, config.sharding)
  step = state_lib.make_eval_step(
      work.task, mesh, config.sharding, state_lib.eval_microbatches(config))
  return _compile(step.lower(state, _batch(work, mesh)), mesh.devices.flat[0])


class Program(NamedTuple):
  """One of the programs of a phase."""

  evaluates: bool = False  # True = the evaluation step, False = the training step
  layers: int = 0  # of a smaller, unrolled model; 0 = the run's own model


def compile_program(config: ConfigDict, work: Work, mesh: Mesh,
                    program: Program) -> Figures:
  """Compiles one program; returns its figures in picklable types."""
  if program.evaluates:
    return eval_step(work, config, mesh)._replace(program=None)
  # Unrolled and without accumulation, so that no loop hides FLOPs from the compiler.
  if program.layers:
    config = config_fields.changed(config, {
        'model.num_layers': program.layers, 'model.scan_unroll': program.layers,
        'optimizer.accumulation': 1})
    work = work._replace(task=work.task.with_config(architectures.make_config(config.model)))
  figures = train_step(work, config, mesh)
  if figures.program and not program.layers:
    text = figures.program.as_text()
    figures = figures._replace(operations=traffic.operations(text),
                               of_products=traffic.of_products(text),
                               collectives=collectives.read(text, mesh))
  return figures._replace(program=None)
