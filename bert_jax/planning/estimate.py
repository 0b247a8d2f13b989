"""Estimates a run: whether it fits, what limits its step, what the whole run costs."""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import config_fields
from bert_jax.data.phases import Phase
from bert_jax.model.bert_config import REMAT
from bert_jax.parallel import chip_figures, sharding
from bert_jax.planning import collectives, programs, traffic
from bert_jax.planning.collectives import Collective
from bert_jax.planning.programs import Program
from bert_jax.planning.traffic import Operation
from bert_jax.runtime import platforms

# The search stops at this number of rows for each device of the batch axes: nobody trains
# with more.
_MOST_ROWS = 4096
_WEAK_SCALING_DEVICES = (1, 4, 16, 64, 256, 1024)


class Estimate(NamedTuple):
  """One phase of a run on one mesh. Sizes are bytes on each device, times are seconds."""

  phase: Phase
  devices: int  # of the mesh
  chips: int  # that hold the devices
  # Memory of the training and of the evaluation step; None = does not fit.
  memory: dict[str, int] | None
  eval_memory: dict[str, int] | None
  missing: float  # bytes that a device lacks for the larger of the two steps; 0 = both fit
  compile_seconds: tuple[float, float]  # of the training and the evaluation step
  flops: float  # of a step on each device; at least its share of `model_flops`
  counted_flops: float  # the FLOPs that the compiler counts
  operations: Sequence[Operation]  # of the training step, by memory traffic
  traffic: float  # bytes to and from the memory of each device in a step
  collectives: Sequence[Collective]
  weak_scaling: dict[int, float]  # {devices: bytes sent}, see collectives.weak_scaling
  model_flops: float  # of a step on all devices, without recomputation
  chip: chip_figures.Chip | None  # peak rates of a device; None = unknown
  limit: float | None  # bytes of a device's memory that JAX uses; None = unknown
  tokens: int  # positions in the rows of a step
  sent: float  # bytes that a device sends in a step
  # The rest follows from the peak rates: {} or None if they are unknown.
  seconds: dict[str, float]  # lower bounds of a step: compute, memory, network
  step_seconds: float | None  # the roofline: the largest of these bounds
  mfu: float | None  # model FLOPs utilization at the roofline, a fraction
  expected: float | None  # seconds of a step on a GPU, see `_expected_seconds`
  chip_hours: float | None  # lower bound for all steps of the phase

  def as_json(self) -> dict[str, Any]:
    """The fields in plain types."""
    return self._asdict() | {
        'phase': self.phase._asdict(), 'chip': self.chip and self.chip._asdict(),
        'collectives': [{**c._asdict(), 'sent': c.sent} for c in self.collectives],
        'operations': [operation._asdict() for operation in self.operations]}


def _extrapolated(large: programs.Figures, small: programs.Figures, ratio: float) -> float:
  """Extrapolates FLOPs to N layers: `ratio` = (N - N_small) / (N_large - N_small)."""
  return small.flops + ratio * (large.flops - small.flops)


def estimate(
    config: ConfigDict, work: programs.Work, mesh: Mesh,
    compile_all: Callable[[list[Program]], Sequence[programs.Figures]] | None = None,
) -> Estimate:
  """Compiles the steps of one phase of a run for the devices of `mesh`.

  The TPU compiler counts the body of a loop once. So the FLOPs of a training step are
  extrapolated from two smaller unrolled models, for example with one and with two layers.
  Memory traffic, collectives and the FLOPs on a GPU are counted in the step itself.

  Args:
    config: the config of the run.
    work: the shapes of one phase.
    mesh: the devices, which need not exist here.
    compile_all: compiles programs; None = one after another in this process.
  """
  fewest, more = work.task.model.config.fewest_layers
  phase, devices = work.phase, list(mesh.devices.flat)
  is_gpu = devices[0].platform in platforms.GPU
  # The slowest compilation first, so that parallel compilers finish early.
  steps = [Program(), Program(evaluates=True)]
  if not is_gpu:
    steps = [Program(layers=more), Program(layers=fewest), *steps]
  if compile_all:
    *smaller, training, evaluation = compile_all(steps)
  else:
    *smaller, training, evaluation = (
        programs.compile_program(config, work, mesh, step) for step in steps)
  chip, chips = chip_figures.chip_of(devices), chip_figures.num_chips(devices)
  tokens = phase.batch_size * phase.max_len
  model_flops = work.task.flops_per_token(phase.max_len) * tokens
  flops, counted, moved, exchanged = 0.0, 0.0, 0.0, []
  if training.memory and all(figures.memory for figures in smaller):
    counted = training.flops if is_gpu else _extrapolated(
        *smaller, (config.model.num_layers - fewest) / (more - fewest))
    # The compiler counts no FLOPs inside kernels, such as attention.
    flops = max(counted, model_flops / len(devices))
    moved, exchanged = traffic.total(training.operations), training.collectives
  sent = sum(c.sent for c in exchanged)
  seconds, step_seconds, mfu, chip_hours, expected = {}, None, None, None, None
  if chip and moved and is_gpu:
    expected = _expected_seconds(chip, flops, moved - training.of_products)
  if chip:
    seconds = {'compute': flops / chip.flops, 'memory': moved / chip.bandwidth,
               'network': sent / chip_figures.network(devices)}
    step_seconds = max(seconds.values())
    chip_hours = phase.steps * step_seconds / 3600 * chips
  if step_seconds:
    mfu = model_flops / (step_seconds * chip.flops * len(devices))
  return Estimate(
      phase=phase, devices=len(devices), chips=chips, memory=training.memory,
      eval_memory=evaluation.memory, missing=max(training.missing, evaluation.missing),
      compile_seconds=(training.seconds, evaluation.seconds), flops=flops,
      counted_flops=counted, operations=training.operations, traffic=moved,
      collectives=exchanged,
      weak_scaling=collectives.weak_scaling(exchanged, mesh, _WEAK_SCALING_DEVICES),
      model_flops=model_flops, chip=chip,
      limit=chip and min(chip.memory, chip_figures.memory_limit(devices[0])),
      tokens=tokens, sent=sent, seconds=seconds,
      step_seconds=step_seconds, mfu=mfu, expected=expected, chip_hours=chip_hours)


def _expected_seconds(chip: chip_figures.Chip, flops: float, memory: float) -> float:
  """Estimates the seconds of a step on a GPU by a rule of thumb.

  Compute limits the products, and memory limits everything else. The shares of the peak
  rates and the factor come from an H200. There, without a scan, the steps of BERT-base
  and BERT-large in XLA were within 5% of this estimate. With the Triton kernels, base in
  rows of 128 is 9% faster than the estimate, and large in rows of 512 is 5% slower.

  Args:
    chip: the GPU.
    flops: of a step.
    memory: bytes that a step moves, without the products.
  """
  return 1.2 * (flops / (0.71 * chip.flops) + memory / (0.875 * chip.bandwidth))


class Largest(NamedTuple):
  """The largest batch for one choice of remat and sharding."""

  remat: str
  preset: str
  rows: int  # for each device of the batch axes; 0 = not even one fits
  memory: int  # bytes that this batch needs on each device


def _needs(config: ConfigDict, phase: Phase, mesh: Mesh, rows: int) -> int | None:
  """Bytes of a step with `rows` per device and microbatch; None = it does not fit."""
  phase = phase._replace(
      batch_size=rows * sharding.batch_divisor(mesh) * config.optimizer.accumulation)
  figures = programs.train_step(programs.pretraining(config, phase), config, mesh)
  return None if figures.missing else sum(figures.memory.values())


def largest_rows(config: ConfigDict, phase: Phase, mesh: Mesh) -> tuple[int, int]:
  """(rows, bytes) of the largest batch, per device of the batch axes and microbatch.

  Doubles the rows until they do not fit, at most to `_MOST_ROWS`, then bisects. 0 rows =
  not even one row fits.
  """
  needs = functools.partial(_needs, config, phase, mesh)
  fits, memory, rows = 0, 0, 8
  while rows <= _MOST_ROWS and (needed := needs(rows)):
    fits, memory, rows = rows, needed, rows * 2
  # To within an eighth: every probe is a compilation of seconds to minutes.
  while rows <= _MOST_ROWS and rows - fits > max(fits // 8, 1):
    middle = (fits + rows) // 2
    if needed := needs(middle):
      fits, memory = middle, needed
    else:
      rows = middle
  return fits, memory


def search(config: ConfigDict, phase: Phase, mesh: Mesh) -> Iterator[Largest]:
  """Yields the largest batch of each choice; ignores the batch size of `phase`."""
  # Without a model axis, tp is dp and fsdp_tp is fsdp.
  presets = ['dp', 'fsdp'] if mesh.shape['model'] == 1 else list(sharding.PRESETS)
  for preset in presets:
    for remat in REMAT:
      c = config_fields.changed(config, {'sharding': preset, 'model.remat': remat,
                                         'optimizer.accumulation': 1})
      yield Largest(remat, preset, *largest_rows(c, phase, mesh))
