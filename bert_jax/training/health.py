"""What looks wrong with a run: each finding once, with its likely causes.

A step whose loss or gradient is not finite changes nothing (`state.make_train_step`); here such
steps are counted, and too many in a row end the run.
"""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math
import statistics
import time
from typing import Any

from bert_jax.errors import Failed

MOST_SKIPPED = 5  # in a row
_LINES = 20  # that a spike is compared with
_SPIKE = 0.5  # nat above their median that may be chance, whatever their deviation
_SETTLED = 60  # seconds, after which the first windows of rows are made and files are cached
_WAITED_LONG = 0.05  # share of the time without rows that is worth a word
_EARLY = 1 / 3  # of a run, after which an objective should have begun to learn
_SHORT = 1000  # steps of a run that is expected to learn something
_LEARNT = 0.05  # nat under the entropy of the token frequencies that are worth calling learning
_CHANCE = 0.55  # accuracy of the pair objective that may be chance


class Health:
  """Watches the steps, the lines and the evaluations of one run."""

  def __init__(self, train_steps: int):
    self._train_steps, self._began = train_steps, time.monotonic()
    self._skipped = 0  # in a row
    self._losses = collections.deque(maxlen=_LINES)
    self._said = set()

  def _once(self, finding: str, text: str) -> Iterator[str]:
    if finding not in self._said:
      self._said.add(finding)
      yield text

  def steps(self, first: int, skipped: Sequence[bool]) -> int | None:
    """Counts the steps that changed nothing, `first` and those after it; the one to end at."""
    for step, was_skipped in enumerate(skipped, first):
      self._skipped = self._skipped + 1 if was_skipped else 0
      if self._skipped == MOST_SKIPPED:
        return step
    return None

  def line(self, metrics: Mapping[str, Any], waited: Sequence[float]) -> Iterator[str]:
    """Findings in a line of training metrics.

    Args:
      metrics: of the line.
      waited: share of the time for which the device of each process waited for rows.
    """
    if metrics['skipped_steps']:
      yield from self._once(
          'skipped', f'{metrics["skipped_steps"]} steps had a loss or gradient that is not finite '
          f'and changed nothing; {MOST_SKIPPED} in a row end the run. Likely: '
          'optimizer.learning_rate is too high, the warmup too short, or the text broken')
    loss = metrics['loss']
    finite = loss is not None and math.isfinite(loss)
    if len(self._losses) >= _LINES // 2 and finite:
      median = statistics.median(self._losses)
      deviation = statistics.median(abs(x - median) for x in self._losses) * 1.48
      if loss > median + max(6 * deviation, _SPIKE):
        yield from self._once(
            'spike', f'the loss jumped from about {median:.2f} to {loss:.2f}. If it does not come '
            'back: a lower optimizer.learning_rate, a longer warmup, optimizer.clip_norm')
    if finite:
      self._losses.append(loss)
    if time.monotonic() - self._began > _SETTLED:
      yield from self._starving(waited)

  def _starving(self, waited: Sequence[float]) -> Iterator[str]:
    slowest, rest = max(waited), sorted(waited)[:-1]
    if slowest <= _WAITED_LONG:
      return
    if rest and slowest > 3 * statistics.median(rest) + _WAITED_LONG:
      yield from self._once(
          'slow host', f'process {list(waited).index(slowest)} of {len(waited)} is slower than the '
          f'others and holds them up: its device waited {slowest:.0%} of the time for rows. Is '
          'something else running there, or is its disk slower?')
    else:
      yield from self._once(
          'starving', f'the device waited {slowest:.0%} of the time for rows: more '
          'data.loader_workers may help, or a faster disk')

  def evaluation(self, step: int, scores: Mapping[str, float | None]) -> Iterator[str]:
    """Findings in the held-out scores after `step` steps; most are about pretraining runs."""
    empty = [name for name, value in scores.items() if value is None]
    if empty:
      yield from self._once(
          'empty', f'no position of the evaluation counts for {", ".join(empty)}: hold out more '
          'text, or evaluate more of it (eval_batches)')
    early = step < _EARLY * self._train_steps or self._train_steps < _SHORT
    if early or 'unigram_entropy' not in scores or scores['mlm_loss'] is None:
      return
    loss, guessing = scores['mlm_loss'], scores['unigram_entropy']
    pairs, accuracy = next(((name.removesuffix('_accuracy').upper(), scores[name])
                            for name in ('nsp_accuracy', 'sop_accuracy')
                            if scores.get(name) is not None), ('', 1.0))
    if loss > guessing - _LEARNT:
      beside = f' (while {pairs} learns)' if pairs and accuracy > _CHANCE else ''
      yield from self._once(
          'plateau', f'the MLM loss is still that of guessing by token frequency{beside}: '
          f'{loss:.2f} and {guessing:.2f}. Likely: optimizer.learning_rate is too high or too low, '
          'the run too short, or the vocabulary not that of the text')
    elif accuracy < _CHANCE:
      yield from self._once(
          'pairs', f'MLM learns and {pairs} does not (accuracy {accuracy:.2f}). Likely: the '
          'documents are a sentence or two long, or not separated by blank lines, so that pairs '
          'carry no signal')


def give_up(step: int, digest: str):
  """Ends a run whose steps change nothing.

  Raises:
    Failed: with the step and the digest of its rows.
  """
  raise Failed(
      f'the loss or its gradient was not finite in {MOST_SKIPPED} steps in a row, the last of them '
      f'step {step} (rows {digest}). Likely: optimizer.learning_rate is too high, the warmup too '
      'short, or the text broken; newer checkpoints may hold what led to it')
