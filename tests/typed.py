"""Commands as a user types them, run in processes that have imported everything already."""

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import sys

_PRELOADED = ['bert_jax.runs.run', 'bert_jax.interop.conversion', 'bert_jax.inference.predictions',
              'bert_jax.data.preparation', 'bert_jax.evaluation.suites',
              'bert_jax.planning.planner', 'bert_jax.views.show', 'tests.typed']
ROOT = pathlib.Path(__file__).parents[1]


def run_here(module: str, arguments: list[str], environment: dict[str, str], stdin: str, out: str):
  """Becomes the command; redirects the descriptors, to which libraries in C++ write too."""
  os.environ.update(environment)
  read, write = os.pipe()
  os.write(write, stdin.encode())
  os.close(write)
  os.dup2(read, 0)
  sys.stdin = open(0, closefd=False)
  with open(out + '.out', 'w') as output, open(out, 'w') as error:
    os.dup2(output.fileno(), 1)
    os.dup2(error.fileno(), 2)
  sys.stdout = open(1, 'w', closefd=False)
  sys.stderr = open(2, 'w', closefd=False)
  sys.argv = [f'bert_jax/{module}.py', *arguments]
  runpy.run_module(f'bert_jax.{module}', run_name='__main__', alter_sys=True)


@contextlib.contextmanager
def server():
  """Yields a function that runs `python -m bert_jax.MODULE ARGUMENTS`.

  It takes (module, arguments, folder to run in, file for standard error) and, as keywords,
  `environment` and `stdin`. It returns the exit status. Standard output goes to the file's name
  with '.out'. No process has asked JAX for a device before.
  """
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(_PRELOADED)
  before = os.environ.get('PYTHONPATH')
  os.environ['PYTHONPATH'] = str(ROOT)  # for the server, and for processes that commands start

  def run(module, arguments, folder, out, *, environment=(), stdin=''):
    with contextlib.chdir(folder):
      process = context.Process(
          target=run_here, args=(module, arguments, dict(environment), stdin, str(out)))
      process.start()
      process.join(300)
    return process.exitcode

  try:
    yield run
  finally:
    os.environ.pop('PYTHONPATH')
    if before is not None:
      os.environ['PYTHONPATH'] = before
