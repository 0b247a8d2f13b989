"""Estimates what a run takes: does it fit, what limits its step, what does it cost as a whole."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.phases import Phase
from bert_jax.parallel import chip_figures
from bert_jax.planning import collectives, programs
from bert_jax.planning.collectives import Collective
from bert_jax.planning.programs import Program

_WEAK_SCALING_DEVICES = (1, 4, 16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
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
  # The counted step gathers parameters before their products; a run may gather them in loops.
  whole_gathers: bool
  traffic: float  # bytes to and from the memory of each device in a step
  collectives: Sequence[Collective]
  weak_scaling: dict[int, float]  # {devices: bytes sent} if the data axis and the rows grow
  model_flops: float  # the model's own on all devices; recomputation is not counted
  chip: chip_figures.Chip | None  # peaks of a device; None = unknown

  @property
  def tokens(self) -> int:
    """Positions in a step's rows."""
    return self.phase.batch_size * self.phase.max_len

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a step."""
    return sum(c.sent for c in self.collectives)

  @property
  def seconds(self) -> dict[str, float]:
    """The least time of a step for computing, for memory and for the network, each at its peak."""
    if not self.chip:
      return {}
    return {'compute': self.flops / self.chip.flops, 'memory': self.traffic / self.chip.bandwidth,
            'network': self.sent / self.chip.network}

  @property
  def step_seconds(self) -> float | None:
    """The roofline: a step cannot be faster than the slowest of these."""
    return max(self.seconds.values(), default=None)

  @property
  def mfu(self) -> float | None:
    """The share of the peak that the model's own FLOPs can reach."""
    if not self.chip or not self.step_seconds:
      return None
    return self.model_flops / (self.step_seconds * self.chip.flops * self.devices)

  @property
  def chip_hours(self) -> float | None:
    """The least chip-hours of all steps of the phase."""
    return self.step_seconds and self.phase.steps * self.step_seconds / 3600 * self.chips

  def as_json(self) -> dict[str, Any]:
    """Fields and properties in plain types."""
    plain = dataclasses.asdict(self)
    plain |= {'phase': self.phase._asdict(), 'chip': self.chip and self.chip._asdict(),
              'collectives': [{**c._asdict(), 'sent': c.sent} for c in self.collectives]}
    return plain | {name: getattr(self, name) for name in (
        'tokens', 'sent', 'seconds', 'step_seconds', 'mfu', 'chip_hours')}


def estimate(config: ConfigDict, work: programs.Work, mesh: Mesh,
             compile_all: Callable[[list[Program]], Sequence[programs.Figures]] | None = None
             ) -> Estimate:
  """Compiles the steps of one phase of a run for the devices of `mesh`.

  The compiler counts the body of a loop once. So the costs of a training step follow from those of
  two smaller models, of one and of two layers, unrolled and with whole gathers. (For BERT-large on
  v5e with 32 rows of 128 they give 61.6 GB of traffic, all layers unrolled 56.6: with few layers
  the core's own memory keeps more or less.)

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
  model_flops = work.task.flops_per_token(phase.max_len) * phase.batch_size * phase.max_len
  flops, counted, traffic, exchanged = 0.0, 0.0, 0.0, []
  if small.memory and large.memory:
    ratio = (config.model.num_layers - fewest) / (more - fewest)
    counted = small.flops + ratio * (large.flops - small.flops)
    traffic = small.traffic + ratio * (large.traffic - small.traffic)
    exchanged = collectives.extrapolate(small.collectives, large.collectives, 1 + ratio)
    flops = max(counted, model_flops / len(devices))
  return Estimate(
      phase=phase, devices=len(devices), chips=chip_figures.num_chips(devices),
      memory=training.memory, eval_memory=evaluation.memory,
      missing=max(training.missing, evaluation.missing),
      compile_seconds=(training.seconds, evaluation.seconds), flops=flops, counted_flops=counted,
      whole_gathers=devices[0].platform == 'tpu' and config.sharding.startswith('fsdp'),
      traffic=traffic, collectives=exchanged,
      weak_scaling=collectives.weak_scaling(exchanged, mesh, _WEAK_SCALING_DEVICES),
      model_flops=model_flops, chip=chip_figures.chip_of(devices))
