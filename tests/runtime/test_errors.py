"""Errors that no user caused."""

import asyncio
import gc
import glob
import logging as python_logging
import os
import subprocess
import sys
import threading
import types
import warnings

from absl import logging
import jax
import pytest
import tensorstore

from bert_jax.runtime import ending, quiet


@pytest.mark.parametrize('cause, expected', [
    (OSError(28, 'No space left on device'), 'the disk is full'),
    (ValueError('PERMISSION_DENIED: ... [OS error 30: EROFS Read-only file system]'),
     'the disk cannot be written'),
    (OSError(2, 'No such file or directory'), '')])
def test_a_storage_error_is_recognized_by_its_cause(cause, expected):
  error = ValueError('a save failed')
  error.__cause__ = cause
  assert ending.storage_trouble(error) == expected


FULL = ('RESOURCE_EXHAUSTED: Error writing local file "x": Failed to write: '
        '[OS error 28: ENOSPC No space left on device]')


@pytest.mark.parametrize('error, expected', [
    (ValueError(FULL), 'the disk is full: '),
    (jax.errors.JaxRuntimeError(FULL), 'the disk is full: '),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'), 'out of memory'),
    (MemoryError(), 'out of memory'), (ValueError('a bug'), '')])
def test_a_full_disk_is_not_reported_as_out_of_memory(error, expected):
  explanation = ending.machine_trouble(error)
  assert explanation.startswith(expected) and bool(explanation) == bool(expected)


def test_a_process_ends_with_its_status_though_nobody_reads_its_output():
  code = ('import os, signal; signal.signal(signal.SIGPIPE, signal.SIG_IGN); '
          'print("a result"); from bert_jax.runtime import ending; ending.end("a mistake", 2)')
  readers, writer = os.pipe()
  os.close(readers)
  buffered = os.environ | {'PYTHONUNBUFFERED': ''}  # so that the print itself does not fail
  assert subprocess.run([sys.executable, '-c', code], stdout=writer, stderr=writer,
                        env=buffered).returncode == 2


def test_writers_that_outlive_a_failed_save_are_quiet(monkeypatch, handler):
  reported = []
  monkeypatch.setattr(sys, '__unraisablehook__', reported.append)
  monkeypatch.setattr(sys, 'unraisablehook', None)
  warnings.resetwarnings()
  quiet.quiet_libraries()
  for is_quiet in (True, False):
    promise, future = tensorstore.Promise.new()

    async def wait(future=future):
      await future

    async def begin(wait=wait):
      waiting.append(asyncio.ensure_future(wait()))
      await asyncio.sleep(0)

    loop, waiting = asyncio.new_event_loop(), []
    loop.run_until_complete(begin())
    loop.close()
    if not is_quiet:  # another error in the same place
      monkeypatch.setattr(loop, 'call_soon_threadsafe', lambda *_, **__: 1 / 0)
    done = threading.Thread(target=promise.set_result, args=(1,))
    done.start()
    done.join()
  class Abandoned:  # like a coroutine that is dropped after its failure
    def __init__(self, path):
      self.cr_code = compile('', path, 'exec')

  for path in ('site-packages/orbax/checkpoint/reading.py', 'ours.py'):
    sys.unraisablehook(types.SimpleNamespace(object=Abandoned(path), exc_value=ValueError(path)))
  assert [str(args.exc_value) for args in reported] == ['division by zero', 'ours.py']

  async def never():
    pass

  with warnings.catch_warnings(record=True) as warned:
    never()
    gc.collect()
    warnings.warn('another', stacklevel=1)
  assert [str(each.message) for each in warned] == ['another']
  shown = [handler.filter(python_logging.LogRecord(name, level, path, 1, '', (), None))
           for name, level, path in (('asyncio', 40, 'base_events.py'), ('absl', 40, 'orbax/x.py'),
                                     ('absl', 30, 'orbax/x.py'), ('absl', 40, 'ours.py'))]
  assert [bool(x) for x in shown] == [False, False, True, True]


@pytest.fixture
def handler(monkeypatch):
  """A log handler of absl with only the filters of `quiet_libraries`."""
  absl_handler = python_logging.Handler()
  monkeypatch.setattr(logging, 'get_absl_handler', lambda: absl_handler)
  for variable in ('TF_CPP_MIN_LOG_LEVEL', *quiet.ABSENT_TPU):
    monkeypatch.setenv(variable, 'x')
    monkeypatch.delenv(variable)
  return absl_handler


@pytest.mark.parametrize('file, level, is_news', [
    ('gcsfs/retry.py', 'ERROR', False), ('gcsfs/extended_gcsfs.py', 'WARNING', False),
    ('urllib3/connectionpool.py', 'WARNING', False), ('urllib3/connectionpool.py', 'ERROR', True),
    ('tensorflow_datasets/core/utils/file_utils.py', 'WARNING', False),
    ('asyncio/base_events.py', 'ERROR', False), ('orbax/checkpoint/save.py', 'ERROR', False),
    ('orbax/checkpoint/save.py', 'WARNING', True), ('bert_jax/training/loop.py', 'WARNING', True),
    ('bert_jax/training/loop.py', 'ERROR', True), ('my_gcsfs/retry.py', 'ERROR', True)])
def test_logs_that_repeat_the_errors_of_libraries_are_dropped(handler, file, level, is_news):
  quiet.quiet_libraries()
  record = python_logging.LogRecord('x', getattr(python_logging, level), f'/lib/{file}', 1, 'm', (),
                                    None)
  assert bool(handler.filter(record)) == is_news


@pytest.mark.parametrize('devices, expected', [
    ((), quiet.ABSENT_TPU | {'TPU_ACCELERATOR_TYPE': 'v4-8'}),
    (('accel0',), {'TPU_ACCELERATOR_TYPE': 'v4-8'}),
    (('vfio/0',), {'TPU_ACCELERATOR_TYPE': 'v4-8'})])
def test_tpu_variables_are_set_if_no_tpu_exists(handler, monkeypatch, tmp_path, devices, expected):
  for name in devices:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  monkeypatch.setattr(quiet, 'TPU_DEVICES', tuple(
      path.replace('/dev', str(tmp_path)) for path in quiet.TPU_DEVICES))
  monkeypatch.setenv('TPU_ACCELERATOR_TYPE', 'v4-8')  # a set variable stays
  quiet.quiet_libraries()
  assert {name: os.environ[name] for name in quiet.ABSENT_TPU if name in os.environ} == expected


@pytest.mark.skipif(any(map(glob.glob, quiet.TPU_DEVICES)), reason='there is a TPU')
def test_jax_starts_silently_without_a_tpu():
  pytest.importorskip('libtpu')
  script = ('from bert_jax.commands import command\n'
            'def main(argv):\n  import jax\n  print(jax.default_backend())\n'
            'command.run_command(main)')
  environment = {name: value for name, value in os.environ.items()
                 if name not in ('JAX_PLATFORMS', *quiet.ABSENT_TPU)}
  done = subprocess.run([sys.executable, '-c', script], env=environment, text=True,
                        capture_output=True)
  assert (done.stdout, done.stderr) == ('cpu\n', '')
