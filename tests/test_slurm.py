"""launch/slurm.sh on a real Slurm of one node: requeued jobs end with the same bits."""

import getpass
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

from etils import epath
import pytest

from bert_jax.training import integrity
from tests import test_commands
from tests.runtime.test_processes import records  # noqa: F401

PATH = f'{os.environ["PATH"]}:/usr/sbin'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(shutil.which(name, path=PATH) for name in (
        'munged', 'slurmctld', 'slurmd')), reason='needs the packages slurmctld, slurmd, munge'),
]

KILL_WAIT = 20  # seconds between SIGTERM and SIGKILL
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def free_ports(count: int) -> list[int]:
  sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
  ports = [s.getsockname()[1] for s in sockets]
  for s in sockets:
    s.close()
  return ports


def make_checkout(folder: pathlib.Path, venv: pathlib.Path | str) -> pathlib.Path:
  folder.mkdir()
  for name in ('bert_jax', 'launch', 'tests'):
    (folder / name).symlink_to(test_commands.ROOT / name)
  (folder / '.venv').symlink_to(venv)
  return folder


def script(checkout: pathlib.Path, *arguments: str) -> str:
  """The output of launch/slurm.sh."""
  return subprocess.check_output(['bash', 'launch/slurm.sh', *arguments], cwd=checkout, text=True)


def submit(checkout: pathlib.Path, name: str, *flags: str) -> str:
  """Queues a job of two tasks; returns its number."""
  return script(checkout, 'submit', f'--name={name}', '--nodes=1', '--gpus=2', '--time=30', '--',
                *flags).split()[-1]


def ask(*command: str) -> str:
  """The output of a command of Slurm; nothing while slurmctld does not answer."""
  return subprocess.run(command, text=True, stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL).stdout


def until(holds, seconds: float = 600):
  deadline = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.2)


def status_of(job: str) -> tuple[str, ...]:
  """State, exit status (with the signal) and restarts of a job."""
  fields = dict(re.findall(r'(\w+)=(\S+)', ask('scontrol', 'show', 'job', job)))
  return tuple(fields[name] for name in ('JobState', 'ExitCode', 'Restarts'))


def ended(job: str) -> tuple[str, ...]:
  """The status of a job after its end."""
  until(lambda: status_of(job)[0] in ('COMPLETED', 'FAILED', 'CANCELLED'))
  return status_of(job)


def start(folder: pathlib.Path, *command: str) -> subprocess.Popen:
  with open(folder / f'{command[0]}.out', 'w') as out:
    return subprocess.Popen(command, stdout=out, stderr=out)


@pytest.fixture(scope='module')
def checkout(tmp_path_factory):
  """Starts Slurm; yields the folder where launch/slurm.sh runs."""
  folder = tmp_path_factory.mktemp('slurm')
  for name in ('state', 'spool'):
    (folder / name).mkdir()
  for name in ('gpu0', 'gpu1', 'munge.key'):
    (folder / name).touch(mode=0o600)
  (folder / 'munge.key').write_bytes(os.urandom(64))
  (folder / 'gres.conf').write_text(f'Name=gpu File={folder}/gpu[0-1]\n')
  (folder / 'slurm.conf').write_text(CONFIG.format(
      host=socket.gethostname().split('.')[0], user=getpass.getuser(), folder=folder,
      ports=free_ports(2), kill_wait=KILL_WAIT))
  munge = [f'--{name}={folder}/munge.{end}' for name, end in (
      ('key-file', 'key'), ('socket', 'socket'), ('pid-file', 'pid'), ('seed-file', 'seed'))]
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('PATH', PATH)
    patch.setenv('SLURM_CONF', str(folder / 'slurm.conf'))
    daemons = [start(folder, 'munged', '--foreground', '--force', *munge)]
    try:
      until((folder / 'munge.socket').exists, 60)
      daemons += [start(folder, name, '-D') for name in ('slurmctld', 'slurmd')]
      until(lambda: 'idle' in ask('sinfo', '--noheader', '--format=%T'), 60)
      yield make_checkout(folder / 'checkout', sys.prefix)
      ask('scancel', f'--user={getpass.getuser()}')
      until(lambda: not ask('squeue', '--noheader'), 60)
    finally:
      for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(60)


def flags(source, workdir, steps: int) -> tuple[str, ...]:
  return (f'--config={test_commands.CONFIG}', f'--workdir={workdir}',
          f'--config.data.source={source}', '--config.platform=cpu',
          f'--config.train_steps={steps}', f'--config.checkpoint_every={steps}')


def checkpoints(workdir: pathlib.Path) -> dict[int, dict]:
  """The fingerprints of all arrays by step, after a check against the arrays."""
  folder = epath.Path(workdir / 'checkpoints')
  return {step: integrity.check(folder / str(step))['arrays'] for step in integrity.steps(folder)}


def test_a_preempted_job_ends_with_the_same_bits(checkout, records, tmp_path):  # noqa: F811
  alone = submit(checkout, 'alone', *flags(records, tmp_path / 'alone', 120))
  assert ended(alone) == ('COMPLETED', '0:0', '0')
  job = submit(checkout, 'run', *flags(records, tmp_path / 'run', 120))
  test_commands.wait_for_step(tmp_path / 'run', 10)
  # A job of a higher tier takes the node: Slurm requeues the run.
  urgent = ask('sbatch', '--parsable', '--partition=urgent', '--ntasks=2', '--output=/dev/null',
               '--wrap=true').strip()
  assert ended(urgent) == ('COMPLETED', '0:0', '0')
  test_commands.wait_for_step(tmp_path / 'run', 70)
  # As --signal=TERM@120 does before the time limit: status 75 requeues the run.
  ask('scancel', '--signal=TERM', job)
  assert ended(job) == ('COMPLETED', '0:0', '2')
  log = (checkout / 'run.log').read_text()
  stops = sorted({int(step) for step in re.findall('by SIGTERM after step ([0-9]+)', log)})
  assert len(stops) == 2 and 10 <= stops[0] < 70 <= stops[1] < 120, log
  unbroken, preempted = (checkpoints(tmp_path / name) for name in ('alone', 'run'))
  assert list(unbroken) == [120] and list(preempted) == [*stops, 120]
  assert unbroken[120] == preempted[120] != preempted[stops[1]]


def test_cancel_saves_a_checkpoint_and_requeues_nothing(checkout, records, tmp_path):  # noqa: F811
  jobs = [submit(checkout, 'both', *flags(records, tmp_path / 'run', 2000)) for _ in range(2)]
  test_commands.wait_for_step(tmp_path / 'run', 10)
  script(checkout, 'cancel', '--name=both')
  assert ended(jobs[1]) == ('CANCELLED', '0:0', '0')
  assert ended(jobs[0]) == ('FAILED', '75:0', '0')
  (step,) = checkpoints(tmp_path / 'run')
  assert 10 <= step < 2000


# Replaces python: task 1 ends at once, task 0 after some seconds. SIGTERM changes its status.
STUB = """#!/bin/bash
[ $SLURM_PROCID = 0 ] || exit {status}
trap 'status=75' TERM
for i in {{1..{seconds}}}; do sleep 1; done
exit ${{status:-{status}}}
"""


@pytest.mark.parametrize('status, seconds', [(2, 3), (75, KILL_WAIT + 5)])
def test_a_task_that_ends_does_not_stop_the_other(checkout, tmp_path, status, seconds):
  python = tmp_path / 'venv/bin/python'
  python.parent.mkdir(parents=True)
  python.write_text(STUB.format(status=status, seconds=seconds))
  python.chmod(0o755)
  job = submit(make_checkout(tmp_path / 'checkout', tmp_path / 'venv'), 'stub', 'x')
  until(lambda: status_of(job)[0] == 'FAILED' or status_of(job)[2] == '1', 120)
  state, ended_with, restarts = status_of(job)
  ask('scancel', job)
  if status == 75:
    assert restarts == '1' and state != 'FAILED'
  else:
    assert (state, ended_with, restarts) == ('FAILED', f'{status}:0', '0')
