"""The processes of a run, one per host: they join, agree, and detect a dead process.

When a process dies, the others hang in a collective, or JAX's coordination service aborts
them with pages of C++ traces. Here every process sends heartbeats, and all end with one
line that names the dead process.
"""

from collections.abc import Callable, Iterator
import contextlib
import ctypes
import glob
import os
import re
import signal
import socket
import sys
import threading
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from bert_jax.errors import EXIT_FAILED, Failed, UserError, require


def _seconds(variable: str, default: float) -> float:
  """A positive number of seconds from the environment."""
  try:
    seconds = float(os.environ.get(variable, default))
  except ValueError:
    seconds = 0.0
  require(0 < seconds < 1e6, f'{variable}={os.environ.get(variable)} must be a positive '
                             'number of seconds')
  return seconds


# A process without a heartbeat for this time is dead. (JAX waits 100 s and names nobody.)
GONE_SECONDS = _seconds('BERT_JAX_GONE_SECONDS', 60)
BEAT_SECONDS = GONE_SECONDS / 12  # between two heartbeats
START_SECONDS = _seconds('BERT_JAX_START_SECONDS', 300)  # until all have joined

# XLA errors that another process cannot cause, such as a step that exceeds the memory.
_OWN_ERRORS = ('RESOURCE_EXHAUSTED', 'INVALID_ARGUMENT', 'UNIMPLEMENTED')

_GONE = 'gone'  # the key under which the first process that detects a death announces it

_runs = 0  # so far in this process; makes the keys of each run unique
_watching = threading.Event()
_ending = threading.Event()  # set once the reason is printed: later errors only repeat it


def _state():
  """JAX's process state, before it has devices; `client` is None with one process."""
  from jax._src import distributed  # not public; orbax uses it, too
  return distributed.global_state


def _key(name: str) -> str:
  return f'bert_jax/{_runs}/{name}'


def _say(message: str):
  print(f'bert_jax: {message}', file=sys.stderr, flush=True)


def _end(message: str):
  """Ends the process from any thread: the main thread may wait for a dead process."""
  _ending.set()
  _say(f'{message}. Saved checkpoints are intact: restart all processes to resume')
  _be_last()
  os._exit(EXIT_FAILED)


def _be_last():
  """Makes process 0 end last, because the coordination service ends with it."""
  if _watching.is_set() and _state().process_id == 0:
    time.sleep(2 * BEAT_SECONDS)


# ---- joining ---------------------------------------------------------------------------


def _reach(address: str, seconds: float):
  """Waits for the coordinator: without one JAX's client aborts the process."""
  host, _, port = address.rpartition(':')
  deadline = time.monotonic() + seconds
  while True:
    try:
      socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
      return
    except OSError as e:
      if time.monotonic() > deadline:
        raise Failed(
            f'the coordinator at {address} is not reachable after {seconds:.0f} s '
            f'({e}): is process 0 running, and is the port open?') from e
      time.sleep(0.5)


def _environment_options(address: str) -> dict:
  # Every process checks this: JAX's service in process 0 would not give the reason.
  match = re.fullmatch(r'.+:([0-9]{1,5})', address)
  require(match and 0 < int(match[1]) < 65536,
          f'JAX_COORDINATOR_ADDRESS={address} is not HOST:PORT, with a port from 1 to 65535')
  try:
    numbers = {name: int(os.environ[f'JAX_{name.upper()}'])
               for name in ('num_processes', 'process_id')}
  except (KeyError, ValueError) as e:
    raise UserError(f'JAX_COORDINATOR_ADDRESS={address} is set, so JAX_NUM_PROCESSES and '
                    f'JAX_PROCESS_ID have to be numbers: {e}') from e
  require(0 <= numbers['process_id'] < numbers['num_processes'],
          f'JAX_PROCESS_ID={numbers["process_id"]} must be at least 0 and below '
          f'JAX_NUM_PROCESSES={numbers["num_processes"]}')
  if numbers['process_id']:
    _reach(address, START_SECONDS)
  return {'coordinator_address': address, **numbers}


def _is_cluster(platform: str) -> bool:
  """True if JAX can find the other processes itself: in Slurm or on a TPU slice."""
  # Not SLURM_NTASKS: an interactive shell is a step of one task, but has the job's value.
  if int(os.environ.get('SLURM_STEP_NUM_TASKS', 1)) > 1:
    return True
  return platform != 'cpu' and bool(
      glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))


def _has_devices() -> bool:
  """True if JAX has initialized its devices, as in a notebook: too late to join."""
  from jax._src import xla_bridge  # not public
  return xla_bridge.backends_are_initialized()


def _join(platform: str):
  """Joins the other processes of this run before JAX is used, once.

  The environment names the processes: JAX_COORDINATOR_ADDRESS (host:port of the first
  process), JAX_NUM_PROCESSES and JAX_PROCESS_ID. On the hosts of a TPU slice (VMs, GKE)
  and in a Slurm job step of several tasks JAX finds them itself. Any other run has one
  process.
  """
  address = os.environ.get('JAX_COORDINATOR_ADDRESS')
  if jax.distributed.is_initialized() or not (address or _is_cluster(platform)):
    return
  if not address and _has_devices():
    # A notebook on one TPU host has nobody to join.
    if jax.process_count() == 1:
      return
    raise Failed(
        f'JAX was used before the run started, and its {jax.process_count()} processes '
        'have not joined each other: start the run before any use of JAX')
  options = _environment_options(address) if address else {}
  # On a timeout JAX's client aborts in C++: Python cannot catch that.
  _on_abort(
      lambda: _end(f'not all processes of this run joined within {START_SECONDS:.0f} s'))
  try:
    jax.distributed.initialize(initialization_timeout=int(START_SECONDS), **options)
  except (RuntimeError, ValueError) as e:
    # A single TPU host, a notebook for example, has no list of hosts.
    if isinstance(e, ValueError) and not address and 'SLURM_STEP_ID' not in os.environ:
      return
    raise Failed(f'the processes of this run could not join each other: {e}') from e
  finally:
    _on_abort(None)


# ---- agreeing --------------------------------------------------------------------------


def meet(name: str):
  """Waits until all processes call it; raises Failed and names the missing ones."""
  client = _state().client
  if client is None:
    return
  try:
    client.wait_at_barrier(_key(name), timeout_in_ms=int(1000 * START_SECONDS))
  except RuntimeError as e:
    missing = re.search(r'timed out task names:\s*([\d\s,]+)', str(e))
    who = ', '.join(missing[1].split()) if missing else 'some'
    raise Failed(f'process {who} of {jax.process_count()} did not reach {name!r} within '
                 f'{START_SECONDS:.0f} s') from e


def agree(name: str, value: str):
  """Raises UserError if the processes differ in `value`; names the first that differs."""
  client = _state().client
  if client is None:
    return
  client.key_value_set(_key(f'{name}/{jax.process_index()}'), value)
  meet(name)
  first, *others = (client.blocking_key_value_get(_key(f'{name}/{i}'), 10_000)
                    for i in range(jax.process_count()))
  for i, other in enumerate(others, 1):
    if other != first:
      pairs = zip(first.splitlines(), other.splitlines())
      a, b = next(((a, b) for a, b in pairs if a != b), ('more lines', 'fewer lines'))
      raise UserError(f'process {i} has another {name} than process 0: '
                      f'{b.strip()[:80]!r} and {a.strip()[:80]!r}')


def from_first(name: str, value: str) -> str:
  """Returns the value of process 0 in every process."""
  client = _state().client
  if client is None:
    return value
  if not jax.process_index():
    client.key_value_set(_key(name), value)
  return client.blocking_key_value_get(_key(name), int(1000 * START_SECONDS))


def gathered(value: float) -> list[float]:
  """Returns the value of each process; all processes must call it."""
  if jax.process_count() == 1:
    return [value]
  return multihost_utils.process_allgather(np.float32(value)).tolist()


def anywhere(value: bool) -> bool:
  """True if `value` is true in any process; all processes must call it."""
  return any(gathered(value))


def barrier():
  """Waits for all processes."""
  anywhere(False)


# ---- watching --------------------------------------------------------------------------


def _watch():
  """Sends heartbeats of this process, and ends it when another process sends none."""
  state = _state()  # not jax.process_index(): the platform may not be selected yet
  client, count = state.client, state.num_processes
  beat = 0
  last_beats = {}  # process -> (its last beat, when it changed)
  service_heard_at = time.monotonic()
  while _watching.is_set():
    try:
      beat += 1
      client.key_value_set(f'bert_jax/alive/{state.process_id}', str(beat),
                           allow_overwrite=True)
      beats = {key.rpartition('/')[2]: value
               for key, value in client.key_value_dir_get('bert_jax/alive')}
    except Exception:
      # A short outage, or the service is dead: `_on_abort` reports the latter.
      if time.monotonic() - service_heard_at > GONE_SECONDS:
        return
      time.sleep(BEAT_SECONDS)
      continue
    service_heard_at = now = time.monotonic()
    # Another process detected the death first. Its message is the same on all hosts.
    if _GONE in beats:
      _end(beats[_GONE])
    process = _silent(range(count), beats, last_beats, now)
    if process is not None and _watching.is_set():
      verdict = (f'process {process} of {count} is gone: no heartbeat for '
                 f'{GONE_SECONDS:.0f} s')
      with contextlib.suppress(Exception):  # the others detect the death themselves
        client.key_value_set(f'bert_jax/alive/{_GONE}', verdict, allow_overwrite=True)
      _end(verdict)
    time.sleep(BEAT_SECONDS)


def _silent(processes: range, beats: dict[str, str], last_beats: dict,
            now: float) -> int | None:
  """The first process without a new beat for `GONE_SECONDS`; None = all are alive.

  For a process that has sent no beat yet, the time counts from the first call. Updates
  `last_beats`.
  """
  for process in processes:
    beat, since = beats.get(str(process)), now
    if process in last_beats and last_beats[process][0] == beat:
      since = last_beats[process][1]
    last_beats[process] = beat, since
    if now - since > GONE_SECONDS:
      return process
  return None


def _on_abort(action: Callable[[], None] | None):
  """Runs `action` when C++ code aborts the process; None = no action.

  A Python signal handler would never run, because it waits for the interpreter.
  """
  if action is None:
    ctypes.CDLL(None).signal(signal.SIGABRT, None)
    return

  # An attribute keeps the callback alive: ctypes does not.
  _on_abort.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: action())
  ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort.handler)


def _explain(error: Exception):
  """Waits for `_watch` to name the dead process, if a death caused the error.

  A collective fails at once when another process dies; `_watch` needs `GONE_SECONDS`.
  """
  if (not isinstance(error, jax.errors.JaxRuntimeError)
      or str(error).startswith(_OWN_ERRORS)):
    _be_last()  # the error is this process's own, or all processes have it
    return
  if not _ending.is_set():
    _say('an exchange with the other processes failed '
         f'({str(error).splitlines()[0][:200]}): waiting to learn which process is gone')
  time.sleep(GONE_SECONDS + 4 * BEAT_SECONDS)  # `_watch` ends the process earlier


@contextlib.contextmanager
def together(platform: str = 'auto') -> Iterator[None]:
  """Joins the other processes of the run, if any, and watches them until it ends.

  Raises UserError or Failed if this process cannot join them.
  """
  global _runs
  _join(platform)
  _runs += 1
  if (_state().num_processes or 1) == 1:
    yield
    return
  _on_abort(lambda: _end('process 0 is gone, where the coordination service ran'))
  _watching.set()
  threading.Thread(target=_watch, name='watch', daemon=True).start()
  try:
    yield
    # At exit JAX waits 100 s for a dead process, then aborts without naming it.
    meet('end')
  except Exception as e:
    _explain(e)
    raise
  finally:
    _watching.clear()
    _on_abort(None)
