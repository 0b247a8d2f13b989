"""Phases of a run: consecutive steps with one row length and batch size."""

from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.errors import require

MOST_STEPS = 2**31 - 1  # the step is an int32


class Phase(NamedTuple):
  """Consecutive steps with one row length and batch size."""

  steps: int
  max_len: int  # L
  batch_size: int  # rows over all devices


def check(phases: Sequence[Sequence[int]]):
  """Raises UserError for malformed phases, or for more than MOST_STEPS steps."""
  for phase in phases:
    require(isinstance(phase, Sequence) and len(phase) == 3
            and all(isinstance(n, int) and n > 0 for n in phase),
            f'phases={tuple(phases)}: each phase is three positive integers (steps, '
            "max_len, batch_size), as in '((900, 128, 32), (100, 512, 32))'")
  total = sum(steps for steps, _, _ in phases)
  require(total <= MOST_STEPS,
          f'phases={tuple(phases)}: the steps sum to {total}, a run has at most '
          f'{MOST_STEPS}: give fewer')


def scaled(phases: Sequence[Sequence[int]],
           train_steps: int) -> tuple[tuple[int, int, int], ...]:
  """Scales phases to a total of `train_steps` steps, by largest remainder.

  Each phase keeps at least one step. If there are more phases than steps, only the
  longest phases stay.
  """
  longest = sorted(range(len(phases)), key=lambda i: -phases[i][0])[:train_steps]
  phases = [phases[i] for i in sorted(longest)]
  total = sum(steps for steps, _, _ in phases)
  # Exact integers: floats would round differently for large step counts.
  shares = [divmod(steps * train_steps, total) for steps, _, _ in phases]
  counts = [max(1, whole) for whole, _ in shares]
  for i in sorted(range(len(phases)), key=lambda i: -shares[i][1]):
    counts[i] += sum(counts) < train_steps
  # Phases below one step were rounded up: the longest phases give up steps for them.
  while sum(counts) > train_steps:
    counts[counts.index(max(counts))] -= 1
  return tuple((count, *phase[1:]) for count, phase in zip(counts, phases))


class Phases(tuple[Phase, ...]):
  """The phases of a run, in order."""

  @classmethod
  def create(cls, phases: Sequence[Sequence[int]], train_steps: int, max_len: int,
             batch_size: int) -> 'Phases':
    """Makes the phases of a config, or one phase for the whole run.

    Raises:
      UserError: a phase is malformed, or the steps do not sum to `train_steps`.
    """
    check(phases)
    phases = phases or ((train_steps, max_len, batch_size),)
    total = sum(phase[0] for phase in phases)
    require(total == train_steps,
            f'the steps of phases={tuple(phases)} sum to {total}, not to '
            f'train_steps={train_steps}')
    return cls(Phase(*phase) for phase in phases)

  def locate(self, step: int) -> tuple[int, Phase, int]:
    """(phase index, phase, steps into it) of a step; the last phase has no end."""
    for index, phase in enumerate(self[:-1]):
      if step < phase.steps:
        return index, phase, step
      step -= phase.steps
    return len(self) - 1, self[-1], step
