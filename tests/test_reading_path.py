"""The README's map of one pretraining step: its files, their lines, and that a step runs them all.

After a change: python -m tests.test_reading_path writes the numbers of lines anew.
"""

import pathlib
import re
import sys

import jax
from ml_collections import FrozenConfigDict

from bert_jax import config as config_lib
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import pretrain
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest

ROOT = pathlib.Path(__file__).parents[1]
_ROW = re.compile(r'^\| \d+ \| \[`(\S+)`\]\(\S+\) \| (\d+) \|', re.MULTILINE)
_TOTAL = re.compile(r'(\d+) files, ([\d,]+) lines')
_CALLER = 'bert_jax/training/loop.py'  # calls the functions that the test calls


def lines_of(name: str) -> int:
  return len((ROOT / name).read_text().splitlines())


def listed() -> dict[str, int]:
  """{file: lines} of the README."""
  return {name: int(lines) for name, lines in _ROW.findall((ROOT / 'README.md').read_text())}


def test_lines_are_those_of_the_files():
  table = listed()
  assert table == {name: lines_of(name) for name in table}
  files, lines = _TOTAL.search((ROOT / 'README.md').read_text()).groups()
  assert (int(files), int(lines.replace(',', ''))) == (len(table), sum(table.values()))


def test_a_step_runs_every_listed_file(corpus_file, tmp_path):
  config, mesh = conftest.tiny_config(corpus_file), conftest.sub_mesh(1, 1)
  config_lib.check(config)
  job = pretrain.make_job(FrozenConfigDict(config), None, mesh, tmp_path)
  ran = set()

  def profile(frame, event, argument):
    if event == 'call':
      ran.add(frame.f_code.co_filename)

  sys.setprofile(profile)
  try:
    optimizer = optimizer_lib.make_optimizer(
        optimizer_lib.OptimizerConfig(**config.optimizer), job.train_steps)
    _, state = state_lib.make_init(job.task, optimizer, mesh, config.sharding)
    step = state_lib.make_train_step(job.task, optimizer, mesh, config.sharding, state, seed=0,
                                     accumulation=1)
    later = 1000  # a step of an epoch whose rows no test has read yet
    batch = mesh_lib.put_batch(job.data.rows(later), mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                          batch)
    step.lower(state, shapes)
  finally:
    sys.setprofile(None)
  assert not {name for name in listed() if str(ROOT / name) not in ran} - {_CALLER}


def write():
  """Writes the numbers of lines into the README."""
  path = ROOT / 'README.md'
  text = _ROW.sub(lambda m: m[0].replace(f'| {m[2]} |', f'| {lines_of(m[1])} |'), path.read_text())
  path.write_text(text)
  table = listed()
  path.write_text(_TOTAL.sub(f'{len(table)} files, {sum(table.values()):,} lines', text))


if __name__ == '__main__':
  write()
