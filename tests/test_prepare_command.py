"""The command `prepare` as users type it."""

import contextlib
import gzip
import pathlib
import signal
import subprocess
import time

import pytest

from tests import conftest
from tests.test_commands import assert_mistake, command, run


def prepare(source, output, *flags, **kwargs):
  return run('prepare', f'--input={source}', f'--output={output}', *flags, **kwargs)


def files(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in pathlib.Path(folder).rglob('*')
          if p.is_file()}


def workers_of(group):
  """The live processes of a process group."""
  names = []
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      state, _, pgrp = stat.read_text().rpartition(')')[2].split()[:3]
      if int(pgrp) == group and state != 'Z':
        names.append(stat.parent.name)
  return names


@pytest.fixture(scope='module')
def vocab(tmp_path_factory, corpus_file) -> str:
  folder = tmp_path_factory.mktemp('vocab') / 'records'
  done = prepare(corpus_file, folder, '--vocab_size=200')
  assert done.returncode == 0, done.stderr
  assert 'plateau' in done.stdout and 'digest' in done.stdout and '60 documents' in done.stdout
  return str(folder / 'tokenizer/vocab.txt')


@pytest.mark.parametrize('flags, message', [
    (['--vocab={vocab}', '--tokenizer=bpe'], '--tokenizer has no effect here: --vocab={vocab}'),
    (['--check'], '--output has no effect here: --check writes nothing'),
    (['--lines_are_sentences', '--language=de'], '--language has no effect here'),
    (['--workers=-1'], 'flag --workers=-1')])
def test_flags_without_effect_are_refused(corpus_file, tmp_path, vocab, flags, message):
  flags = [flag.format(vocab=vocab) for flag in flags]
  assert_mistake(prepare(corpus_file, tmp_path / 'r', *flags), message.format(vocab=vocab))
  assert not (tmp_path / 'r').exists()


@pytest.fixture(scope='module')
def long_text(tmp_path_factory) -> str:
  """9 MB: enough for worker processes, and for a kill in the middle."""
  path = tmp_path_factory.mktemp('long') / 'long.txt'
  documents = conftest.make_documents(500)
  with path.open('w') as file:
    for part in range(40):
      file.write('\n\n'.join('\n'.join([f'Part {part} of it.', *d]) for d in documents) + '\n\n')
  return str(path)


def test_a_killed_preparation_resumes_to_the_same_files(tmp_path, vocab, long_text):
  flags = (f'--vocab={vocab}', '--lines_are_sentences')
  assert prepare(long_text, tmp_path / 'whole', *flags, '--workers=1').returncode == 0
  output = tmp_path / 'part'
  running = subprocess.Popen(**command('prepare', f'--input={long_text}', f'--output={output}',
                                       *flags, '--workers=2'), start_new_session=True)
  deadline = time.monotonic() + 60
  while not (output / 'train-00000.tokens.bin').exists() and time.monotonic() < deadline:
    time.sleep(0.02)
  running.kill()
  running.communicate()
  assert running.returncode == -signal.SIGKILL and not (output / 'manifest.json').exists()
  deadline = time.monotonic() + 30
  while workers_of(running.pid) and time.monotonic() < deadline:  # workers end with their parent
    time.sleep(0.1)
  assert not workers_of(running.pid)
  done = prepare(long_text, output, *flags, '--workers=2')
  assert done.returncode == 0, done.stderr
  assert files(output) == files(tmp_path / 'whole')


def test_a_preparation_resumes_after_a_full_disk(tmp_path, vocab, long_text):
  """A full disk prints one line and exits with 1. With more room the same command resumes."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', str(disk)],
                    capture_output=True).returncode:
    pytest.skip('needs the right to mount a tmpfs')
  try:
    flags = (f'--vocab={vocab}', '--lines_are_sentences', '--workers=1')
    done = prepare(long_text, disk / 'records', *flags)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1 and 'the disk is full' in done.stderr, done.stderr
    subprocess.run(['mount', '-o', 'remount,size=100m', str(disk)], check=True)
    done = prepare(long_text, disk / 'records', *flags)
    assert done.returncode == 0 and (disk / 'records/manifest.json').exists(), done.stderr
  finally:
    subprocess.run(['umount', str(disk)], check=True)


def test_mistakes_are_refused_in_one_line(tmp_path, vocab, corpus_file):
  out = tmp_path / 'out'
  whole = gzip.compress(pathlib.Path(corpus_file).read_bytes())
  (tmp_path / 'cut.txt.gz').write_bytes(whole[:-20])
  assert_mistake(prepare(tmp_path / 'cut.txt.gz', out, f'--vocab={vocab}'),
                 'cut.txt.gz: damaged gzip')
  (tmp_path / 'bad.jsonl').write_text('{"text": "One."}\nnot json\n')
  assert_mistake(prepare(tmp_path / 'bad.jsonl', out, f'--vocab={vocab}'),
                 'bad.jsonl, line 2: invalid JSON')
  assert_mistake(prepare(corpus_file, out, '--vocab=/nowhere/vocab.txt'), '/nowhere/vocab.txt')
  assert_mistake(prepare(corpus_file, out, f'--vocab={vocab}', '--vocab_size=9'), 'not both')
  assert_mistake(prepare(corpus_file, out, '--heldout=2'), '--heldout=2.0 must lie in [0, 1)')
  assert_mistake(run('prepare', '--output=x'), 'give both --input')
  assert not out.exists()
  assert_mistake(prepare(corpus_file, tmp_path, f'--vocab={vocab}'), 'is not empty')


def test_check_prints_the_statistics_of_a_corpus(corpus_file):
  done = run('prepare', f'--input={corpus_file}', '--check', '--vocab_size=200')
  assert done.returncode == 0, done.stderr
  assert 'documents       60, of them 0 exact copies' in done.stdout
  assert 'tokens in a sentence' in done.stdout and 'plateau' in done.stdout


def test_truncated_or_changed_records_are_refused(tmp_path, vocab, corpus_file):
  records = tmp_path / 'records'
  assert prepare(corpus_file, records, f'--vocab={vocab}').returncode == 0
  train = ('main', '--config=tests/tiny.py', f'--workdir={tmp_path}/run',
           f'--config.data.source={records}')
  tokens = records / 'train-00000.tokens.bin'
  whole = tokens.read_bytes()
  for damaged, message in ((whole[:-2], 'were written'), (b'\7' + whole[1:], 'was changed after')):
    tokens.write_bytes(damaged)
    done = run(*train)
    assert_mistake(done, message)
    assert str(tokens) in done.stderr
  assert not (tmp_path / 'run/run.json').exists()
