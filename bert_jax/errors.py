"""The exceptions that end a command with one line, and the exit statuses for scripts.

  0   done
  2   a user error: a retry never helps, and nothing was lost or overwritten
  75  stopped by SIGTERM, a run with everything saved: run the same command again
  130 interrupted by Ctrl-C
  141 the reader of the output ended, as in `... | head`
  1   any other failure (a full disk, a dead host, a bug): worth a retry
"""

from collections.abc import Collection

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130  # by Ctrl-C, as in shells
EXIT_CLOSED = 141  # what shells report for SIGPIPE: the reader of the output ended


class UserError(Exception):
  """A user error. The message says in one line what, where and what to do."""

  status = EXIT_MISTAKE


class Failed(Exception):
  """A failure that the user did not cause. The message says in one line what to do."""

  status = EXIT_FAILED


class Preempted(Exception):
  """SIGTERM stopped the run, which has saved everything."""

  status = EXIT_PREEMPTED


def require(condition: bool, message: str):
  """Raises a UserError with `message` unless `condition` holds."""
  if not condition:
    raise UserError(message)


def require_choice(name: str, value: str, choices: Collection[str]):
  """Raises a UserError unless `value` of the field `name` is one of `choices`."""
  require(value in choices, f'{name}={value!r} is unknown: use {", ".join(choices)}')


def require_flag(name: str, value: str | None, choices: Collection[str]):
  """Raises a UserError unless the flag --name is given, as one of `choices`."""
  wrong = f'--{name}={value} is unknown: use' if value else f'give --{name}, one of'
  require(value in choices, f'{wrong} {", ".join(choices)}')
