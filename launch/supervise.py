"""Restarts a run after each failure until it is done.

  python launch/supervise.py --config=configs/base.py --workdir=runs/base [FLAGS OF main] \
      [--attempts=3]

It ends when the run is done (exit status 0), and after a mistake (2) or Ctrl-C (130).
After anything else it restarts the run from the newest checkpoint. After --attempts
failures without a new checkpoint it stops with the last exit status. It forwards SIGTERM
to the run, and ends with status 75 after the run has saved everything.
"""

import os
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
  """The newest checkpoint's step, -1 if there is none.

  Reads only the names in the folder, because JAX is slow to import.
  """
  folder = epath.Path(workdir) / 'checkpoints'
  if not folder.exists():
    return -1
  return max((int(path.name) for path in folder.iterdir() if path.name.isdigit()),
             default=-1)


def _say(message: str):
  print(f'supervise: {message}', file=sys.stderr, flush=True)


def _exit_status(status: int) -> int:
  """The exit status of a process; a signal, which is below 0, counts as a failure."""
  return status if status >= 0 else errors.EXIT_FAILED


class Supervisor:
  """Restarts a command."""

  def __init__(self, command: list[str], workdir: str):
    self._command, self._workdir = command, workdir
    self._running, self._terminated = None, False

  def _forward(self, number, _):
    self._terminated = True
    if self._running and self._running.poll() is None:
      self._running.send_signal(number)

  def run(self, attempts: int, pause: float) -> int:
    """Returns the exit status of the last run."""
    signal.signal(signal.SIGTERM, self._forward)
    # The run keeps the current folder, so that relative paths work.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    failures, failed_at = 0, None
    while True:
      self._running = subprocess.Popen(self._command,
                                       env={**os.environ, 'PYTHONPATH': path})
      if self._terminated:  # SIGTERM came before there was a process to forward it to
        self._running.send_signal(signal.SIGTERM)
      status = self._running.wait()
      if self._terminated:
        # The signal may have killed the run before it could save and return 75.
        stopped = status == -signal.SIGTERM
        return errors.EXIT_PREEMPTED if stopped else _exit_status(status)
      if status in _ENDS:
        return status
      step = newest_step(self._workdir)
      # A preemption is not a failure: it may repeat any number of times.
      if status == errors.EXIT_PREEMPTED:
        continue
      # A new checkpoint is progress, so the count starts again.
      failures, failed_at = (failures + 1 if step == failed_at else 1), step
      where = (f'after the checkpoint of step {step}' if step >= 0
               else 'before its first checkpoint')
      if failures == attempts:
        _say(f'the run failed {failures} times {where}, the last time with status '
             f'{status}: stopped')
        return _exit_status(status)
      seconds = pause * 2 ** (failures - 1)
      _say(f'the run failed {where} with status {status}: '
           f'started again in {seconds:.0f} s')
      # Short sleeps, because SIGTERM does not end a sleep. (An Event can deadlock if its
      # own thread sets it in a signal handler.)
      until = time.monotonic() + seconds
      while not self._terminated and time.monotonic() < until:
        time.sleep(0.1)
      if self._terminated:
        return errors.EXIT_PREEMPTED


def main(argv: list[str]):
  """Supervises the run that the flags give."""
  given = flags.FLAGS
  if not given.workdir:
    raise errors.UserError('give --config=FILE and --workdir=DIR, as for bert_jax.main')
  command = [
      sys.executable, '-m', 'bert_jax.main', f'--workdir={given.workdir}', *argv[1:]
  ]
  sys.exit(Supervisor(command, given.workdir).run(given.attempts, given.pause))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Folder of the run, local or gs://.')
  flags.DEFINE_integer(
      'attempts', 3, 'Failures in a row at the same step before it stops.', lower_bound=1)
  flags.DEFINE_float(
      'pause', 10,
      'Seconds before the second attempt; each later pause is twice as long.',
      lower_bound=0)
  command.run_command(main, known_only=True)
