"""Runs commands of bert_jax for benchmarks."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from absl import app, flags


def keep_flags(workdir: pathlib.Path, *names: str):
  """Creates WORKDIR; ends the benchmark if it has results with other values of these flags.

  One table compares only results of the same flags.
  """
  given = {name: flags.FLAGS[name].value for name in names}
  path = workdir / 'flags.json'
  before = json.loads(path.read_text()) if path.exists() else {}
  for name, value in given.items():
    if before.get(name, value) != value:
      raise app.UsageError(f'--workdir has runs with --{name}={before[name]}, not {value}: give '
                           'another --workdir')
  workdir.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(before | given, indent=2) + '\n')


def call(module: str, *arguments: str, quiet: bool = False):
  """Runs `python -m module`, and ends the benchmark if it fails.

  With `quiet`, the command prints only its error, because others run at the same time.
  """
  # One write for a line: other calls may print at the same time.
  sys.stdout.write(' '.join(['$ python -m', module, *arguments]) + '\n')
  sys.stdout.flush()
  done = subprocess.run([sys.executable, '-m', module, *arguments], capture_output=quiet,
                        text=True)
  if done.returncode:
    sys.exit(f'{module} ended with {done.returncode}:\n{done.stderr[-2000:]}' if quiet
             else done.returncode)


def evaluate(output: pathlib.Path, suite: str, data: str, *arguments: str,
             quiet: bool = False) -> dict[str, Any]:
  """Returns the report of an evaluation, which an earlier start may have written."""
  if not output.exists():
    call('bert_jax.evaluate', f'--suite={suite}', f'--data={data}', f'--output={output}',
         *arguments, quiet=quiet)
  report = json.loads(output.read_text())
  if report['data'] != data:
    sys.exit(f'{output} has the scores of {report["data"]}, not of {data}: use another folder')
  return report
