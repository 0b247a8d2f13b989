"""Errors, and the end of a command: one line on standard error and an exit status for scripts.

  0   done
  2   a mistake in what was given: never worth retrying, nothing was lost or written over
  75  stopped by SIGTERM with everything saved: run the same command to go on
  130 interrupted by Ctrl-C
  1   anything else (a full disk, a dead host, a bug): worth a retry
"""

from collections.abc import Callable, Collection, Sequence
import contextlib
import errno
import glob
import os
import signal
import sys
from typing import Any
import warnings

from absl import app, flags, logging

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells have it
_STORAGE = {'the disk is full': (errno.ENOSPC, errno.EDQUOT),
            'the disk cannot be written': (errno.EROFS, errno.EIO, errno.ESTALE)}
TPU_DEVICES = ('/dev/accel*', '/dev/vfio/[0-9]*')  # as the kernel shows them
# libtpu asks the network for these where there is no TPU, and prints what it does not find.
ABSENT_TPU = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
              'TPU_ACCELERATOR_TYPE': 'v5litepod-16', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
# The libraries whose records of a level say what their errors say, too.
_NOISE = {'ERROR': ('asyncio', 'gcsfs', 'orbax'),
          'WARNING': ('gcsfs', 'tensorflow_datasets', 'urllib3')}
_HELP = {'--help', '-help', '-h', '-?', '--helpshort', '--helpfull'}
# Messages of Python and absl about a flag's value: {beginning: our words}.
_WRONG_VALUES = {'Non-boolean argument': 'give true or false',
                 'invalid literal for int': 'give a whole number',
                 'could not convert string to float': 'give a number'}

before_end: list[Callable[[], None]] = []  # called before `_end` ends the process


class UserError(Exception):
  """A mistake in what was given. The message says in one line what, where and what to do."""

  status = EXIT_MISTAKE


class Failed(Exception):
  """A failure that is no mistake of the user's. The message says in one line what to do."""

  status = EXIT_FAILED


class Preempted(Exception):
  """The run was asked to stop by SIGTERM and has saved everything."""

  status = EXIT_PREEMPTED


def require(condition: bool, message: str):
  """Raises a UserError with `message` unless `condition` holds."""
  if not condition:
    raise UserError(message)


def require_choice(name: str, value: str, choices: Collection[str]):
  """Raises a UserError unless the field `name`, as users type it, has one of the `choices`."""
  require(value in choices, f'{name}={value!r} is unknown: use {", ".join(choices)}')


def require_each(fields: Any, names: Sequence[str], holds: Callable[[Any], bool], rule: str,
                 group: str = ''):
  """Raises a UserError unless `holds` is true for each of the named fields; `rule` says it."""
  for name in names:
    value = getattr(fields, name)
    require(holds(value), f'{group}{name}={value} {rule}')


def whole_numbers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
  """The numbers of a list flag; raises UserError for a value that is no whole number."""
  try:
    return tuple(map(int, values))
  except ValueError as e:
    raise UserError(f'{flag}={",".join(values)}: these are whole numbers') from e


def _with_home(argument: str) -> str:
  """Replaces ~/ at the start of a flag's value: a shell replaces it at the start of a word only."""
  name, equals, value = argument.partition('=')
  is_flag = equals and name.startswith('-') and value.startswith('~/')
  return f'{name}={os.path.expanduser(value)}' if is_flag else argument


def _explained(error: Exception) -> str:
  """The message of an error in the command line, in our words where the value has a wrong type."""
  said = error.__context__
  for start, remedy in _WRONG_VALUES.items():
    if isinstance(said, ValueError) and str(said.args[0]).startswith(start):
      return str(error).replace(str(said), remedy)
  return str(error)


def _end(message: str, status: int):
  print(f'bert_jax: {" ".join(str(message).split())}', file=sys.stderr, flush=True)
  for action in before_end:
    action()
  # Not sys.exit: a writer thread that hangs on a full disk must not keep the process alive.
  sys.stdout.flush()
  os._exit(status)


def storage_trouble(error: BaseException | None) -> str:
  """Names the trouble of the storage that caused `error`, even if a library wrapped it; or ''."""
  while error is not None:
    text = str(error).lower()
    for what, numbers in _STORAGE.items():
      if isinstance(error, OSError) and error.errno in numbers or any(
          os.strerror(number).lower() in text for number in numbers):
        return what
    error = error.__cause__ or error.__context__
  return ''


def machine_trouble(error: Exception) -> str:
  """The line for an error of the machine: its disk or its memory; '' for any other error."""
  if trouble := storage_trouble(error):  # first: tensorstore calls a full disk RESOURCE_EXHAUSTED
    return (f'{trouble}: {error}. What was complete is sound: mend that and run the same command '
            'again')
  if 'RESOURCE_EXHAUSTED' in str(error) or isinstance(error, MemoryError):
    return ('the memory is too small for this: make the batch, its rows or the model smaller '
            f'(bert_jax.plan says what a step takes): {error}')
  return ''


def quiet_libraries():
  """Drops what libraries print of errors that they also raise, and of a TPU that is not there."""

  def unraisable(args):
    # A reader or writer that outlives its purpose.
    code = getattr(args.object, 'cr_code', None)
    if str(args.exc_value) != 'Event loop is closed' and not (code and 'orbax' in code.co_filename):
      sys.__unraisablehook__(args)

  def is_news(record) -> bool:
    origin = {record.name, *record.pathname.split(os.sep)}
    return origin.isdisjoint(_NOISE.get(record.levelname, ()))

  sys.unraisablehook = unraisable
  warnings.filterwarnings('ignore', r"coroutine '.*' was never awaited", RuntimeWarning)
  logging.get_absl_handler().addFilter(is_news)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # TensorFlow's, which may read gs://
  if not any(map(glob.glob, TPU_DEVICES)):
    for variable, value in ABSENT_TPU.items():
      os.environ.setdefault(variable, value)


def _show_help(more: Callable[[], str]):
  with contextlib.suppress(BrokenPipeError):  # its reader has seen enough
    app.usage(shorthelp=True, writeto_stdout=True)
    print(more(), flush=True)
  os._exit(0)  # absl ends with 1


def run_command(main: Callable[[list[str]], None],
                explain: Callable[[list[str]], None] = lambda argv: None,
                rewrite: Callable[[list[str]], list[str]] = list,
                known_only: bool = False,
                more_help: Callable[[], str] = lambda: ''):
  """Runs a command's `main(argv)` with absl flags and the exit statuses above.

  Args:
    main: gets the rest of the command line, without the flags.
    explain: may raise a better UserError for a flag that could not be parsed.
    rewrite: changes the command line before it is parsed.
    known_only: leave unknown flags to `main`.
    more_help: what --help says besides the flags.
  """

  def parse(argv):
    if not _HELP.isdisjoint(argv[1:]):
      _show_help(more_help)
    try:
      argv = rewrite([_with_home(argument) for argument in argv])
      try:
        return flags.FLAGS(argv, known_only=known_only)
      except Exception as e:  # a config file is code, and fails as it likes
        explain(argv)
        raise UserError(_explained(e)) from e
    except UserError as e:
      _end(e, EXIT_MISTAKE)

  def stopped(*_):
    _end('stopped by SIGTERM: run the same command to go on', EXIT_PREEMPTED)

  def guarded(argv):
    signal.signal(signal.SIGTERM, stopped)  # the training loop replaces it
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)  # orbax tells of every file at INFO
      quiet_libraries()
    try:
      if len(argv) > 1 and not known_only:
        raise UserError(f'unexpected argument {argv[1]!r}: flags are written --name=value')
      main(argv)
    except (UserError, Failed, Preempted) as e:
      _end(e, e.status)
    except KeyboardInterrupt as e:
      _end(f'interrupted: {e}' if str(e) else 'interrupted', EXIT_INTERRUPTED)
    except Exception as e:
      explanation = machine_trouble(e)
      if not explanation:
        raise
      _end(explanation, EXIT_FAILED)

  app.run(guarded, flags_parser=parse)
