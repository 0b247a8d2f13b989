"""The largest batch that fits, for each choice of remat and of sharding."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.phases import Phase
from bert_jax.model.bert_config import REMAT
from bert_jax.parallel import sharding
from bert_jax.planning import programs

_MOST = 4096  # rows for each device of the batch axes: nobody trains with more


class Largest(NamedTuple):
  """What was found for one choice."""

  remat: str
  preset: str
  rows: int  # for each device of the batch axes; 0 = not even one fits
  memory: int  # bytes that the largest needs on each device


def _needs(config: ConfigDict, phase: Phase, mesh: Mesh, rows: int) -> int | None:
  """Bytes that a step with so many rows for each device needs; None if it does not fit."""
  phase = phase._replace(batch_size=rows * sharding.batch_divisor(mesh))
  try:
    return sum(programs.train_step(programs.pretraining(config, phase), config,
                                   mesh).memory.values())
  except programs.OutOfMemory:
    return None


def _largest(config: ConfigDict, phase: Phase, mesh: Mesh, limit: float) -> tuple[int, int]:
  """(rows, bytes), to within an eighth: doubled until it does not fit, then halved between."""
  def needs(rows):
    found = _needs(config, phase, mesh, rows)
    return found if found is not None and found <= limit else None

  fits, memory, rows = 0, 0, 8
  while rows <= _MOST and (found := needs(rows)):
    fits, memory, rows = rows, found, rows * 2
  low, high = fits, rows
  while high - low > max(low // 8, 1):
    middle = (low + high) // 2
    if found := needs(middle):
      low, memory = middle, found
    else:
      high = middle
  return low, memory


def search(config: ConfigDict, phase: Phase, mesh: Mesh, limit: float) -> Iterator[Largest]:
  """The largest batch of each choice, one after another.

  Args:
    config: of pretraining.
    phase: its rows are what is searched for.
    mesh: to compile for.
    limit: bytes of each device, where the compiler knows none; infinite = it does.
  """
  presets = ['dp', 'fsdp'] if mesh.shape['model'] == 1 else list(sharding.PRESETS)
  for preset in presets:
    for remat in REMAT:
      c = config.copy_and_resolve_references()
      c.update_from_flattened_dict({'sharding': preset, 'model.remat': remat,
                                    'optimizer.accumulation': 1})
      yield Largest(remat, preset, *_largest(c, phase, mesh, limit))
