"""The README lists the files of one step and of one row: all files, with their line counts.

After a change, python -m tests.test_reading_path updates the line counts.
"""

import contextlib
import pathlib
import re
import sys

import jax
from ml_collections import FrozenConfigDict
import pytest

from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import pretrain
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import state as state_lib
from tests import conftest

ROOT = pathlib.Path(__file__).parents[1]
_ROW = re.compile(r'^\| \d+ \| \[`(\S+)`\]\(\S+\) \| (\d+) \|', re.MULTILINE)
_TOTAL = re.compile(r'(\d+) files, ([\d,]+) lines')
_PATHS = ('One step', 'One row')
_CALLER = 'bert_jax/training/loop.py'  # calls the functions that the test calls
# Files that only choose sizes, names, kernels, devices and the form of products.
_CHOICES = {f'bert_jax/{name}.py' for name in (
    'errors', 'model/architectures', 'model/attention_kernels', 'model/bert_config',
    'model/parameters', 'model/products', 'parallel/mesh')}


def lines_of(name: str) -> int:
  return len((ROOT / name).read_text().splitlines())


def section(path: str) -> str:
  """The part of the README about a path."""
  return (ROOT / 'README.md').read_text().partition(f'**{path}**')[2].partition('\n**')[0]


def listed(path: str) -> dict[str, int]:
  """{file: lines} of a path in the README."""
  return {name: int(lines) for name, lines in _ROW.findall(section(path))}


@pytest.mark.parametrize('path', _PATHS)
def test_the_readme_states_the_line_count_of_each_file(path):
  table = listed(path)
  assert table == {name: lines_of(name) for name in table}
  files, lines = _TOTAL.search(section(path)).groups()
  assert (int(files), int(lines.replace(',', ''))) == (len(table), sum(table.values()))


def test_one_step_takes_at_most_14_files():
  assert len(listed('One step')) <= 14


@contextlib.contextmanager
def recorded():
  """Yields a set that gains each file of the package in which a function runs."""
  ran = set()

  def profile(frame, event, argument):
    name = frame.f_code.co_filename
    if event == 'call' and name.startswith(str(ROOT / 'bert_jax')):
      ran.add(str(pathlib.Path(name).relative_to(ROOT)))

  sys.setprofile(profile)
  try:
    yield ran
  finally:
    sys.setprofile(None)


def test_the_readme_lists_the_files_that_run(corpus_file, tmp_path):
  """The list of one step has exactly the files whose functions run in it."""
  config, mesh = FrozenConfigDict(conftest.tiny_config(corpus_file)), conftest.sub_mesh(1, 1)
  job = pretrain.make_job(config, None, mesh, tmp_path)
  with recorded() as row_files:
    # A step of an epoch whose rows no test has read yet.
    rows = job.data.rows(1000)
  batch = mesh_lib.put_batch(rows, mesh)
  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch)
  optimizer = optimizer_lib.make_optimizer(
      optimizer_lib.OptimizerConfig(**config.optimizer), job.train_steps)
  _, state = state_lib.make_init(job.task, optimizer, mesh, config.sharding)
  with recorded() as step_files:
    step = state_lib.make_train_step(
        job.task, optimizer, mesh, config.sharding, state, seed=0, accumulation=1)
    step.lower(state, shapes)
  assert set(listed('One row')) <= row_files
  assert step_files - _CHOICES == set(listed('One step')) - {_CALLER}


def test_the_worked_example_prints_the_output_on_the_page(tmp_path, monkeypatch, capsys):
  page = (ROOT / 'docs/one_row.md').read_text()
  code, output = (re.search(f'```{kind}\n(.*?)```', page, re.DOTALL)[1]
                  for kind in ('python', 'text'))
  monkeypatch.chdir(tmp_path)
  exec(code, {})
  assert capsys.readouterr().out.endswith(output)


def write():
  """Writes the line counts into the README."""
  path = ROOT / 'README.md'
  path.write_text(_ROW.sub(lambda m: m[0].replace(f'| {m[2]} |', f'| {lines_of(m[1])} |'),
                           path.read_text()))
  for name in _PATHS:
    table, before = listed(name), section(name)
    after = _TOTAL.sub(f'{len(table)} files, {sum(table.values()):,} lines', before)
    path.write_text(path.read_text().replace(before, after))


if __name__ == '__main__':
  write()
