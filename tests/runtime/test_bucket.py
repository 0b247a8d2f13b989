"""Runs whose workdir is in a bucket: an emulator of Google Cloud Storage on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from etils import epath
import fsspec
import pytest

from bert_jax.errors import UserError
from bert_jax.runtime import lock, storage
from tests import bucket as emulator
from tests import made_tasks, test_commands
from tests.runtime import test_processes


@pytest.fixture(scope='module')
def port():
  """The port of an empty bucket."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    number = free.getsockname()[1]
  server = subprocess.Popen([sys.executable, '-m', 'tests.bucket', str(number)], text=True,
                            cwd=test_commands.ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL)
  assert server.stdout.readline() == 'ready\n'
  yield number
  server.kill()
  server.wait()


@pytest.fixture
def bucket(port, tmp_path, monkeypatch):
  """A folder of the bucket; sets a cache folder for this machine."""
  for name, value in emulator.variables(port).items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return epath.Path(f'gs://{emulator.NAME}/{tmp_path.name}')


def train(source, workdir, *flags):
  return ('main', f'--config={test_commands.CONFIG}', f'--workdir={workdir}',
          f'--config.data.source={source}', *flags)


def names(folder: epath.Path) -> set[str]:
  return set(storage._files(folder))


def read_metrics(workdir: epath.Path) -> list[dict]:
  return [{k: v for k, v in json.loads(line).items() if k not in ('tokens_per_second', 'data_wait')}
          for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def wait_for(path: epath.Path):
  for _ in range(300):
    if path.exists():
      return
    time.sleep(0.5)
  raise AssertionError(f'{path} did not come')


STEPS = ('--config.train_steps=60', '--config.checkpoint_every=10', '--config.log_every=5',
         '--config.data.heldout=0.1', '--config.eval_every=30', '--config.eval_batches=1')


@pytest.mark.slow
def test_a_machine_that_lost_its_disk_resumes_from_the_bucket(bucket, tmp_path, corpus_file):
  text = shutil.copy(corpus_file, tmp_path / 'text.txt')
  alone = test_commands.run(*test_commands.train(text, tmp_path / 'alone', *STEPS))
  assert alone.returncode == 0, alone.stderr
  killed = subprocess.Popen(**test_commands.command(*train(text, bucket, *STEPS)))
  wait_for(bucket / 'checkpoints/20/commit_success.txt')
  killed.send_signal(signal.SIGKILL)
  killed.communicate()
  shutil.rmtree(tmp_path / 'cache')  # the next machine has only the bucket,
  os.remove(text)  # which has the token records
  resumed = test_commands.run(*train(text, bucket, *STEPS))
  assert resumed.returncode == 0, resumed.stderr
  assert 'resumed         from step' in resumed.stdout
  (step, bits), (step_alone, bits_alone) = (test_commands.final_bits(d)
                                            for d in (bucket, tmp_path / 'alone'))
  assert step == step_alone == 60 and bits == bits_alone
  lines = read_metrics(bucket)
  assert lines == read_metrics(tmp_path / 'alone') and len(lines) == 14
  objects = names(bucket)
  assert {'run.json', 'curves.png', 'tokenizer/vocab.txt', 'corpus/manifest.json'} <= objects
  assert len([name for name in objects if name.startswith('tensorboard/')]) == 2
  # Commands read the workdir in the bucket.
  source = tmp_path / 'asked.jsonl'
  source.write_text('{"text": "The old [MASK] runs."}\n')
  done = test_commands.run('predict', '--task=fill_mask', f'--model={bucket}', f'--input={source}',
                           f'--output={tmp_path}/said.jsonl')
  assert done.returncode == 0, done.stderr
  assert json.loads((tmp_path / 'said.jsonl').read_text())['masks'][0]['position'] == 3


@pytest.mark.medium
def test_a_fine_tuning_run_writes_its_best_checkpoint_and_predictions(bucket, tmp_path):
  files = made_tasks.files('multiple_choice', tmp_path, 40, 10)
  fields = {'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 8, 'max_len': 32,
            'train_epochs': 0, 'train_steps': 4, 'eval_every': 2, 'model.scan_unroll': 1, **files,
            'data.test': files['data.eval']}
  done = test_commands.run('main', '--config=configs/multiple_choice.py', f'--workdir={bucket}',
                           *(f'--config.{name}={value}' for name, value in fields.items()))
  assert done.returncode == 0, done.stderr
  assert len((bucket / 'predictions/predictions.jsonl').read_text().splitlines()) == 10
  assert [path.name for path in (bucket / 'best').iterdir() if path.name in ('2', '4')]


def test_a_bucket_is_locked_for_one_run(bucket, monkeypatch, capfd):
  """Writes are conditional: a process that read an older state of the lock does not get it."""
  monkeypatch.setattr(lock, 'BEAT_SECONDS', 0.1)
  monkeypatch.setattr(lock, 'STALE_SECONDS', 0.5)
  late = lock._BucketLock(bucket)
  assert late._read() == b''
  release_first = lock._acquire(bucket)
  assert not late._write()
  with pytest.raises(UserError, match=f'is in use by process {os.getpid()} on '):
    lock._acquire(bucket)  # its heartbeat continues
  release_first()
  assert late._read() == b''
  late._me |= {'host': 'elsewhere', 'machine': 'elsewhere', 'pid': 1}
  assert late._write()
  began = time.monotonic()
  release_second = lock._acquire(bucket)  # the holder sends no heartbeat
  assert time.monotonic() - began >= 0.5
  assert 'is locked by process 1 on elsewhere: waiting' in capfd.readouterr().err
  assert not late._write()
  release_second()
  gone = subprocess.Popen(['true'])
  gone.wait()
  late._read()
  late._me |= {'machine': lock._machine(), 'pid': gone.pid}
  assert late._write()
  began = time.monotonic()
  lock._acquire(bucket)()  # a dead process of this machine: no wait
  assert time.monotonic() - began < 0.4 and late._read() == b''


@pytest.mark.slow
def test_two_processes_save_and_resume_in_a_bucket(bucket, tmp_path, corpus_file):
  records = bucket / 'records'
  done = test_commands.run('prepare', f'--input={corpus_file}', f'--output={records}',
                           '--vocab_size=200', '--heldout=0.1')
  assert done.returncode == 0, done.stderr
  lines = {}
  for name, counts in {'one': (1, 1), 'changing': (2, 1), 'two': (2, 2)}.items():
    for steps, processes in zip((4, 8), counts):
      running = test_processes.start(
          processes, tmp_path, *train(records, bucket / name, '--config.train_steps=8',
                                      '--config.checkpoint_every=4', '--config.log_every=4',
                                      '--config.eval_every=8', '--config.eval_batches=1'),
          each=lambda i: (f'--workdir={bucket / name}',))
      if steps == 4:
        wait_for(bucket / name / 'checkpoints/4/commit_success.txt')
        for process in running:
          process.send_signal(signal.SIGKILL)
        shutil.rmtree(tmp_path / 'cache', ignore_errors=True)
      ended = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * processes, ended
    lines[name] = [x['loss'] for x in read_metrics(bucket / name) if 'loss' in x]
  assert len(lines['one']) == 2
  assert lines['two'] == pytest.approx(lines['one'], rel=1e-5)
  assert lines['changing'] == pytest.approx(lines['one'], rel=1e-5)


def test_token_records_are_copied_once(bucket):
  folder = storage.Folder(bucket)
  folder.fetch()
  for name, text in {'manifest.json': '{}', 'a.bin': 'tokens', 'b.bin': 'more'}.items():
    (folder.local / 'corpus').mkdir(exist_ok=True)
    (folder.local / 'corpus' / name).write_text(text)
  folder.push()
  (bucket / 'corpus/a.bin').write_text('not read again')
  (folder.local / 'corpus/b.bin').unlink()
  again = storage.Folder(bucket)
  again.fetch()
  assert (again.local / 'corpus/a.bin').read_text() == 'tokens'
  assert (again.local / 'corpus/b.bin').read_text() == 'more'
  (bucket / 'corpus/manifest.json').write_text('{"changed": 1}')
  again.fetch()
  assert (again.local / 'corpus/a.bin').read_text() == 'not read again'


def test_a_changed_corpus_of_a_mixture_is_copied_again(bucket):
  folder = storage.Folder(bucket)
  folder.fetch()
  for number in '01':
    (folder.local / 'corpora' / number).mkdir(parents=True)
    for name in ('manifest.json', 'a.bin'):
      (folder.local / 'corpora' / number / name).write_text(f'{number} before')
  folder.push()
  for name in ('manifest.json', 'a.bin'):
    (bucket / 'corpora/1' / name).write_text('1 after')
  (bucket / 'corpora/0/a.bin').write_text('not read again')
  folder.fetch()
  assert {path.relative_to(folder.local).as_posix(): path.read_text()
          for path in (folder.local / 'corpora').glob('*/*')} == {
      'corpora/0/a.bin': '0 before', 'corpora/0/manifest.json': '0 before',
      'corpora/1/a.bin': '1 after', 'corpora/1/manifest.json': '1 after'}


def test_only_changed_files_are_uploaded_and_stale_files_are_deleted(bucket, tmp_path):
  folder = storage.Folder(bucket, ('checkpoints',))
  folder.fetch()
  for name in ('run.json', 'metrics.jsonl'):
    (folder.local / name).write_text('first')
  folder.push()
  (bucket / 'checkpoints/1').mkdir(parents=True, exist_ok=True)
  (bucket / 'checkpoints/1/big').write_text('not for this machine')
  (bucket / 'run.json').write_text('seen to be left alone')
  (folder.local / 'metrics.jsonl').write_text('first, second')
  folder.push()
  assert (bucket / 'run.json').read_text() == 'seen to be left alone'
  assert (bucket / 'metrics.jsonl').read_text() == 'first, second'
  (folder.local / 'stale.txt').write_text('of a run that was deleted in the bucket')
  again = storage.Folder(bucket, ('checkpoints',))
  again.fetch()
  assert names(again.local) == {'run.json', 'metrics.jsonl'}
  assert (again.local / 'run.json').read_text() == 'seen to be left alone'
  second = storage.Folder(bucket, ('checkpoints',), process=1)
  second.fetch()
  assert second.local != again.local
  (second.local / 'metrics.jsonl').write_text('of the second process')
  second.push()
  assert (bucket / 'metrics.jsonl').read_text() == 'first, second'


@pytest.mark.parametrize('path, message', [
    ('s3://house/run', 'buckets are named gs://BUCKET/FOLDER'),
    ('gs://nowhere/run', 'cannot be written'),
])
def test_a_wrong_bucket_is_refused(bucket, corpus_file, path, message):
  done = test_commands.run(*train(corpus_file, path))
  test_commands.assert_mistake(done, message)


def test_without_gcsfs_the_error_says_how_to_install_it(bucket, monkeypatch):
  def missing(*_, **__):
    raise ImportError('Please install gcsfs to access Google Storage')

  monkeypatch.setattr(fsspec, 'filesystem', missing)
  epath.backend.fsspec_backend._get_filesystem.cache_clear()
  with pytest.raises(UserError, match='pip install gcsfs'):
    storage.check('--workdir', f'gs://{emulator.NAME}/run')
