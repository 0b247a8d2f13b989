"""launch/slurm.sh on a real Slurm of one node: which jobs are queued again, and with which bits."""

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

from bert_jax.training import sound
from tests import test_commands
from tests.test_processes import records  # noqa: F401

PATH = f'{os.environ["PATH"]}:/usr/sbin'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(shutil.which(name, path=PATH) for name in (
        'munged', 'slurmctld', 'slurmd')), reason='needs slurmctld, slurmd and munge'),
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


class Cluster:
  """Slurm's daemons in a folder, and a checkout beside them in which launch/slurm.sh is run."""

  def __init__(self, folder: pathlib.Path):
    self.folder, self.checkout = folder, folder / 'checkout'
    self.env = {**os.environ, 'PATH': PATH, 'SLURM_CONF': str(folder / 'slurm.conf')}
    for name in ('state', 'spool', 'checkout'):
      (folder / name).mkdir()
    for name in ('bert_jax', 'launch', 'tests'):
      (self.checkout / name).symlink_to(test_commands.ROOT / name)
    (self.checkout / '.venv').symlink_to(sys.prefix)
    for name in ('gpu0', 'gpu1'):
      (folder / name).touch()
    (folder / 'gres.conf').write_text(f'Name=gpu File={folder}/gpu[0-1]\n')
    (folder / 'slurm.conf').write_text(CONFIG.format(
        host=socket.gethostname().split('.')[0], user=getpass.getuser(), folder=folder,
        ports=free_ports(2), kill_wait=KILL_WAIT))
    (folder / 'munge.key').write_bytes(os.urandom(64))
    (folder / 'munge.key').chmod(0o600)
    munge = [f'--{name}={folder}/munge.{end}' for name, end in (
        ('key-file', 'key'), ('socket', 'socket'), ('pid-file', 'pid'), ('seed-file', 'seed'))]
    self._daemons = [self._start('munged', '--foreground', '--force', *munge)]
    self._until((folder / 'munge.socket').exists)
    self._daemons += [self._start(name, '-D') for name in ('slurmctld', 'slurmd')]
    self._until(lambda: 'idle' in self.ask('sinfo', '--noheader', '--format=%T'))

  def _start(self, *command: str) -> subprocess.Popen:
    with open(self.folder / f'{command[0]}.out', 'w') as out:
      return subprocess.Popen(command, env=self.env, stdout=out, stderr=out)

  def _until(self, holds, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not holds():
      assert time.monotonic() < deadline
      time.sleep(0.2)

  def stop(self):
    """Ends its jobs and daemons."""
    self.ask('scancel', '--state=PENDING', '--state=RUNNING')
    self._until(lambda: not self.ask('squeue', '--noheader'))
    for daemon in reversed(self._daemons):
      daemon.terminate()
      daemon.wait(60)

  def ask(self, *command: str) -> str:
    """What a command of Slurm prints; nothing while slurmctld does not answer."""
    return subprocess.run(command, env=self.env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL).stdout

  def script(self, *arguments: str) -> str:
    """What launch/slurm.sh prints."""
    return subprocess.run(['bash', 'launch/slurm.sh', *arguments], cwd=self.checkout, env=self.env,
                          text=True, stdout=subprocess.PIPE, check=True).stdout

  def submit(self, name: str, *flags: str) -> str:
    """The number of the job."""
    return self.script('submit', f'--name={name}', '--nodes=1', '--gpus=2', '--time=30', '--',
                       *flags).split()[-1]

  def state(self, job: str, *wanted: str) -> tuple[str, ...]:
    """JobState, ExitCode and Restarts of a job, once it is in one of the states."""
    def now():
      return dict(re.findall(r'(\w+)=(\S+)', self.ask('scontrol', 'show', 'job', job)))
    self._until(lambda: now()['JobState'] in wanted, 600)
    return tuple(now()[name] for name in ('JobState', 'ExitCode', 'Restarts'))


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
  started = Cluster(tmp_path_factory.mktemp('slurm'))
  yield started
  started.stop()


def flags(source, workdir, steps: int) -> tuple[str, ...]:
  return (f'--config={test_commands.CONFIG}', f'--workdir={workdir}',
          f'--config.data.source={source}', '--config.platform=cpu',
          f'--config.train_steps={steps}', f'--config.eval_every={steps}',
          f'--config.checkpoint_every={steps}')


def checkpoints(workdir: pathlib.Path) -> dict[int, dict]:
  """The fingerprints of all arrays by step; they are compared with the arrays."""
  folder = epath.Path(workdir / 'checkpoints')
  return {step: sound.check(folder / str(step))['arrays'] for step in sound.steps(folder)}


def test_a_job_that_is_preempted_ends_with_the_same_bits(cluster, records, tmp_path):  # noqa: F811
  alone = cluster.submit('alone', *flags(records, tmp_path / 'alone', 120))
  assert cluster.state(alone, 'COMPLETED', 'FAILED') == ('COMPLETED', '0:0', '0')
  job = cluster.submit('run', *flags(records, tmp_path / 'run', 120))
  test_commands.wait_for_step(tmp_path / 'run', 10)
  # A job of a higher tier takes the node: Slurm queues the run again.
  urgent = cluster.ask('sbatch', '--parsable', '--partition=urgent', '--ntasks=2',
                       '--output=/dev/null', '--wrap=true').strip()
  assert cluster.state(urgent, 'COMPLETED')[1] == '0:0'
  test_commands.wait_for_step(tmp_path / 'run', 70)
  # As --signal=TERM@120 tells the tasks before the time is up: the run's 75 queues it again.
  cluster.ask('scancel', '--signal=TERM', job)
  assert cluster.state(job, 'COMPLETED', 'FAILED') == ('COMPLETED', '0:0', '2')
  log = (cluster.checkout / 'run.log').read_text()
  stops = sorted({int(step) for step in re.findall('by SIGTERM after step ([0-9]+)', log)})
  assert len(stops) == 2 and 10 <= stops[0] < 70 <= stops[1] < 120, log
  unbroken, found = (checkpoints(tmp_path / name) for name in ('alone', 'run'))
  assert list(unbroken) == [120] and list(found) == [*stops, 120]
  assert unbroken[120] == found[120] != found[stops[1]]


def test_cancel_saves_and_is_the_end(cluster, records, tmp_path):  # noqa: F811
  jobs = [cluster.submit('both', *flags(records, tmp_path / 'run', 2000)) for _ in range(2)]
  test_commands.wait_for_step(tmp_path / 'run', 10)
  cluster.script('cancel', '--name=both')
  assert cluster.state(jobs[0], 'FAILED', 'PENDING') == ('FAILED', '75:0', '0')
  assert cluster.state(jobs[1], 'CANCELLED') == ('CANCELLED', '0:0', '0')
  (step,) = checkpoints(tmp_path / 'run')
  assert 10 <= step < 2000


@pytest.mark.parametrize('first, last, seconds, status', [
    (75, 75, KILL_WAIT + 5, 75), (2, 2, 3, 2), (1, 1, 3, 1)])
def test_no_task_is_stopped_because_another_ends(cluster, first, last, seconds, status):
  """In place of python: task 1 ends at once, task 0 later, or with 75 where it is told to stop."""
  (cluster.checkout / '.venv').unlink()
  (cluster.checkout / '.venv/bin').mkdir(parents=True)
  python = cluster.checkout / '.venv/bin/python'
  python.write_text(f"""#!/bin/bash
[ $SLURM_PROCID = 0 ] || exit {first}
trap 'told=75' TERM
for i in {{1..{seconds}}}; do sleep 1; done
exit ${{told:-{last}}}
""")
  python.chmod(0o755)
  job = cluster.submit('stub', 'x')
  if status == 75:
    assert cluster.state(job, 'PENDING', 'FAILED')[2] == '1'
    cluster.script('cancel', '--name=stub')
  else:
    assert cluster.state(job, 'PENDING', 'FAILED') == ('FAILED', f'{status}:0', '0')
  shutil.rmtree(cluster.checkout / '.venv')
  (cluster.checkout / '.venv').symlink_to(sys.prefix)
