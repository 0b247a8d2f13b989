"""The exact commands of the launch scripts; shellcheck accepts the scripts."""

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

from bert_jax import errors

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


def test_shellcheck_accepts_the_scripts():
  shellcheck = pathlib.Path(sys.executable).parent / 'shellcheck'
  scripts = sorted(str(path.relative_to(ROOT)) for folder in ('launch', 'benchmarks')
                   for path in (ROOT / folder).glob('*.sh'))
  assert len(scripts) >= 8
  done = subprocess.run([shellcheck, '-x', *scripts], cwd=ROOT, text=True, capture_output=True)
  assert not done.stdout + done.stderr


def test_tpu_vm_creates_and_deletes_a_machine():
  where = ['b', '--zone=us-west4-a']
  given = '--name=b', '--zone=us-west4-a'
  assert commands('tpu_vm', 'create', *given, '--spot') == [
      [*TPU.split(), 'create', *where, '--accelerator-type=v5litepod-16',
       '--version=v2-alpha-tpuv5-lite', '--spot']]
  assert commands('tpu_vm', 'create', *given, '--spot=true', '--reserved=false') == commands(
      'tpu_vm', 'create', *given, '--spot')
  assert commands('tpu_vm', 'create', *given, '--type=v6e-8', '--queued') == [
      ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'b', '--node-id=b',
       '--zone=us-west4-a', '--accelerator-type=v6e-8', '--runtime-version=v2-alpha-tpuv6e']]
  assert commands('tpu_vm', 'delete', *given) == [[*TPU.split(), 'delete', *where, '--quiet']]


# Options of tpu_vm.sh, and of `gcloud compute tpus tpu-vm create` and `queued-resources create`.
PLACE = ['--zone=z', '--project=p']
MACHINE = ['--reserved', '--internal-ips', '--network=n', '--subnetwork=s',
           '--service-account=a@p.iam.gserviceaccount.com',
           '--data-disk=source=projects/p/zones/z/disks/d,mode=read-only']


def test_tpu_vm_passes_on_project_and_network_options():
  given = ['--name=b', *PLACE, *MACHINE]
  what = '--accelerator-type=v5p-8'
  assert commands('tpu_vm', 'create', *given, '--type=v5p-8') == [
      [*TPU.split(), 'create', 'b', *PLACE, what, '--version=v2-alpha-tpuv5', *MACHINE]]
  assert commands('tpu_vm', 'create', *given, '--type=v5p-8', '--queued') == [
      ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'b', '--node-id=b', *PLACE, what,
       '--runtime-version=v2-alpha-tpuv5', *MACHINE]]
  assert commands('tpu_vm', 'delete', *given) == [[*TPU.split(), 'delete', 'b', *PLACE, '--quiet']]
  # The hosts have only internal addresses.
  assert commands('tpu_vm', 'log', *given) == [
      [*TPU.split(), 'ssh', 'b', *PLACE, '--worker=0', '--internal-ip',
       '--command=tail -n 100 -f bert_jax/run.log']]
  _, copied, installed = commands('tpu_vm', 'install', *given)
  assert copied == [*TPU.split(), 'scp', '/tmp/bert_jax.tar.gz', 'b:', *PLACE, '--worker=all',
                    '--internal-ip']
  (started,) = commands('tpu_vm', 'run', *given, '--', *FLAGS)
  assert installed[:-1] == started[:-1] == [*TPU.split(), 'ssh', 'b', *PLACE, '--worker=all',
                                            '--internal-ip']


@pytest.mark.parametrize('held, type, status', [
    ('', 'v5litepod-16', 2), ('SHA256:other', 'v5litepod-16', 2),
    ('SHA256:mine', 'v5litepod-16', 0), ('', 'v5litepod-8', 0)])  # the last has one host
def test_several_hosts_need_an_ssh_agent(tmp_path, held, type, status):
  (tmp_path / 'gcloud').write_text('#!/bin/bash\necho "$@"\n')
  (tmp_path / 'ssh-keygen').write_text('#!/bin/bash\necho 3072 SHA256:mine me "(RSA)"\n')
  (tmp_path / 'ssh-add').write_text(f'#!/bin/bash\n[ -n "{held}" ] && echo 3072 {held} me\n')
  for path in tmp_path.iterdir():
    path.chmod(0o755)
  env = {**os.environ, 'HOME': '/home/me', 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
  done = subprocess.run(
      ['bash', 'launch/tpu_vm.sh', 'run', '--name=b', '--zone=z', f'--type={type}', '--', *FLAGS],
      cwd=ROOT, env=env, text=True, capture_output=True)
  assert done.returncode == status, done.stderr
  assert done.stdout.startswith('compute tpus tpu-vm ssh b') == (not status)
  assert done.stderr == '' if not status else (
      'bert_jax: no ssh-agent holds /home/me/.ssh/google_compute_engine, and gcloud stalls without '
      'it where there are several hosts: eval "$(ssh-agent)" && ssh-add '
      '/home/me/.ssh/google_compute_engine (ssh-keygen -t rsa -f '
      '/home/me/.ssh/google_compute_engine creates the key)\n')


def test_tpu_vm_runs_on_every_host():
  (command,) = commands('tpu_vm', 'run', '--name=b', '--zone=z', '--type=v4-32', '--', *FLAGS)
  assert command[:-1] == [*TPU.split(), 'ssh', 'b', '--zone=z', '--worker=all']
  # Split as a shell on the host does.
  words = shlex.split(command[-1].removeprefix('--command='))
  first = words.index('env')
  assert words[:2] == ['cd', 'bert_jax'] and words[first - 1] == '{'
  assert words[first + 1] == 'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true'
  assert words[first + 2:] == ['nohup', '.venv/bin/python', 'launch/supervise.py', *FLAGS, '>',
                               'run.log', '2>&1', '<', '/dev/null', '&', '}']


def test_a_host_refuses_a_second_run(tmp_path):
  """Runs the command of the hosts in a folder whose Python sleeps."""
  (command,) = commands('tpu_vm', 'run', '--name=b', '--zone=z', '--', *FLAGS)
  python = tmp_path / 'bert_jax/.venv/bin/python'
  python.parent.mkdir(parents=True)
  python.write_text('#!/bin/bash\necho $$; exec sleep 60\n')
  python.chmod(0o755)
  log = tmp_path / 'bert_jax/run.log'

  def start():
    return subprocess.run(['bash', '-c', command[-1].removeprefix('--command=')], cwd=tmp_path,
                          capture_output=True, text=True)

  def pid() -> int:
    for _ in range(200):
      if log.exists() and log.read_text():
        return int(log.read_text())
      time.sleep(0.05)
    raise AssertionError('the run has not begun')

  assert start().returncode == 0
  first = pid()
  second = start()
  assert (second.returncode, second.stderr) == (2, 'bert_jax: a run is in progress here\n')
  assert pid() == first  # the second run did not touch the log
  os.kill(first, signal.SIGKILL)
  # In a container, process 1 may leave a zombie.
  deadline, stat = time.monotonic() + 20, pathlib.Path(f'/proc/{first}/stat')
  while stat.exists() and stat.read_text().rpartition(')')[2].split()[0] != 'Z':
    assert time.monotonic() < deadline
    time.sleep(0.05)
  assert start().returncode == 0
  os.kill(pid(), signal.SIGKILL)


@pytest.mark.parametrize('state, calls', [
    ('READY', ['describe', 'ssh']),
    ('PREEMPTED', ['describe', 'delete', 'create', 'scp', 'ssh', 'ssh']),
    ('NOT_FOUND', ['describe', 'create', 'scp', 'ssh', 'ssh']),
    ('UNAVAILABLE', ['describe']),  # the network failed: the machine may be sound
    ('CREATING', ['describe']), ('REPAIRING', ['describe'])])
def test_resume_recreates_only_a_preempted_or_missing_machine(tmp_path, state, calls):
  (tmp_path / 'gcloud').write_text(
      f'#!/bin/bash\necho "$4" >> {tmp_path}/calls\n'
      f'if [ "$4" = describe ]; then echo {state}; fi\n'
      f'[ "$4 {state}" != "describe NOT_FOUND" ] && [ "$4 {state}" != "describe UNAVAILABLE" ]\n')
  (tmp_path / 'gcloud').chmod(0o755)
  done = subprocess.run(
      ['bash', 'launch/tpu_vm.sh', 'resume', '--name=b', '--zone=z', '--type=v5litepod-8', '--',
       *FLAGS], cwd=ROOT, env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}, text=True,
      capture_output=True)
  assert (tmp_path / 'calls').read_text().split() == calls
  if len(calls) == 1:
    assert (done.returncode, done.stderr) == (2, {
        'UNAVAILABLE': 'bert_jax: b cannot be described: UNAVAILABLE\n'}.get(
            state, f'bert_jax: b is {state}: wait until it is READY, or delete it\n'))


def test_a_dry_run_of_resume_recreates_the_machine():
  calls = commands('tpu_vm', 'resume', '--name=b', '--zone=z', '--spot', '--', *FLAGS)
  assert [command[4] for command in calls if command[0] == 'gcloud'] == [
      'delete', 'create', 'scp', 'ssh', 'ssh']
  assert [command[:2] for command in calls if command[0] == 'git'] == [['git', 'archive']]


def manifest(*arguments) -> dict:
  """The objects that kubectl would apply."""
  text = launch('gke', '--dry-run', 'apply', '--name=b', '--image=x/y&z', *arguments, '--',
                *FLAGS).stdout
  given, applied = text.rsplit('\n', 2)[:2]
  assert applied == 'kubectl apply -f -'
  return yaml.safe_load(given)


def test_a_gke_manifest_describes_the_run():
  job = manifest('--topology=v5p:2x2x4')
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


def test_gke_restarts_after_every_failure_except_a_mistake():
  spec = manifest('--topology=v5e:4x4', '--max-restarts=7')['spec']
  # A status that no rule names fails its Job by backoffLimit, and the JobSet starts again.
  assert spec['failurePolicy'] == {'maxRestarts': 7, 'rules': [
      {'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}]}
  job = spec['replicatedJobs'][0]['template']['spec']
  assert job['backoffLimit'] == 0 and job['podFailurePolicy'] == {'rules': [
      {'action': 'FailJob', 'onExitCodes': {'operator': 'In', 'values': [errors.EXIT_MISTAKE]}}]}
  pod = job['template']['spec']
  assert (pod['restartPolicy'], pod['terminationGracePeriodSeconds']) == ('Never', 120)


@pytest.mark.parametrize('given, hosts, chips', [
    (('v5e:2x4',), 2, 4), (('v5e:2x4', 8), 1, 8), (('v6e:2x4', 8), 1, 8), (('v6e:2x4', 4), 2, 4),
    (('v5e:4x4',), 4, 4), (('v5e:2x2',), 1, 4), (('v6e:1x1',), 1, 1), (('tpu7x:2x2x2',), 2, 4)])
def test_gke_requests_the_hosts_and_chips_of_a_topology(given, hosts, chips):
  topology, *more = given
  spec = manifest(f'--topology={topology}', *(f'--chips_per_host={n}' for n in more))['spec']
  job = spec['replicatedJobs'][0]['template']['spec']
  assert job['parallelism'] == job['completions'] == hosts
  (container,) = job['template']['spec']['containers']
  assert container['resources']['limits'] == {'google.com/tpu': chips}


def test_gke_applies_a_complete_manifest_or_nothing(tmp_path):
  (tmp_path / 'kubectl').write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/words\n'
                                    f'cat > {tmp_path}/applied\n')
  (tmp_path / 'kubectl').chmod(0o755)
  for topology, status in (('v9:2x2', 2), ('v5e:2x2', 0)):
    assert not (tmp_path / 'applied').exists()
    done = subprocess.run(
        ['bash', 'launch/gke.sh', 'apply', '--name=b', '--image=i', f'--topology={topology}', '--',
         *FLAGS], cwd=ROOT, env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
        text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (
        status, 'bert_jax: unknown --topology=v9:2x2\n' if status else '')
  assert (tmp_path / 'words').read_text() == 'apply -f -\n'
  assert yaml.safe_load((tmp_path / 'applied').read_text())['metadata']['name'] == 'b'


def test_gke_starts_workloads_with_xpk_shows_logs_and_builds_images():
  flags = subprocess.check_output(['bash', '-c', '. launch/xla_flags.sh; xla_flags v6e'], cwd=ROOT,
                                  text=True).strip()
  assert flags.startswith('LIBTPU_INIT_ARGS=')
  assert commands('gke', 'xpk', '--name=b', '--image=i', '--cluster=c', '--type=v6e-16',
                  '--max-restarts=7', '--', *FLAGS) == [
      ['xpk', 'workload', 'create', '--cluster=c', '--workload=b', '--tpu-type=v6e-16',
       '--num-slices=1', '--docker-image=i', '--max-restarts=7', '--restart-on-exit-codes=1,75',
       '--termination-grace-period-seconds=120', f'--env={flags}',
       f'--command=python -m bert_jax.main {shlex.quote(FLAGS[0])} --workdir=gs://my\\ bucket/run']]
  label = 'jobset.sigs.k8s.io'
  assert commands('gke', 'log', '--name=b') == [
      ['kubectl', 'logs', '-f', '--tail=-1', '-l', f'{label}/jobset-name=b,{label}/job-index=0,'
       'batch.kubernetes.io/job-completion-index=0']]
  assert commands('gke', 'build', '--image=i') == [
      ['docker', 'build', '-f', 'launch/Containerfile', '-t', 'i', '.'], ['docker', 'push', 'i']]


def test_slurm_submits_and_cancels_jobs():
  (command,) = commands('slurm', 'submit', '--name=b', '--nodes=4', '--', *FLAGS)
  assert command[:-1] == [
      'sbatch', '--job-name=b', '--nodes=4', '--ntasks-per-node=8', '--gpus-per-node=8',
      '--time=24:00:00', '--requeue', '--signal=TERM@120', '--open-mode=append', '--output=b.log']
  flags = '--config=configs/base.py --workdir=gs://my\\ bucket/run'
  assert command[-1] == (
      '--wrap=trap again=false USR1; srun --kill-on-bad-exit=0 --wait=0 '
      'env XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true '
      f'.venv/bin/python launch/supervise.py {flags}; '
      'status=$?; if [ $status = 75 ] && ${again:-true}; then scontrol requeue $SLURM_JOB_ID; fi; '
      'exit $status')
  assert commands('slurm', 'cancel', '--name=b') == [
      ['scancel', '--state=PENDING', '--name=b'],
      ['scancel', '--batch', '--signal=USR1', '--name=b'],
      ['scancel', '--signal=TERM', '--name=b']]


@pytest.mark.parametrize('script, arguments, message', [
    ('tpu_vm', ('create', '--zone=z'), 'give --name'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--type=v9-4'), 'unknown --type=v9-4'),
    ('tpu_vm', ('run', '--name=b', '--zone=z'), 'give the flags of the run'),
    ('tpu_vm', ('start', '--name=b', '--zone=z'), 'give an action'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--type=tpu7x-8'),
     'the Cloud TPU API does not serve tpu7x: rent a node pool on GKE and use launch/gke.sh '
     '--topology=tpu7x:2x2x1'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--data-disk=d'), 'write source=projects/'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v5e:4x4', '--chips_per_host=8', '--',
             'x'), 'no pool of --topology=v5e:4x4 has --chips_per_host=8'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v5e:2x2', '--chips_per_host=8', '--',
             'x'), 'no pool of --topology=v5e:2x2 has --chips_per_host=8'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v5e:1x1', '--chips_per_host=4', '--',
             'x'), 'no pool of --topology=v5e:1x1 has --chips_per_host=4'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v5e:2x3', '--', 'x'),
     'no pool of --topology=v5e:2x3 has --chips_per_host=4'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v5e:4xN', '--', 'x'),
     'unknown --topology=v5e:4xN'),
    ('gke', ('xpk', '--name=b', '--image=i', '--cluster=c', '--chips_per_host=8', '--', 'x'),
     'xpk chooses the hosts by --type: leave out --chips_per_host'),
    ('gke', ('xpk', '--name=b', '--image=i', '--cluster=c', '--type=v9-4', '--', 'x'),
     'unknown --type=v9-4'),
    ('gke', ('apply', '--nam=b'), 'unknown option --nam'),
    ('gke', ('apply', '--name=b', '--image=i', '--topology=v9:2', '--', 'x'),
     'unknown --topology=v9:2'),
    ('slurm', ('submit', 'again', '--name=b'), 'unexpected argument again'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--spot=yes'),
     'bert_jax: --spot=yes: give true or false\n'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--spot', '--spot=1'),
     'bert_jax: --spot=1: give true or false\n'),
    ('tpu_vm', ('delete', '--name=b', '--zone=z', '--queued=True'),
     'bert_jax: --queued=True: give true or false\n'),
    ('tpu_vm', ('create', '--name=b', '--zone=z', '--internal-ips='),
     'bert_jax: --internal-ips=: give true or false\n'),
])
def test_mistakes_are_refused_in_one_line(script, arguments, message):
  done = launch(script, '--dry-run', *arguments, status=2)
  assert message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('usable, chosen', [
    (('python3.13', 'python3.12', 'python3.11'), 'python3.13'),
    (('python3.12', 'python3.11', 'python3'), 'python3.12'), (('python3',), 'python3'),
    (('python3.12', '3.13.0', '3.12.1', 'python3.11'), '3.13.0'),
    (('python3.11', '3.12.1', 'python3'), '3.12.1')])
def test_the_environment_has_the_newest_python(tmp_path, usable, chosen):
  """Python 3.12 and newer have a jax that multiplies bfloat16 fast on a CPU."""
  for name in ('python3.13', 'python3.12', 'python3.11', 'python3', '3.13.0', '3.12.1'):
    # pyenv keeps versions outside the PATH.
    file = tmp_path / name if name.startswith('p') else (
        tmp_path / 'pyenv/versions' / name / 'bin/python')
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\n[ {int(name in usable)} = 1 ] || exit 1\n'
                    f'[ "$2" = venv ] || exit 0\necho {name} > {tmp_path}/chosen\n'
                    'mkdir -p "$4/bin"\nprintf "#!/bin/sh\\n" > "$4/bin/python"\n'
                    'chmod +x "$4/bin/python"\n')
    file.chmod(0o755)
  environment = {'PATH': f'{tmp_path}:/usr/bin:/bin', 'VENV': f'{tmp_path}/venv',
                 'PYENV_ROOT': f'{tmp_path}/pyenv'}
  subprocess.run(['bash', '-c', '. launch/venv.sh auto'], cwd=ROOT, env=environment,
                 check=True)
  assert (tmp_path / 'chosen').read_text().strip() == chosen


def test_an_environment_without_pip_is_kept(tmp_path):
  """uv makes such environments. The script adds pip and keeps the rest."""
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'venv'], check=True)
  (tmp_path / 'venv/mark').touch()
  (tmp_path / 'requirements.txt').touch()
  subprocess.run(['bash', '-c', f'. launch/venv.sh {tmp_path}/requirements.txt'], cwd=ROOT,
                 env=os.environ | {'VENV': str(tmp_path / 'venv')}, check=True)
  assert (tmp_path / 'venv/mark').exists()
  subprocess.run([tmp_path / 'venv/bin/python', '-m', 'pip', '--version'], check=True)


def test_an_environment_of_another_python_is_refused(tmp_path):
  for name, version in (('venv/bin/python', '3.13'), ('older', '3.11'), ('same', '3.13')):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\ncase "$2" in *print*) echo {version} ;; esac\n')
    file.chmod(0o755)
  environment = {'PATH': '/usr/bin:/bin', 'VENV': f'{tmp_path}/venv'}

  def source(python):
    return subprocess.run(['bash', '-c', '. launch/venv.sh requirements.txt'], cwd=ROOT, text=True,
                          env=environment | {'PYTHON': f'{tmp_path}/{python}'}, capture_output=True)

  assert source('same').returncode == 0
  refused = source('older')
  assert refused.returncode == 2
  assert refused.stderr == (
      f'{tmp_path}/venv has Python 3.13, not PYTHON={tmp_path}/older: delete it, leave PYTHON '
      'out, or set VENV to another folder\n')
  missing = source('missing')
  assert missing.returncode == 2
  assert missing.stderr == (f'PYTHON={tmp_path}/missing: give Python 3.11 or newer with its '
                            'venv module\n')
