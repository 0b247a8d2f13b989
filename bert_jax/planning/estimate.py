"""What a run would take: does it fit, what bounds its step, what does the whole of it cost."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.phases import Phase
from bert_jax.model import architectures
from bert_jax.parallel import topology
from bert_jax.parallel.topology import Chip
from bert_jax.planning import collectives
from bert_jax.planning import programs
from bert_jax.planning.collectives import Collective
from bert_jax.planning.programs import Work

_WEAK_SCALING = (1, 4, 16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """One phase of a run on one mesh. Sizes are bytes on each device, times seconds.

  Attributes:
    phase: steps, length and rows.
    devices: of the mesh; `chips` that they are on.
    memory: what the training step needs by the compiler's own figures; None if it does not fit.
    eval_memory: the same of the evaluation step.
    missing: bytes by which the larger of them does not fit; 0 = both fit.
    compile_seconds: of the training and the evaluation step.
    flops: of a step on each device; at least what the model asks for.
    counted_flops: what the compiler counts of them.
    whole_gathers: the count is of a step that gathers parameters before their products; a run may
      gather them in loops.
    traffic: bytes to and from its memory.
    collectives: what it exchanges with others.
    weak_scaling: {devices: bytes sent} if the data axis grows and the rows with it.
    model_flops: of a step on all devices that the model asks for; none for recomputation.
    chip: what a device can do; None if that is not known.
  """

  phase: Phase
  devices: int
  chips: int
  memory: dict[str, int] | None
  eval_memory: dict[str, int] | None
  missing: float
  compile_seconds: tuple[float, float]
  flops: float
  counted_flops: float
  whole_gathers: bool
  traffic: float
  collectives: Sequence[Collective]
  weak_scaling: dict[int, float]
  model_flops: float
  chip: Chip | None

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
    """What a step takes at least for computing, for memory and for the network, if at its peak."""
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
    """Of all steps of the phase, at least."""
    return self.step_seconds and self.phase.steps * self.step_seconds / 3600 * self.chips

  def as_json(self) -> dict[str, Any]:
    """All of it in plain types."""
    plain = dataclasses.asdict(self)
    plain |= {'phase': self.phase._asdict(), 'chip': self.chip and self.chip._asdict(),
              'collectives': [{**c._asdict(), 'sent': c.sent} for c in self.collectives]}
    return plain | {name: getattr(self, name) for name in (
        'tokens', 'sent', 'seconds', 'step_seconds', 'mfu', 'chip_hours')}


def _with_layers(config: ConfigDict, layers: int) -> ConfigDict:
  """The config with so few layers, unrolled, and without microbatches: its costs can be read."""
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict({
      'model.num_layers': layers, 'model.scan_unroll': layers, 'optimizer.accumulation': 1})
  return config


class Program(NamedTuple):
  """Which of the programs of a phase."""

  evaluates: bool = False  # the evaluation step; else the training step
  layers: int = 0  # with so few, unrolled; 0 = as the config says


class Figures(NamedTuple):
  """What the compiler says of a program, in plain types."""

  memory: dict[str, int] | None  # None = it does not fit
  missing: float  # bytes by which it does not
  seconds: float  # that it took to compile
  flops: float
  traffic: float
  collectives: list[Collective]


def figures(config: ConfigDict, work: Work, mesh: Mesh, program: Program) -> Figures:
  """Compiles one program of a phase."""
  if program.layers:
    config = _with_layers(config, program.layers)
    work = work.with_model(config)
  try:
    if program.evaluates:
      found = programs.eval_step(work, config, mesh)
    else:
      found = programs.train_step(work, config, mesh, whole_gathers=bool(program.layers))
  except programs.OutOfMemory as e:
    return Figures(None, e.used - e.limit, 0.0, 0.0, 0.0, [])
  # Only the TPU compiler knows what there is.
  missing = max(0.0, sum(found.memory.values()) - topology.memory_limit(mesh.devices.flat[0]))
  # The text of a whole program is long to read, and only those of few layers are asked for it.
  exchanged = collectives.read(found.program.as_text(), mesh) if program.layers else []
  return Figures(found.memory, missing, found.seconds, found.flops, found.traffic, exchanged)


def _costs(layers: int, fewest: tuple[int, int], one: Figures,
           two: Figures) -> tuple[float, float, list[Collective]]:
  """FLOPs, memory traffic and collectives of a training step on each device.

  The compiler counts the body of a loop once: they follow from one and two layers, unrolled, with
  whole gathers. (Of
  BERT-large on v5e with 32 rows of 128 the traffic comes out at 61.6 GB, all layers unrolled have
  56.6: few layers keep more or less in the core's memory.)
  """
  # 1 for the layers of `one`, 2 for those of `two`.
  times = 1 + (layers - fewest[0]) / (fewest[1] - fewest[0])
  flops, traffic = (getattr(one, name) + (times - 1) * (getattr(two, name) - getattr(one, name))
                    for name in ('flops', 'traffic'))
  return flops, traffic, collectives.extrapolate(one.collectives, two.collectives, times)


def estimate(config: ConfigDict, work: Work, mesh: Mesh,
             compiled: Callable[[Sequence[Program]], Sequence[Figures]] | None = None) -> Estimate:
  """Compiles the steps of one phase of a run for the devices of `mesh`.

  Args:
    config: of the run.
    work: of the phase.
    mesh: of the devices.
    compiled: gives the figures of its programs; None = one after another in this process.
  """
  fewest = architectures.fewest_layers(work.task.model.config)
  wanted = [Program(layers=fewest[1]), Program(layers=fewest[0]), Program(),
            Program(evaluates=True)]  # the longest first
  two, one, training, evaluation = compiled(wanted) if compiled else [
      figures(config, work, mesh, program) for program in wanted]
  phase, devices = work.phase, list(mesh.devices.flat)
  whole_gathers = devices[0].platform == 'tpu' and config.sharding.startswith('fsdp')
  model_flops = work.task.flops_per_token(phase.max_len) * phase.batch_size * phase.max_len
  flops, counted, traffic, exchanged = 0.0, 0.0, 0.0, []
  if one.memory and two.memory:  # else not even two layers fit
    counted, traffic, exchanged = _costs(config.model.num_layers, fewest, one, two)
    flops = max(counted, model_flops / len(devices))
  return Estimate(
      phase, len(devices), topology.num_chips(devices), training.memory, evaluation.memory,
      max(training.missing, evaluation.missing), (training.seconds, evaluation.seconds), flops,
      counted, whole_gathers, traffic, exchanged,
      collectives.weak_scaling(exchanged, mesh, _WEAK_SCALING), model_flops,
      topology.chip_of(devices))
