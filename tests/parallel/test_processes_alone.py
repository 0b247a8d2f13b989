"""What a process without others does."""

import jax

from bert_jax.parallel import processes


def test_a_tpu_that_knows_of_no_other_host_is_a_run_of_one_process(monkeypatch):
  def initialize(**_):
    raise ValueError('coordinator_address should be defined.')

  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  monkeypatch.setattr(processes, '_is_cluster', lambda: True)
  monkeypatch.setattr(processes, '_on_abort', lambda action: None)
  for name in ('JAX_COORDINATOR_ADDRESS', 'SLURM_STEP_ID'):
    monkeypatch.delenv(name, raising=False)
  with processes.together('auto'):
    processes.agree('config', 'x')  # with nobody
  assert not processes._watching.is_set()
