"""Runs `bash launch/local.sh` and updates every file that shows its figures.

  python -m benchmarks.local [WORKDIR]

The run has its own environment, and its time includes the install and the filled masks.
WORKDIR (runs/local) must be new. The command replaces the figures in README.md,
docs/results.md and configs/tiny.py, and the plot docs/tiny_curves.png. The metadata of
the plot has the line of the last evaluation. `tests/test_local.py` compares all of them.
"""

import os
import pathlib
import re
import subprocess
import textwrap
import time
from typing import NamedTuple

from absl import app
from PIL import Image, PngImagePlugin

from bert_jax.runtime import host

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = 'docs/tiny_curves.png'
_KEY = 'held out'  # of that line in the metadata of the plot


class Figures(NamedTuple):
  """The figures of a run."""

  cores: int
  minutes: int  # for the whole command
  install: int  # minutes for the install alone
  held_out: str  # the line of its last evaluation
  answers: str  # filled masks, and whether sentences follow


def _run(workdir: pathlib.Path) -> Figures:
  began, first, out = time.monotonic(), 0.0, ''
  process = subprocess.Popen(
      ['bash', 'launch/local.sh', str(workdir)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
      env={**os.environ, 'VENV': f'{workdir}.venv', 'PYTHONUNBUFFERED': '1'})
  for line in process.stdout:
    first = first or time.monotonic()
    print(line, end='', flush=True)
    out += line
  if process.wait():
    raise SystemExit(f'launch/local.sh ended with {process.returncode}')
  answers = re.search(r'Filled masks:.*?(?=\n\nLoss and accuracy)', out, re.DOTALL)[0]
  return Figures(host.cores(), round((time.monotonic() - began) / 60),
                 round((first - began) / 60), re.findall(r'step .*held out:.*', out)[-1], answers)


def _texts(f: Figures) -> list[tuple[str, str, str]]:
  """Returns (file, pattern, text) of each place that shows the figures."""
  scores = {name: float(value) for name, value in re.findall(r'(\w+) ([\d.]+)', f.held_out)}
  loss, floor, pairs = (f'{scores[name]:.2f}' for name in (
      'mlm_loss', 'unigram_entropy', 'nsp_accuracy'))
  return [
      ('README.md', r'On \d+ CPU cores it takes .*?\n```\n',
       f'On {f.cores} CPU cores it takes {f.minutes} minutes, {f.install} of them to install, and '
       f'prints near its end:\n\n```text\n{f.held_out}\n\n{f.answers}\n```\n'),
      ('docs/results.md', r'\| `bash launch/local\.sh` \|[^\n]*',
       f'| `bash launch/local.sh` | {f.minutes} min, install included | {loss} | {floor} | {pairs} '
       '|'),
      ('configs/tiny.py', r'Ran on .*?NSP accuracy [\d.]+\.',
       textwrap.fill(f'Ran on {f.cores} CPU cores: {f.minutes} minutes with the install. Held-out '
                     f'MLM loss {loss} (the token frequencies alone give {floor}), NSP accuracy '
                     f'{pairs}.', 90))]


def read(root: pathlib.Path) -> Figures:
  """Reads the figures from the README."""
  block = re.search(r'On (\d+) CPU cores it takes (\d+) minutes, (\d+) of them to install, and '
                    r'prints near its end:\n\n```text\n(step .*?)\n\n(.*?)\n```\n',
                    (root / 'README.md').read_text(), re.DOTALL)
  return Figures(*map(int, block.groups()[:3]), *block.groups()[3:])


def disagreeing(root: pathlib.Path) -> list[str]:
  """Returns the places that disagree with the figures in the README."""
  figures = read(root)
  wrong = [f'{file}: {text}' for file, pattern, text in _texts(figures)
           if re.findall(pattern, (root / file).read_text(), re.DOTALL) != [text]]
  if Image.open(root / PICTURE).text.get(_KEY) != figures.held_out:
    wrong.append(PICTURE)
  return wrong


def write(figures: Figures, curves: pathlib.Path, root: pathlib.Path):
  """Updates all places and the plot."""
  for file, pattern, text in _texts(figures):
    path = root / file
    path.write_text(re.sub(pattern, lambda _, text=text: text, path.read_text(), flags=re.DOTALL))
  kept = PngImagePlugin.PngInfo()
  kept.add_text(_KEY, figures.held_out)
  Image.open(curves).save(root / PICTURE, pnginfo=kept, optimize=True)


def main(argv: list[str]):
  """Runs the script and updates the files."""
  workdir = pathlib.Path(argv[1] if len(argv) > 1 else 'runs/local').resolve()
  if workdir.exists():
    raise SystemExit(f'{workdir} already exists: a resumed run would not measure the whole time')
  write(_run(workdir), workdir / 'curves.png', ROOT)


if __name__ == '__main__':
  app.run(main)
