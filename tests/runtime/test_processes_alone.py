"""A process that runs alone."""

import threading

import jax
import pytest

from bert_jax.errors import Failed, UserError
from bert_jax.runtime import processes


@pytest.fixture
def tpu(monkeypatch):
  """Simulates a machine with a TPU; returns the list of calls that join processes."""
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **options: calls.append(options))
  monkeypatch.setattr(processes, '_is_cluster', lambda platform: True)
  monkeypatch.setattr(processes, '_on_abort', lambda action: None)
  for name in ('JAX_COORDINATOR_ADDRESS', 'SLURM_STEP_ID'):
    monkeypatch.delenv(name, raising=False)
  return calls


def test_a_tpu_without_other_hosts_runs_as_one_process(tpu, monkeypatch):
  def initialize(**_):
    raise ValueError('coordinator_address should be defined.')

  monkeypatch.setattr(processes, '_has_devices', lambda: False)
  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  with processes.together('auto'):
    processes.agree('config', 'x')  # with nobody
  assert not processes._watching.is_set()


def test_the_hosts_of_a_slice_are_joined_once(tpu, monkeypatch):
  monkeypatch.setattr(processes, '_has_devices', lambda: False)
  aborts = []
  monkeypatch.setattr(processes, '_on_abort', aborts.append)
  with processes.together('auto'):
    assert len(tpu) == 1
    assert len(aborts) == 2 and aborts[1] is None  # the handler of aborts is only for joining
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  with processes.together('auto'):
    assert len(tpu) == 1


def test_the_tasks_of_a_slurm_step_are_joined_on_any_platform(monkeypatch):
  calls = []
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **options: calls.append(options))
  monkeypatch.setattr(processes, '_on_abort', lambda action: None)
  monkeypatch.setattr(processes, '_has_devices', lambda: False)
  monkeypatch.delenv('JAX_COORDINATOR_ADDRESS', raising=False)
  monkeypatch.setenv('SLURM_STEP_ID', '0')
  monkeypatch.setenv('SLURM_NTASKS', '2')  # of the job, in an interactive shell
  for tasks, joined in (('1', 0), ('2', 1)):
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', tasks)
    with processes.together('cpu'):
      assert len(calls) == joined


def test_a_process_id_outside_the_run_is_refused(monkeypatch):
  for name, value in (('NUM_PROCESSES', '2'), ('PROCESS_ID', '2')):
    monkeypatch.setenv(f'JAX_{name}', value)
  with pytest.raises(UserError, match='JAX_PROCESS_ID=2 must be at least 0 and below JAX_NUM_PROC'):
    processes._environment_options('localhost:1')


@pytest.mark.parametrize('process', ['0', '1'])
@pytest.mark.parametrize('address', ['host', 'host:', ':80', 'host:x', 'host:0', 'host:65536'])
def test_a_wrong_coordinator_address_is_refused(monkeypatch, address, process):
  for name, value in (('NUM_PROCESSES', '2'), ('PROCESS_ID', process)):
    monkeypatch.setenv(f'JAX_{name}', value)
  monkeypatch.setattr(processes, '_reach', lambda *_: pytest.fail('it connects'))
  with pytest.raises(UserError) as error:
    processes._environment_options(address)
  assert str(error.value) == (f'JAX_COORDINATOR_ADDRESS={address} is not HOST:PORT, with a port '
                              'from 1 to 65535')


def test_a_coordinator_address_is_accepted(monkeypatch):
  for name, value in (('NUM_PROCESSES', '2'), ('PROCESS_ID', '0')):
    monkeypatch.setenv(f'JAX_{name}', value)
  for address in ('host:1', '[::1]:65535'):
    assert processes._environment_options(address)['coordinator_address'] == address


@pytest.mark.parametrize('value', ['60s', '0', '-1', 'nan'])
def test_a_wrong_number_of_seconds_is_refused(monkeypatch, value):
  monkeypatch.setenv('BERT_JAX_GONE_SECONDS', value)
  with pytest.raises(UserError, match=f'BERT_JAX_GONE_SECONDS={value} must be a positive number'):
    processes._seconds('BERT_JAX_GONE_SECONDS', 60)


def test_after_jax_was_used_one_host_runs_and_several_hosts_fail(tpu, monkeypatch):
  jax.devices()
  with processes.together('auto'):
    assert not tpu
  monkeypatch.setattr(jax, 'process_count', lambda: 4)  # of a slice of several hosts
  with pytest.raises(Failed, match='JAX was used before the run started'):
    processes._join('auto')


@pytest.mark.parametrize('ending', [True, False])
def test_the_last_line_names_the_process_that_is_gone(monkeypatch, capsys, ending):
  """Process 0 names it and waits; the others end, so its exchanges with them fail."""
  monkeypatch.setattr(processes, 'GONE_SECONDS', 0)
  monkeypatch.setattr(processes, 'BEAT_SECONDS', 0)
  monkeypatch.setattr(processes.os, '_exit', lambda code: None)
  monkeypatch.setattr(processes, '_ending', threading.Event())
  if ending:
    processes._end('process 2 of 4 is gone')
  processes._explain(jax.errors.JaxRuntimeError('UNKNOWN: Connection closed by peer'))
  last = capsys.readouterr().err.splitlines()[-1]
  assert last.startswith('bert_jax: process 2 of 4' if ending else 'bert_jax: an exchange'), last
