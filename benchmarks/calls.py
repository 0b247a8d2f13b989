"""Calls of commands of bert_jax by benchmarks."""

import subprocess
import sys


def call(module: str, *arguments: str):
  """Runs `python -m module`, and ends the benchmark if it fails."""
  print('$ python -m', module, *arguments, flush=True)
  status = subprocess.run([sys.executable, '-m', module, *arguments]).returncode
  if status:  # it has printed the reason
    sys.exit(status)
