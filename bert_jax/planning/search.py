"""Finds the largest batch that fits, for each choice of sharding and of remat."""

from collections.abc import Callable, Iterator
import functools
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.phases import Phase
from bert_jax.model.bert_config import REMAT
from bert_jax.parallel import sharding
from bert_jax.planning import programs

_MOST_ROWS = 4096  # for each device of the batch axes: nobody trains with more


class Largest(NamedTuple):
  """The largest batch of one choice."""

  remat: str
  preset: str
  rows: int  # for each device of the batch axes; 0 = not even one fits
  memory: int  # bytes that it needs on each device


def _needs(config: ConfigDict, phase: Phase, mesh: Mesh, rows: int) -> int | None:
  """Bytes that a step with so many rows for each device needs; None if it does not fit."""
  phase = phase._replace(batch_size=rows * sharding.batch_divisor(mesh))
  figures = programs.train_step(programs.pretraining(config, phase), config, mesh)
  return None if figures.missing else sum(figures.memory.values())


def _largest(needs: Callable[[int], int | None]) -> tuple[int, int]:
  """(rows, bytes), to within an eighth: doubles until it does not fit, then bisects."""
  fits, memory, rows = 0, 0, 8
  while rows <= _MOST_ROWS and (needed := needs(rows)):
    fits, memory, rows = rows, needed, rows * 2
  while rows - fits > max(fits // 8, 1):
    middle = (fits + rows) // 2
    if needed := needs(middle):
      fits, memory = middle, needed
    else:
      rows = middle
  return fits, memory


def search(config: ConfigDict, phase: Phase, mesh: Mesh) -> Iterator[Largest]:
  """The largest batch of each choice, one after another; the rows of `phase` do not count."""
  presets = ['dp', 'fsdp'] if mesh.shape['model'] == 1 else list(sharding.PRESETS)
  for preset in presets:
    for remat in REMAT:
      c = config.copy_and_resolve_references()
      c.update_from_flattened_dict({'sharding': preset, 'model.remat': remat,
                                    'optimizer.accumulation': 1})
      yield Largest(remat, preset, *_largest(functools.partial(_needs, c, phase, mesh)))
