"""Sizes that keep the code readable: short files, a function fits a screen, the loop two."""

import ast
import inspect
import pathlib

from bert_jax.training import loop

PACKAGE = pathlib.Path(__file__).parents[1] / 'bert_jax'
_MOST_LINES = 60  # of a function
_LOOP = ('loop', 'train')  # one function from the programs to the last checkpoint
_MOST_LINES_OF_LOOP = 90


def functions():
  """(file, name, lines) of every function of the package."""
  for path in PACKAGE.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef):
        yield path.stem, node.name, node.end_lineno - node.lineno + 1


def test_functions_fit_a_screen():
  long = [(file, name, lines) for file, name, lines in functions() if lines > _MOST_LINES]
  assert [(file, name) for file, name, _ in long] == [_LOOP]
  assert long[0][2] <= _MOST_LINES_OF_LOOP


def test_files_have_at_most_400_lines():
  long = [path.name for folder in ('bert_jax', 'tests', 'benchmarks', 'launch')
          for path in (PACKAGE.parent / folder).rglob('*.py')
          if len(path.read_text().splitlines()) > 400]
  assert long == []


def test_the_loop_takes_few_parameters_and_a_step_fits_a_screen():
  assert len(inspect.signature(loop.train).parameters) <= 6
  steps, = (node for node in ast.walk(ast.parse(inspect.getsource(loop.train)))
            if isinstance(node, ast.For))
  assert steps.end_lineno - steps.lineno + 1 <= 40
