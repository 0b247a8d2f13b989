"""The metrics of a run for people: progress bar, metrics.jsonl, curves.png, trackers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import json
import math
import sys
import time
from typing import Any

from etils import epath
import jax
from tqdm import auto as tqdm

from bert_jax.reporting import trackers as trackers_lib
from bert_jax.runtime import console, preemption, processes, storage

# Seconds from one curves.png to the next: drawing can take longer than training.
_BETWEEN_CURVES = 30
# Metrics of a fine-tuning run that curves.png shows.
_FINETUNING_CURVES = ('loss', 'accuracy', 'f1', 'matthews', 'pearson', 'spearman',
                      'exact_match', 'ndcg_10')


def read_metrics(path: epath.Path) -> list[dict[str, Any]]:
  """The complete lines of metrics.jsonl; none if the file does not exist."""
  lines = []
  for text in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(json.JSONDecodeError):  # a kill cuts the last line short
      lines.append(json.loads(text))
  return [line for line in lines
          if isinstance(line, dict) and isinstance(line.get('step'), int)]


def _has_scores(line: Mapping[str, Any]) -> bool:
  return any(name.startswith('eval_') for name in line)


def is_evaluated(workdir: epath.Path, step: int) -> bool:
  """True if metrics.jsonl has the evaluation after `step`; all processes must call it."""
  # Only the first process has the file.
  return processes.anywhere(not jax.process_index() and any(
      line['step'] == step and _has_scores(line)
      for line in read_metrics(workdir / 'metrics.jsonl')))


def _row(line: Mapping[str, Any]) -> trackers_lib.Row:
  """The numbers of a line, named as in trackers; there may be none."""
  return trackers_lib.Row(line['step'], {
      'eval/' + name[5:] if name.startswith('eval_') else 'train/' + name: value
      for name, value in line.items() if name != 'step' and isinstance(value, int | float)})


def _rows(path: epath.Path) -> list[trackers_lib.Row]:
  return [row for row in map(_row, read_metrics(path)) if row.scalars]


def is_recorded(workdir: epath.Path, trackers: Sequence[str]) -> bool:
  """True if the trackers have all of metrics.jsonl; all processes must call it."""
  rows = _rows(workdir / 'metrics.jsonl')
  return not processes.anywhere(not jax.process_index() and not all(
      trackers_lib.ALL[name].is_complete(workdir, rows) for name in trackers))


def truncate_metrics(path: epath.Path, step: int):
  """Cuts metrics.jsonl to the complete lines up to `step`: the run repeats the rest."""
  if path.exists():
    storage.write_whole(path, ''.join(
        json.dumps(line) + '\n' for line in read_metrics(path) if line['step'] <= step))


class _Bar(tqdm.tqdm):
  """A progress bar that formats the time left with `console.duration`."""

  @property
  def format_dict(self):
    values = super().format_dict
    rate = values['rate'] or (self.n - self.initial) / max(values['elapsed'], 1e-9)
    left = console.duration((self.total - self.n) / rate) if rate else '?'
    return {**values, 'left': left}


def _decimal(value: float | None) -> str:
  return '-' if value is None else f'{value:.3f}'


class MetricsLog:
  """Writes the metrics of a run. Only the first process makes a `MetricsLog`.

  Args of the constructor:
    workdir: a local folder.
    first_step, last_step: the steps done before, and the last step of the run. Lines of
      metrics.jsonl after `first_step` are cut off.
    start_trackers: (workdir, first_step, earlier rows) -> the trackers, which get every
      line too; see `trackers.start`.
  """

  def __init__(self, workdir: epath.Path, *, first_step: int, last_step: int,
               start_trackers: Callable[..., list[trackers_lib.Tracker]] = lambda *_: []):
    self._path = workdir / 'metrics.jsonl'
    truncate_metrics(self._path, first_step)
    self._file = self._path.open('a')
    self._trackers = start_trackers(workdir, first_step, _rows(self._path))
    self._bar = _Bar(
        total=last_step, initial=first_step, unit=' steps', disable=None,
        dynamic_ncols=True, smoothing=0.05,
        bar_format='{l_bar}{bar}| {n_fmt}/{total_fmt} [{left} left, {rate_fmt}{postfix}]')
    self._drawn = time.monotonic()
    self._has_new_scores = False
    self._first_step = first_step
    self._timed_from = first_step, self._drawn  # (step, time) to estimate the time left

  def train(self, step: int, metrics: dict[str, Any], warnings: Iterable[str] = ()):
    """Logs training metrics after `step` updates, and warnings."""
    speed = metrics['tokens_per_second']
    shown = {name: _decimal(value) for name, value in metrics.items()
             if name.endswith(('loss', 'accuracy'))}
    shown['tokens/s'] = f'{speed:,.0f}' if speed else '-'
    # The bar has room for two values. The lines of evaluations show the other scores.
    in_bar = {name: shown[name] for name in ('loss', 'tokens/s') if name in shown}
    bar = self._bar
    bar.set_postfix(in_bar, refresh=False)
    bar.update(step - bar.n)
    # Without a terminal tqdm disables the bar: print a line instead.
    if bar.disable:
      (first, began), now = self._timed_from, time.monotonic()
      left = console.duration((now - began) / max(step - first, 1) * (bar.total - step))
      # The first steps compile: later lines do not count them.
      if bar.n == self._first_step:
        self._timed_from = step, now
      metrics_text = '  '.join(f'{name} {text}' for name, text in shown.items())
      print(f'step {step}/{bar.total}  {metrics_text}  {left} left', flush=True)
      bar.n = step
    self._write(step, metrics)
    self._warn(step, warnings)

  def evaluation(self, step: int, scores: dict[str, float | None],
                 warnings: Iterable[str] = ()):
    """Logs held-out scores after `step` updates, and warnings; draws the curves."""
    if not scores:
      return
    self._write(step, {f'eval_{name}': value for name, value in scores.items()})
    shown = '  '.join(f'{name} {_decimal(value)}' for name, value in scores.items())
    self._say(f'step {step}  held out:  {shown}')
    self._has_new_scores = True
    # A run that is killed after its last step does not resume: draw its curves now.
    if step == self._bar.total or time.monotonic() - self._drawn > _BETWEEN_CURVES:
      self._draw()
    self._warn(step, warnings)

  def _draw(self):
    _draw_curves(read_metrics(self._path), self._path.parent / 'curves.png')
    self._drawn, self._has_new_scores = time.monotonic(), False

  def _warn(self, step: int, warnings: Iterable[str]):
    for warning in warnings:
      self._write_line({'step': step, 'warning': warning})
      self._say(f'step {step}  warning: {warning}')

  def _say(self, text: str):
    self._bar.write(text)
    sys.stdout.flush()  # a file or a pipe buffers lines, and a kill loses them

  def _write(self, step: int, metrics: dict[str, Any]):
    # JSON has no NaN: a loss that is not finite becomes null.
    line = {'step': step, **{
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()}}
    row = _row(line)
    with preemption.uninterrupted():
      for tracker in self._trackers if row.scalars else ():
        tracker.log(row)
    # Last, because an evaluation counts as done once metrics.jsonl has its line.
    self._write_line(line)

  def _write_line(self, content: dict[str, Any]):
    self._file.write(json.dumps(content) + '\n')
    self._file.flush()

  def close(self):
    """Draws the curves of the last scores, and closes the files."""
    if self._has_new_scores:
      self._draw()
    self._bar.close()
    self._file.close()
    evaluations = [line for line in read_metrics(self._path) if _has_scores(line)]
    for tracker in self._trackers:
      tracker.finish(self._path.parent, evaluations)


def _curve_names(lines: list[dict[str, Any]]) -> list[str]:
  """The metrics that curves.png shows, each loss before its accuracy."""
  logged = {key.removeprefix('eval_') for line in lines for key in line}
  names = sorted((name for name in logged if name.endswith(('_loss', '_accuracy'))),
                 key=lambda name: (name.rpartition('_')[0], name.endswith('accuracy')))
  # A fine-tuning run has a single 'loss' and the scores of its task.
  return names or [name for name in _FINETUNING_CURVES if name in logged]


def _draw_curves(lines: list[dict[str, Any]], path: epath.Path):
  """Draws each loss and score over the steps; dots mark held-out scores."""
  # Imported here, because it is slow and only evaluations need it.
  from matplotlib import figure as figure_lib
  names = _curve_names(lines)
  if not names:
    return
  width = 4 * len(names)
  figure = figure_lib.Figure(figsize=(width, 3.2))
  axes = figure.subplots(
      1, len(names), squeeze=False, sharex=True, gridspec_kw=dict(
          left=0.6 / width, right=1 - 0.15 / width, bottom=0.16, top=0.9, wspace=0.22))
  styles = (('', dict(color='C0', label='training')),
            ('eval_', dict(color='C1', marker='o', ms=4, label='held out')))
  for axis, name in zip(axes[0], names):
    for prefix, style in styles:
      points = [(line['step'], line[prefix + name]) for line in lines
                if line.get(prefix + name) is not None]
      if points:
        axis.plot(*zip(*points), lw=1.2, **style)
    # A model that learns is below the loss of the token frequencies.
    floor = [line['eval_unigram_entropy'] for line in lines
             if line.get('eval_unigram_entropy')]
    if name == 'mlm_loss' and floor:
      axis.axhline(floor[-1], color='gray', ls=':', lw=1.2, label='token frequencies')
    objective, _, score = name.partition('_')
    title = name if name in _FINETUNING_CURVES else f'{objective.upper()}_{score}'
    axis.set(title=title.replace('_', ' ', 1), xlabel='step')
    axis.spines[['top', 'right']].set_visible(False)
    if axis.lines:
      axis.legend(frameon=False)
  with path.open('wb') as file:
    figure.savefig(file, dpi=120, format='png')
