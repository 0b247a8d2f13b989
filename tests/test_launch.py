"""What the launch scripts would do, to the letter; and that shellcheck has nothing to say."""

import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = ('--config=configs/base.py', '--workdir=gs://my bucket/run')
TPU = 'gcloud compute tpus tpu-vm'


def launch(script, *arguments, status=0):
  done = subprocess.run(['bash', f'launch/{script}.sh', *arguments], cwd=ROOT, text=True,
                        capture_output=True)
  assert done.returncode == status, done.stderr
  return done


def commands(script, *arguments) -> list[list[str]]:
  """The words of each command that a dry run prints."""
  return [shlex.split(line) for line in launch(script, '--dry-run', *arguments).stdout.splitlines()]


def test_shellcheck():
  shellcheck = pathlib.Path(sys.executable).parent / 'shellcheck'
  scripts = sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'launch').glob('*.sh'))
  assert len(scripts) >= 8
  done = subprocess.run([shellcheck, '-x', *scripts], cwd=ROOT, text=True, capture_output=True)
  assert not done.stdout + done.stderr


def test_tpu_vm_is_created():
  where = ['b', '--zone=us-west4-a']
  given = '--name=b', '--zone=us-west4-a'
  assert commands('tpu_vm', 'create', *given, '--spot') == [
      [*TPU.split(), 'create', *where, '--accelerator-type=v5litepod-16',
       '--version=v2-alpha-tpuv5-lite', '--spot']]
  assert commands('tpu_vm', 'create', *given, '--type=v6e-8', '--queued') == [
      ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'b', '--node-id=b',
       '--zone=us-west4-a', '--accelerator-type=v6e-8', '--runtime-version=v2-alpha-tpuv6e']]
  assert commands('tpu_vm', 'delete', *given) == [[*TPU.split(), 'delete', *where, '--quiet']]


def test_tpu_vm_runs_on_every_host():
  (command,) = commands('tpu_vm', 'run', '--name=b', '--zone=z', '--type=v4-32', '--', *FLAGS)
  assert command[:-1] == [*TPU.split(), 'ssh', 'b', '--zone=z', '--worker=all']
  # What a shell on the host would make of it.
  words = shlex.split(command[-1].removeprefix('--command='))
  assert words[:5] == ['cd', 'bert_jax', '&&', '{', 'env']
  assert words[5] == 'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true'
  assert words[6:] == ['nohup', '.venv/bin/python', 'launch/supervise.py', *FLAGS, '>', 'run.log',
                       '2>&1', '<', '/dev/null', '&', '}']


def test_tpu_vm_goes_on_after_preemption():
  found = commands('tpu_vm', 'resume', '--name=b', '--zone=z', '--spot', '--', *FLAGS)
  assert [command[4] for command in found if command[0] == 'gcloud'] == [
      'delete', 'create', 'scp', 'ssh', 'ssh']
  assert [command[:2] for command in found if command[0] == 'git'] == [['git', 'archive']]


def test_gke_manifest():
  text = launch('gke', '--dry-run', 'apply', '--name=b', '--image=x/y&z', '--topology=v5p:2x2x4',
                '--', *FLAGS).stdout
  manifest, applied = text.rsplit('\n', 2)[:2]
  assert applied == 'kubectl apply -f -'
  job = yaml.safe_load(manifest)
  assert job['kind'] == 'JobSet' and job['metadata']['name'] == 'b'
  pods = job['spec']['replicatedJobs'][0]['template']['spec']
  assert pods['parallelism'] == pods['completions'] == 4  # hosts of 4 chips
  spec = pods['template']['spec']
  assert spec['nodeSelector'] == {'cloud.google.com/gke-tpu-accelerator': 'tpu-v5p-slice',
                                  'cloud.google.com/gke-tpu-topology': '2x2x4'}
  (container,) = spec['containers']
  assert container['image'] == 'x/y&z'
  assert container['command'] == ['python', '-m', 'bert_jax.main', *FLAGS]
  assert container['resources']['limits'] == {'google.com/tpu': 4}
  assert container['env'][0]['name'] == 'LIBTPU_INIT_ARGS'


def test_gke_commands():
  assert commands('gke', 'xpk', '--name=b', '--image=i', '--cluster=c', '--', *FLAGS) == [
      ['xpk', 'workload', 'create', '--cluster=c', '--workload=b', '--tpu-type=v5litepod-16',
       '--num-slices=1', '--docker-image=i',
       f'--command=python -m bert_jax.main {shlex.quote(FLAGS[0])} --workdir=gs://my\\ bucket/run']]
  assert commands('gke', 'build', '--image=i') == [
      ['docker', 'build', '-f', 'launch/Containerfile', '-t', 'i', '.'], ['docker', 'push', 'i']]


def test_slurm():
  (command,) = commands('slurm', 'submit', '--name=b', '--nodes=4', '--', *FLAGS)
  assert command[:-1] == [
      'sbatch', '--job-name=b', '--nodes=4', '--ntasks-per-node=8', '--gpus-per-node=8',
      '--time=24:00:00', '--requeue', '--signal=TERM@120', '--open-mode=append', '--output=b.log']
  wrapped = shlex.split(command[-1].removeprefix('--wrap='))
  assert wrapped[:7] == [
      'srun', '--kill-on-bad-exit=1', 'env',
      'XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true', '.venv/bin/python',
      'launch/supervise.py', FLAGS[0]]
  assert wrapped[7:] == shlex.split(
      f"'{FLAGS[1]};' 'status=$?;' if [ $status = 75 '];' then "
      "scontrol requeue '$SLURM_JOB_ID;' 'fi;' exit $status")


@pytest.mark.parametrize('script, arguments, message', [
    ('tpu_vm', ('create', '--zone=z'), 'give --name'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--type=v9-4'), 'unknown --type=v9-4'),
    ('tpu_vm', ('run', '--name=b', '--zone=z'), 'give the flags of the run'),
    ('tpu_vm', ('start', '--name=b', '--zone=z'), 'give an action'),
    ('gke', ('apply', '--nam=b'), 'unknown option --nam'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v9:2', '--', 'x'),
     'unknown --topology=v9:2'),
    ('slurm', ('submit', 'again', '--name=b'), 'unexpected argument again'),
])
def test_mistakes(script, arguments, message):
  done = launch(script, '--dry-run', *arguments, status=2)
  assert message in done.stderr and len(done.stderr.splitlines()) == 1
