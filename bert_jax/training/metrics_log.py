"""What a person sees of a run: summary, progress bar, metrics.jsonl, TensorBoard, curves.png."""

from collections.abc import Iterable
from collections.abc import Iterator
import json
import math
import time
from typing import Any

from etils import epath
import jax
import tensorboardX
from tqdm import auto as tqdm

from bert_jax.errors import UserError
from bert_jax.runtime import console
from bert_jax.runtime import processes

# Of a fine-tuning run.
_DRAWN = ('loss', 'accuracy', 'f1', 'matthews', 'pearson', 'spearman', 'exact_match')


def _readable(path: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The lines of metrics.jsonl that are whole, as text and as what they say."""
  for line in path.read_text().splitlines() if path.exists() else ():
    try:
      found = json.loads(line)
      if isinstance(found['step'], int):
        yield line, found
    except (json.JSONDecodeError, KeyError, TypeError):
      continue  # cut short by a kill


def is_evaluated(workdir: epath.Path, step: int) -> bool:
  """Whether metrics.jsonl has the evaluation after `step`; all processes ask what the first has."""
  here = not jax.process_index() and any(
      found['step'] == step and any(name.startswith('eval_') for name in found)
      for _, found in _readable(workdir / 'metrics.jsonl'))
  return processes.anywhere(here)


def truncate_metrics(path: epath.Path, step: int):
  """Cuts metrics.jsonl back to the lines up to `step`: what came after is made again.

  A last line that was cut short by a kill goes too.
  """
  if not path.exists():
    return
  kept = [line + '\n' for line, found in _readable(path) if found['step'] <= step]
  partial = path.parent / (path.name + '.partial')
  partial.write_text(''.join(kept))
  partial.replace(path)


def read_metrics(path: epath.Path) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl; none if there is no such file."""
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Bar(tqdm.tqdm):
  """A progress bar with the time left as `duration` says it."""

  @property
  def format_dict(self):
    values = super().format_dict
    rate = values['rate'] or (self.n - self.initial) / max(values['elapsed'], 1e-9)
    return {**values, 'left': console.duration((self.total - self.n) / rate) if rate else '?'}


def _decimal(value: float | None) -> str:
  return '-' if value is None else f'{value:.3f}'


class Report:
  """Writes the metrics of one process; every method does nothing in the others."""

  def __init__(self, workdir: epath.Path, *, first_step: int, last_step: int, active: bool):
    self._active = active
    if not active:
      return
    self._path = workdir / 'metrics.jsonl'
    truncate_metrics(self._path, first_step)
    self._file = self._path.open('a')
    self._board = tensorboardX.SummaryWriter(str(workdir / 'tensorboard'),
                                             purge_step=first_step + 1)
    self._curves = workdir / 'curves.png'
    self._bar = _Bar(
        total=last_step, initial=first_step, unit=' steps', disable=None, dynamic_ncols=True,
        smoothing=0.05,
        bar_format='{l_bar}{bar}| {n_fmt}/{total_fmt} [{left} left, {rate_fmt}{postfix}]')
    self._last_step, self._began, self._first_step = last_step, time.monotonic(), first_step

  def train(self, step: int, metrics: dict[str, Any]):
    """Logs training metrics after `step` updates."""
    if not self._active:
      return
    self._write(step, metrics)
    speed = metrics['tokens_per_second']
    shown = {name: _decimal(metrics[name]) for name in metrics
             if name.endswith(('loss', 'accuracy'))}
    shown['tokens/s'] = f'{speed:,.0f}' if speed else '-'
    # The bar has 80 columns to live in: the rest stands in the lines of the evaluations.
    in_bar = {name: shown[name] for name in ('loss', 'tokens/s') if name in shown}
    self._bar.set_postfix(in_bar, refresh=False)
    self._bar.update(step - self._bar.n)
    if self._bar.disable:  # no terminal: one line instead of a bar
      rate = (time.monotonic() - self._began) / max(step - self._first_step, 1)
      left = rate * (self._last_step - step)
      print(f'step {step}/{self._last_step}  ' + '  '.join(f'{k} {v}' for k, v in shown.items())
            + f'  {console.duration(left)} left', flush=True)
      self._bar.n = step

  def evaluation(self, step: int, metrics: dict[str, float | None]):
    """Logs held-out metrics after `step` updates and draws the curves anew."""
    if not self._active or not metrics:
      return
    self._write(step, {f'eval_{name}': value for name, value in metrics.items()})
    shown = '  '.join(f'{name} {_decimal(value)}' for name, value in metrics.items())
    self._bar.write(f'step {step}  held out:  {shown}')
    self.draw()

  def warn(self, step: int, findings: Iterable[str]):
    """Logs what looks wrong after `step` updates."""
    for finding in findings:  # in every process: each finds the same
      if self._active:
        self._file.write(json.dumps({'step': step, 'warning': finding}) + '\n')
        self._file.flush()
        self._bar.write(f'step {step}  warning: {finding}')

  def _write(self, step: int, metrics: dict[str, Any]):
    # JSON has no NaN: a loss that is not finite is written as null.
    plain = {name: None if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in metrics.items()}
    self._file.write(json.dumps({'step': step, **plain}) + '\n')
    self._file.flush()
    for name, value in plain.items():
      if isinstance(value, (int, float)):
        group = 'eval/' + name[5:] if name.startswith('eval_') else 'train/' + name
        self._board.add_scalar(group, value, step)

  def flush(self):
    """Has everything that was logged in the files."""
    if self._active:
      self._board.flush()

  def draw(self):
    """Draws curves.png from metrics.jsonl."""
    if self._active:
      draw_curves(read_metrics(self._path), self._curves)

  def close(self):
    """Finishes the bar and the files."""
    if self._active:
      self._bar.close()
      self._file.close()
      self._board.close()


def _title(name: str) -> str:
  objective, separator, measure = name.partition('_')
  return f'{objective.upper()} {measure}' if separator and name not in _DRAWN else name.replace(
      '_', ' ')


def draw_curves(lines: list[dict[str, Any]], path: epath.Path):
  """Draws each loss and accuracy over the steps, training as a line and held-out as points."""
  import matplotlib  # slow to import, and drawn only after an evaluation
  matplotlib.use('Agg')
  from matplotlib import pyplot as plt
  known = {key.removeprefix('eval_') for line in lines for key in line}
  names = sorted((name for name in known if name.endswith(('_loss', '_accuracy'))),
                 key=lambda name: (name.rpartition('_')[0], name.endswith('accuracy')))
  # Of one objective there is one loss; what else its evaluations have are the task's scores.
  names = names or [name for name in _DRAWN if name in known]
  if not names:
    return
  figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3.2), squeeze=False,
                              sharex=True, layout='constrained')
  for axis, name in zip(axes[0], names):
    for key, style, label in ((name, dict(color='C0'), 'training'),
                              (f'eval_{name}', dict(color='C1', marker='o', ms=4), 'held out')):
      points = [(line['step'], line[key]) for line in lines if line.get(key) is not None]
      if points:
        axis.plot(*zip(*points), lw=1.2, label=label, **style)
    floor = [line['eval_unigram_entropy'] for line in lines if line.get('eval_unigram_entropy')]
    if name == 'mlm_loss' and floor:
      axis.axhline(floor[-1], color='gray', ls=':', lw=1.2, label='token frequencies')
    axis.set(title=_title(name), xlabel='step')
    axis.spines[['top', 'right']].set_visible(False)
    if axis.lines:
      axis.legend(frameon=False)
  with path.open('wb') as file:
    figure.savefig(file, dpi=120, format='png')
  plt.close(figure)


def check_writable(workdir: epath.Path):
  """Makes the workdir, and raises UserError if nothing can be written there."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f'.writable{jax.process_index() or ""}'
    probe.write_text('')
    probe.unlink()
  except OSError as e:
    raise UserError(f'--workdir={workdir} cannot be written: {e.strerror or e}') from e
