"""Worker processes in a child process of multiprocessing, as a user's own script may start it."""

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import multiprocessing
from bert_jax.runtime import pool

def nothing():
  pass

def fail():
  try:
    with pool.processes(2, nothing):
      raise ValueError
  except ValueError:
    pass

if __name__ == '__main__':
  for _ in range(6):
    child = multiprocessing.get_context('forkserver').Process(target=fail)
    child.start()
    child.join(60)
    print(child.exitcode)
"""


def test_a_failure_ends_the_workers_silently(tmp_path):
  (tmp_path / 'script.py').write_text(SCRIPT)
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run([sys.executable, tmp_path / 'script.py'], capture_output=True, text=True,
                        env={**os.environ, 'PYTHONPATH': str(root)},
                        timeout=300, check=True)
  assert (done.stdout.split(), done.stderr) == (['0'] * 6, '')
