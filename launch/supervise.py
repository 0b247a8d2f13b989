"""Keeps a run going: starts main again after whatever ended it, until it is done.

  python launch/supervise.py --config=configs/base.py --workdir=runs/base [FLAGS OF main] \
      [--attempts=3]

A run that is done (exit status 0), a mistake (2) and Ctrl-C (130) end it. After anything else it
starts the run again, from the newest checkpoint. After --attempts failures without a new checkpoint
it gives up, with the last exit status. It passes SIGTERM on to the run, and ends (75) once the run
has saved everything.
"""

import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402
from etils import epath  # noqa: E402

from bert_jax import errors  # noqa: E402
from bert_jax.commands import command  # noqa: E402

_ENDS = (0, errors.EXIT_MISTAKE, errors.EXIT_INTERRUPTED)


def newest_step(workdir: str) -> int:
  """Of the checkpoints, -1 if there is none. Asks the folder alone: JAX takes long to import."""
  folder = epath.Path(workdir) / 'checkpoints'
  if not folder.exists():
    return -1
  return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=-1)


def _say(message: str):
  print(f'supervise: {message}', file=sys.stderr, flush=True)


def _exit_status(status: int) -> int:
  """The status of a process that ended with `status`: a signal, below 0, is a failure."""
  return status if status >= 0 else errors.EXIT_FAILED


class Supervisor:
  """Runs a command again and again."""

  def __init__(self, command: list[str], workdir: str):
    self._command, self._workdir = command, workdir
    self._running, self._told = None, False

  def _pass_on(self, number, _):
    self._told = True
    if self._running and self._running.poll() is None:
      self._running.send_signal(number)

  def run(self, attempts: int, pause: float) -> int:
    """The exit status that the last run ended with, or would have."""
    signal.signal(signal.SIGTERM, self._pass_on)
    failures, failed_at = 0, None
    while True:
      self._running = subprocess.Popen(self._command)
      if self._told:  # before there was something to pass it on to
        self._running.send_signal(signal.SIGTERM)
      status = self._running.wait()
      if self._told:
        return errors.EXIT_PREEMPTED if status == -signal.SIGTERM else _exit_status(status)
      if status in _ENDS:
        return status
      step = newest_step(self._workdir)
      if status == errors.EXIT_PREEMPTED:
        continue
      failures, failed_at = (failures + 1 if step == failed_at else 1), step
      where = f'after the checkpoint of step {step}' if step >= 0 else 'before its first checkpoint'
      if failures == attempts:
        _say(f'the run failed {failures} times {where}, the last time with status {status}: given '
             'up')
        return _exit_status(status)
      seconds = pause * 2 ** (failures - 1)
      _say(f'the run failed {where} with status {status}: started again in {seconds:.0f} s')
      time.sleep(seconds)
      if self._told:
        return errors.EXIT_PREEMPTED


def main(argv: list[str]):
  """Flags in, one run."""
  given = flags.FLAGS
  if not given.workdir:
    raise errors.UserError('give --config=FILE and --workdir=DIR, as for bert_jax.main')
  command = [sys.executable, '-m', 'bert_jax.main', f'--workdir={given.workdir}', *argv[1:]]
  sys.exit(Supervisor(command, given.workdir).run(given.attempts, given.pause))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Folder of the run, local or gs://.')
  flags.DEFINE_integer('attempts', 3, 'Failures in a row at the same step.', lower_bound=1)
  flags.DEFINE_float('pause', 10, 'Seconds before the second attempt; they double.')
  command.run_command(main, known_only=True)
