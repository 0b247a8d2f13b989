"""Which BERT is better after the same training time on the same machine?

  python -m benchmarks.race --text='corpus/*.txt.gz' --held_out='held_out/*.txt' \\
      --pairs='blimp/*.jsonl' --glue=GLUE --minutes=30 --workdir=runs/race

The sides are transformers' PyTorch BERT as its users train it
(`benchmarks.torch_pretrain`), a BERT of the same size in bert_jax, and
`configs/speedrun.py`. All read the same first words of the text with the same vocabulary,
and train one after another. `bert_jax.evaluate` scores all of them: the masked-LM loss of
the held-out text with the same masks, minimal pairs, and GLUE next to random twins.
Writes a table (WORKDIR/race.md) and a plot of loss and minimal pairs over minutes
(WORKDIR/race.png). The same command resumes. Needs torch and transformers.
"""

import json
import math
import pathlib
import shlex

from absl import app, flags

from benchmarks.calls import call, evaluate, keep_flags
from bert_jax.runtime import console, host

_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_WORDS = flags.DEFINE_integer('words', 10_000_000, 'Words of the text that are read.')
_HELD_OUT = flags.DEFINE_string('held_out', None, 'Glob of other text files.', required=True)
_PAIRS = flags.DEFINE_string('pairs', None, "Minimal pairs in BLiMP's JSON lines.")
_GLUE = flags.DEFINE_string('glue', None, 'Folder of GLUE.')
_GLUE_FLAGS = flags.DEFINE_string('glue_flags', '', "Further flags of the suite: '--seeds=1 ...'.")
_MINUTES = flags.DEFINE_float('minutes', 30, 'Minutes of training for each side.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the runs.', required=True)
_SIDES = flags.DEFINE_list('sides', ['pytorch', 'bert', 'speedrun'], 'Some of the sides.')

_POINTS = 10  # on each curve of the plot
# The panels of the plot: label and format of the numbers.
_LOSS = 'masked-LM loss of held-out text, nat a token', '.2f'
_CORRECT = 'minimal pairs in the right order, %', '.1f'
_TITLES = {'pytorch': 'PyTorch BERT (transformers)', 'bert': 'bert_jax, BERT',
           'speedrun': 'bert_jax, speedrun'}
# A BERT with 4 layers of width 256, the hyperparameters of configs/tiny.py, and the best
# learning rate of the PyTorch side. With the 2e-3 of configs/tiny.py it stays on the
# plateau for 30 minutes.
_BERT = {'train_steps': 0, 'phases': '()', 'max_len': 128, 'batch_size': 32,
         'data.sequences': 'full_sentences', 'model.dropout': 0.0, 'model.attention_dropout': 0.0,
         'model.initializer_range': 0.08, 'model.scan_unroll': 4, 'optimizer.learning_rate': 5e-4,
         'optimizer.warmup_steps': 0, 'optimizer.warmup_ratio': 0.1}
# The points of the plot. An accelerator makes 50 steps in a second.
_CHECKPOINTS = {'checkpoint_every': 1000 if host.has_accelerator() else 50,
                'keep_checkpoints': 10_000}


def _train(side: str, home: pathlib.Path):
  """Trains a side unless it is already trained."""
  records, workdir = home / 'records', home / side
  minutes = _MINUTES.value
  if side == 'pytorch':
    if not (workdir / 'run.json').exists():
      call('benchmarks.torch_pretrain', f'--records={records}', f'--minutes={minutes}',
            f'--output={workdir}')
    return
  name, overrides = ('speedrun', {}) if side == 'speedrun' else ('mini', _BERT)
  call('bert_jax.main', f'--config=configs/{name}.py', f'--workdir={workdir}',
        *(f'--config.{field}={value}' for field, value in (overrides | _CHECKPOINTS).items()),
        f'--config.train_minutes={minutes}', f'--config.data.source={records}')


def _models(side: str, home: pathlib.Path) -> dict[float, list[str]]:
  """Returns {minutes of training: flags of `evaluate` for the model at that time}."""
  workdir, minutes = home / side, _MINUTES.value
  if side == 'pytorch':
    return {minutes * tenth / 10: [f'--model={workdir}/{tenth}'] for tenth in range(1, 11)}
  last = json.loads((workdir / 'run.json').read_text())['config']['train_steps']
  steps = sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir()
                 if path.name.isdigit())
  step_of = {min(steps, key=lambda step: abs(step - last * i / _POINTS))
             for i in range(1, _POINTS + 1)}
  return {minutes * step / last: [f'--model={workdir}', f'--step={step}']
          for step in sorted(step_of)}


def _scores(side: str, home: pathlib.Path) -> tuple[dict, dict[str, str]]:
  """Returns ({panel: {minutes: value}}, the cells of the table)."""
  scores = home / 'scores'
  lines = {_LOSS: {}} | ({_CORRECT: {}} if _PAIRS.value else {})
  for minutes, model in _models(side, home).items():
    name = f'{side}-{minutes:.4f}'  # a short run has several models in a tenth of a minute
    report = evaluate(scores / f'{name}-masked_lm.json', 'masked_lm', _HELD_OUT.value, *model)
    lines[_LOSS][minutes] = report['loss']
    if _PAIRS.value:
      all_pairs = evaluate(scores / f'{name}-minimal_pairs.json', 'minimal_pairs',
                           _PAIRS.value, *model)['rows'][-1]
      lines[_CORRECT][minutes] = 100 * all_pairs['accuracy']
  cells = {'held-out loss': f'{report["loss"]:.3f}'}
  if _PAIRS.value:
    error = 100 * all_pairs['standard error']
    cells['minimal pairs'] = f'{lines[_CORRECT][minutes]:.1f} ± {error:.1f}'
  if _GLUE.value:
    rows = evaluate(scores / f'{side}-glue.json', 'glue', _GLUE.value, *model, '--twin',
                    *shlex.split(_GLUE_FLAGS.value))['rows']
    for row in rows:
      cells[row['task']] = f'{100 * row["model"]:.1f} ({100 * row["twin"]:.1f})'
  return lines, cells


def _draw_panel(axis, panel: tuple[str, str], lines: dict[str, dict[float, float]]):
  label, form = panel
  for side, values in lines.items():
    axis.plot(*zip(*values.items()), marker='.', label=_TITLES[side])
  bottom, top = axis.get_ylim()
  place = -math.inf
  for minutes, value in sorted((list(values.items())[-1] for values in lines.values()),
                               key=lambda end: end[1]):
    place = max(value, place + 0.05 * (top - bottom))  # keeps labels of close end points apart
    axis.annotate(f'{value:{form}}', (minutes, place), textcoords='offset points', xytext=(6, -3))
  axis.set(xlabel='minutes of training', ylabel=label, xlim=(0, None))
  axis.spines[['top', 'right']].set_visible(False)


def _draw(lines: dict[str, dict], path: pathlib.Path):
  """Draws {side: {panel: {minutes: value}}}."""
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot as plt
  panels = list(next(iter(lines.values())))
  figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False,
                              layout='constrained')
  for axis, panel in zip(axes[0], panels):
    _draw_panel(axis, panel, {side: values[panel] for side, values in lines.items()})
  axes[0, 0].legend(frameon=False)
  figure.savefig(path, dpi=120)


def main(_):
  """Trains, scores, prints a table, and draws the plot."""
  home = pathlib.Path(_WORKDIR.value)
  keep_flags(home, 'minutes', 'glue_flags')
  # Returns at once if it is done; refuses records of another text.
  call('bert_jax.prepare', f'--input={_TEXT.value}', f'--output={home}/records',
        '--vocab_size=8192', '--heldout=0.01', f'--words={_WORDS.value}')
  for side in _SIDES.value:
    _train(side, home)
  lines, table = {}, []
  for side in _SIDES.value:
    lines[side], cells = _scores(side, home)
    table.append({'model': _TITLES[side], **cells})
  text = console.markdown_table([list(table[0]), *(row.values() for row in table)]) + '\n'
  (home / 'race.md').write_text(text)
  _draw(lines, home / 'race.png')
  print(text)


if __name__ == '__main__':
  app.run(main)
