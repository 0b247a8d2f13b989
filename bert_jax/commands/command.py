"""Runs a command: parses flags, shows help, and ends with one line and an exit status."""

from collections.abc import Callable, Sequence
import contextlib
import os
import select
import signal
import sys
from typing import Any

from absl import app, flags, logging

from bert_jax import errors
from bert_jax.errors import Failed, Preempted, UserError
from bert_jax.runtime import ending, quiet

_HELP = {'--help', '-help', '-h', '-?', '--helpshort', '--helpfull'}
# {beginning of a message by Python or absl about a flag's value: our message}
_WRONG_VALUES = {'Non-boolean argument': 'give true or false',
                 'invalid literal for int': 'give a whole number',
                 'could not convert string to float': 'give a number'}


def numbers(flag: str, values: Sequence[str], kind: type = int) -> tuple[Any, ...]:
  """Parses the values of a list flag; raises UserError if one is not of this kind."""
  try:
    return tuple(map(kind, values))
  except ValueError as e:
    what = 'whole numbers' if kind is int else 'numbers'
    raise UserError(f'{flag}={",".join(values)}: give {what}') from e


def _with_home(argument: str) -> str:
  """Expands ~/ at the start of a flag's value; shells only do so at a word's start."""
  name, equals, value = argument.partition('=')
  is_flag = equals and name.startswith('-') and value.startswith('~/')
  return f'{name}={os.path.expanduser(value)}' if is_flag else argument


def _explained(error: Exception) -> str:
  """The message of a flag error, with a remedy if the value has the wrong type."""
  cause = error.__context__
  for start, remedy in _WRONG_VALUES.items():
    if isinstance(cause, ValueError) and str(cause.args[0]).startswith(start):
      return str(error).replace(str(cause), remedy)
  return str(error)


def _show_help(more: Callable[[], str]):
  # absl lists the flags of the main module: list the shared flags that it imports, too.
  for module, shared in flags.FLAGS.flags_by_module_dict().items():
    for flag in shared if module.startswith('bert_jax.commands.') else ():
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  with contextlib.suppress(BrokenPipeError):  # `--help | head` closes the pipe
    app.usage(shorthelp=True, writeto_stdout=True)
    print(more(), flush=True)
  os._exit(0)  # absl exits with 1


def _end_without_reader():
  """Ends silently if the reader of the output has ended, as in `predict | head`."""
  # The pipe of a worker process may break too: that is a bug, and needs its traceback.
  output = select.poll()
  output.register(sys.stdout.fileno(), 0)
  if output.poll(0):
    for action in ending.before_end:
      action()
    os._exit(errors.EXIT_CLOSED)


def run_command(main: Callable[[list[str]], None],
                explain: Callable[[list[str]], None] = lambda argv: None,
                rewrite: Callable[[list[str]], list[str]] = list,
                known_only: bool = False,
                more_help: Callable[[], str] = lambda: ''):
  """Runs a command's `main(argv)` with absl flags and the exit statuses of `errors`.

  Args:
    main: the command; gets the command line without the flags.
    explain: may raise a more helpful UserError after a flag failed to parse.
    rewrite: changes the command line before it is parsed.
    known_only: True = pass unknown flags to `main`.
    more_help: the text of --help after the flags.
  """

  def parse(argv):
    if not _HELP.isdisjoint(argv[1:]):
      _show_help(more_help)
    try:
      argv = rewrite([_with_home(argument) for argument in argv])
      try:
        return flags.FLAGS(argv, known_only=known_only)
      except Exception as e:  # a config file is code, which may raise anything
        explain(argv)
        raise UserError(_explained(e)) from e
    except UserError as e:
      ending.end(e, errors.EXIT_MISTAKE)

  def stopped(*_):
    ending.end('stopped by SIGTERM: run the same command to continue',
               errors.EXIT_PREEMPTED)

  def guarded(argv):
    signal.signal(signal.SIGTERM, stopped)  # the training loop replaces this handler
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)  # orbax logs every file at INFO
      quiet.quiet_libraries()
    try:
      # absl passes a word without -- on to `main`, where nothing would read it.
      if len(argv) > 1 and not known_only:
        raise UserError(f'unexpected argument {argv[1]!r}: write flags as --name=value')
      main(argv)
    except (UserError, Failed, Preempted) as e:
      ending.end(e, e.status)
    except KeyboardInterrupt as e:
      ending.end(f'interrupted: {e}' if str(e) else 'interrupted',
                 errors.EXIT_INTERRUPTED)
    except Exception as e:
      if isinstance(e, BrokenPipeError):
        _end_without_reader()
      # A traceback is only for bugs, not for a full disk.
      explanation = ending.machine_trouble(e)
      if not explanation:
        raise
      ending.end(explanation, errors.EXIT_FAILED)

  app.run(guarded, flags_parser=parse)
