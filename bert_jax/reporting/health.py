"""Warnings about a run: each once, with its likely causes.

A step whose loss or gradient is not finite is skipped (`state.make_train_step`). Too many
skipped steps in a row end the run.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import math
import statistics
import time
from typing import Any

from bert_jax.errors import Failed

_MAX_SKIPPED = 5  # in a row
_SPIKE_LINES = 20  # a loss is compared with up to this many lines before it
_SPIKE_NATS = 0.5  # a spike is at least this far above the median of these lines
_SETTLED = 60  # seconds until the first windows of rows are made and files are cached
_LONG_WAIT = 0.05  # share of the time that a device may wait for rows without a warning
_EARLY = 1 / 3  # of a run: during this first part, an objective may not learn yet
_SHORT = 1000  # a run of fewer steps may not learn anything
_LEARNED_NATS = 0.05  # a loss this far below the entropy of the tokens shows learning
_CHANCE = 0.55  # accuracy of a pair objective that may be chance
_CAUSES = (
    'Likely: optimizer.learning_rate is too high, the warmup too short, or the text '
    'broken')

Warnings = Iterable[tuple[str, str]]  # (name, text)


class Health:
  """Watches the steps, the lines and the evaluations of one run."""

  def __init__(self, train_steps: int):
    self._train_steps = train_steps
    self._began = time.monotonic()
    self._skipped_in_a_row = 0
    self._losses = collections.deque(maxlen=_SPIKE_LINES)
    self._names = set()  # of the warnings so far

  def _new(self, warnings: Warnings) -> Iterator[str]:
    for name, text in warnings:
      if name not in self._names:
        self._names.add(name)
        yield text

  def steps(self, first: int, skipped: Sequence[bool], digest: Callable[[int], str]):
    """Counts skipped steps, from `first` on.

    Raises Failed, with the digest of the step's rows, after too many in a row.
    """
    for step, was_skipped in enumerate(skipped, first):
      self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
      if self._skipped_in_a_row == _MAX_SKIPPED:
        raise Failed(
            f'the loss or its gradient was not finite in {_MAX_SKIPPED} steps in a row, the '
            f'last of them step {step} (rows {digest(step)}). {_CAUSES}; the newest '
            'checkpoints may already be affected')

  def line(self, metrics: Mapping[str, Any], waited: Sequence[float]) -> Iterator[str]:
    """Warnings about a line; `waited`: the share of time each process waited for rows."""
    yield from self._new(self._about_losses(metrics))
    if time.monotonic() - self._began > _SETTLED:
      yield from self._new(_about_waits(waited))

  def _about_losses(self, metrics: Mapping[str, Any]) -> Warnings:
    if metrics['skipped_steps']:
      yield ('skipped',
             f'{metrics["skipped_steps"]} steps had a loss or gradient that is '
             f'not finite and changed nothing; {_MAX_SKIPPED} in a row end the run. '
             f'{_CAUSES}')
    loss = metrics['loss']
    if loss is None or not math.isfinite(loss):
      return
    if len(self._losses) >= _SPIKE_LINES // 2:
      median = statistics.median(self._losses)
      # The deviation of a normal distribution; an earlier spike hardly moves the median.
      deviation = statistics.median(abs(x - median) for x in self._losses) * 1.48
      if loss > median + max(6 * deviation, _SPIKE_NATS):
        yield ('spike',
               f'the loss jumped from about {median:.2f} to {loss:.2f}. If it does '
               'not come back: a lower optimizer.learning_rate, a longer warmup, '
               'optimizer.clip_norm')
    self._losses.append(loss)

  def evaluation(self, step: int, scores: Mapping[str, float | None]) -> Iterator[str]:
    """Warnings about the held-out scores after `step` steps; most concern pretraining."""
    yield from self._new(_about_empty_scores(scores))
    if step >= _EARLY * self._train_steps and self._train_steps >= _SHORT:
      yield from self._new(_about_learning(scores))


def _about_waits(waited: Sequence[float]) -> Warnings:
  slowest, rest = max(waited), sorted(waited)[:-1]
  if slowest <= _LONG_WAIT:
    return
  if rest and slowest > 3 * statistics.median(rest) + _LONG_WAIT:
    yield (
        'slow host', f'process {list(waited).index(slowest)} of {len(waited)} is slower '
        f'than the others and holds them up: its device waited {slowest:.0%} of the time '
        'for rows. Is something else running there, or is its disk slower?')
  else:
    yield ('starving', f'the device waited {slowest:.0%} of the time for rows: more '
           'data.loader_workers may help, or a faster disk')


def _about_empty_scores(scores: Mapping[str, float | None]) -> Warnings:
  empty = [name for name, value in scores.items() if value is None]
  if empty:
    yield ('empty',
           f'no position of the evaluation counts for {", ".join(empty)}: hold out '
           'more text, or evaluate more of it (eval_batches)')


def _about_learning(scores: Mapping[str, float | None]) -> Warnings:
  if 'unigram_entropy' not in scores or scores['mlm_loss'] is None:
    return
  loss, guessing = scores['mlm_loss'], scores['unigram_entropy']
  pairs, accuracy = next(((name.removesuffix('_accuracy').upper(), scores[name])
                          for name in ('nsp_accuracy', 'sop_accuracy')
                          if scores.get(name) is not None), ('', 1.0))
  # A loss below the entropy of the token frequencies is the first sign of learning.
  if loss > guessing - _LEARNED_NATS:
    but = f' (while {pairs} learns)' if pairs and accuracy > _CHANCE else ''
    yield (
        'plateau', f'the MLM loss is no better than guessing by token frequency{but}: '
        f'{loss:.2f} and {guessing:.2f}. Likely: optimizer.learning_rate is too high or '
        'too low, the run too short, or the vocabulary does not fit the text')
  elif accuracy < _CHANCE:
    yield (
        'pairs',
        f'MLM learns and {pairs} does not (accuracy {accuracy:.2f}). Likely: the '
        'documents are a sentence or two long, or not separated by blank lines, so that '
        'pairs carry no signal')
