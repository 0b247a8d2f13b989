"""Estimates what a run takes: does it fit, what limits its step, what does it cost as a whole."""

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

# Upper bound on the rows for each device of the batch axes: nobody trains with more.
_MOST_ROWS = 4096
_WEAK_SCALING_DEVICES = (1, 4, 16, 64, 256, 1024)


class Estimate(NamedTuple):
  """One phase of a run on one mesh. Sizes are bytes on each device, times are seconds."""

  phase: Phase
  devices: int  # of the mesh
  chips: int  # that the devices are on
  # Memory of the training and of the evaluation step; None = does not fit.
  memory: dict[str, int] | None
  eval_memory: dict[str, int] | None
  missing: float  # bytes by which the larger step does not fit; 0 = both fit
  compile_seconds: tuple[float, float]  # of the training and the evaluation step
  flops: float  # of a step on each device; at least the model's own share
  counted_flops: float  # those that the compiler counts
  operations: Sequence[Operation]  # of the training step, those that move most memory first
  traffic: float  # bytes to and from the memory of each device in a step
  collectives: Sequence[Collective]
  weak_scaling: dict[int, float]  # {devices: bytes sent} if the data axis and the rows grow
  model_flops: float  # the model's own on all devices; recomputation is not counted
  chip: chip_figures.Chip | None  # peaks of a device; None = unknown
  tokens: int  # positions in a step's rows
  sent: float  # bytes that a device sends in a step
  # The rest follows from the peaks of the chip: {} or None if they are unknown.
  seconds: dict[str, float]  # least times of a step for computing, for memory and for the network
  step_seconds: float | None  # the roofline: a step cannot be faster than the slowest of these
  mfu: float | None  # share of the peak that the model's own FLOPs can reach
  chip_hours: float | None  # least chip-hours of all steps of the phase

  def as_json(self) -> dict[str, Any]:
    """The fields in plain types."""
    return self._asdict() | {
        'phase': self.phase._asdict(), 'chip': self.chip and self.chip._asdict(),
        'collectives': [{**c._asdict(), 'sent': c.sent} for c in self.collectives],
        'operations': [operation._asdict() for operation in self.operations]}


def estimate(config: ConfigDict, work: programs.Work, mesh: Mesh,
             compile_all: Callable[[list[Program]], Sequence[programs.Figures]] | None = None
             ) -> Estimate:
  """Compiles the steps of one phase of a run for the devices of `mesh`.

  The compiler counts FLOPs in a loop once. So the FLOPs of a training step follow from those of two
  smaller models, of one and of two layers, unrolled. Memory traffic and collectives are counted in
  the step itself.

  `compile_all` gives the figures of programs; None = one after another in this process.
  """
  fewest, more = work.task.model.config.fewest_layers
  steps = [Program(layers=more), Program(layers=fewest), Program(), Program(evaluates=True)]
  if compile_all:
    large, small, training, evaluation = compile_all(steps)  # the longest first
  else:
    large, small, training, evaluation = (
        programs.compile_program(config, work, mesh, step) for step in steps)
  phase, devices = work.phase, list(mesh.devices.flat)
  chip, chips = chip_figures.chip_of(devices), chip_figures.num_chips(devices)
  tokens = phase.batch_size * phase.max_len
  model_flops = work.task.flops_per_token(phase.max_len) * tokens
  flops, counted, moved, exchanged = 0.0, 0.0, 0.0, []
  if small.memory and large.memory and training.memory:
    ratio = (config.model.num_layers - fewest) / (more - fewest)
    counted = small.flops + ratio * (large.flops - small.flops)
    flops = max(counted, model_flops / len(devices))
    moved, exchanged = traffic.total(training.operations), training.collectives
  sent = sum(c.sent for c in exchanged)
  seconds, step_seconds, mfu, chip_hours = {}, None, None, None
  if chip:
    seconds = {'compute': flops / chip.flops, 'memory': moved / chip.bandwidth,
               'network': sent / chip.network}
    step_seconds = max(seconds.values())
    chip_hours = phase.steps * step_seconds / 3600 * chips
  if step_seconds:
    mfu = model_flops / (step_seconds * chip.flops * len(devices))
  return Estimate(
      phase=phase, devices=len(devices), chips=chips, memory=training.memory,
      eval_memory=evaluation.memory, missing=max(training.missing, evaluation.missing),
      compile_seconds=(training.seconds, evaluation.seconds), flops=flops, counted_flops=counted,
      operations=training.operations, traffic=moved, collectives=exchanged,
      weak_scaling=collectives.weak_scaling(exchanged, mesh, _WEAK_SCALING_DEVICES),
      model_flops=model_flops, chip=chip, tokens=tokens, sent=sent, seconds=seconds,
      step_seconds=step_seconds, mfu=mfu, chip_hours=chip_hours)


class Largest(NamedTuple):
  """The largest batch of one choice."""

  remat: str
  preset: str
  rows: int  # for each device of the batch axes; 0 = not even one fits
  memory: int  # bytes that it needs on each device


def _needs(config: ConfigDict, phase: Phase, mesh: Mesh, rows: int) -> int | None:
  """Bytes that a step needs with so many rows for each device and microbatch; None = no room."""
  phase = phase._replace(
      batch_size=rows * sharding.batch_divisor(mesh) * config.optimizer.accumulation)
  figures = programs.train_step(programs.pretraining(config, phase), config, mesh)
  return None if figures.missing else sum(figures.memory.values())


def _largest(needs: Callable[[int], int | None]) -> tuple[int, int]:
  """(rows, bytes), to within an eighth: doubles until it does not fit, then bisects.

  It stops at `_MOST_ROWS`.
  """
  fits, memory, rows = 0, 0, 8
  while rows <= _MOST_ROWS and (needed := needs(rows)):
    fits, memory, rows = rows, needed, rows * 2
  while rows <= _MOST_ROWS and rows - fits > max(fits // 8, 1):
    middle = (fits + rows) // 2
    if needed := needs(middle):
      fits, memory = middle, needed
    else:
      rows = middle
  return fits, memory


def largest_rows(config: ConfigDict, phase: Phase, mesh: Mesh) -> tuple[int, int]:
  """(rows, bytes) of the largest batch: rows for each device of the batch axes and microbatch.

  0 rows = not even one fits.
  """
  return _largest(functools.partial(_needs, config, phase, mesh))


def search(config: ConfigDict, phase: Phase, mesh: Mesh) -> Iterator[Largest]:
  """The largest batch of each choice, one after another; the rows of `phase` do not count."""
  presets = ['dp', 'fsdp'] if mesh.shape['model'] == 1 else list(sharding.PRESETS)
  for preset in presets:
    for remat in REMAT:
      c = config_fields.changed(config, {'sharding': preset, 'model.remat': remat,
                                         'optimizer.accumulation': 1})
      yield Largest(remat, preset, *largest_rows(c, phase, mesh))
