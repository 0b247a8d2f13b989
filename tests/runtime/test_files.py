"""Files of this machine: sizes, complete writes, outputs that two processes want."""

import os
import pathlib
import pwd

from etils import epath
import pytest

from bert_jax.commands import command
from bert_jax.data import corpus
from bert_jax.errors import UserError
from bert_jax.runtime import storage


def test_a_file_of_an_unknown_owner_is_read(tmp_path, monkeypatch):
  (tmp_path / 'a.json').write_text('{"text": "One."}')

  def unknown(uid):
    raise KeyError(f'getpwuid(): uid not found: {uid}')

  monkeypatch.setattr(pwd, 'getpwuid', unknown)  # as in a container with its own user
  stat = os.stat(tmp_path / 'a.json')
  assert storage.size_and_time(epath.Path(tmp_path / 'a.json')) == (16, int(stat.st_mtime))
  assert storage.read_json(epath.Path(tmp_path / 'a.json')) == {'text': 'One.'}
  assert corpus.find_files(f'{tmp_path}/*.json') == [str(tmp_path / 'a.json')]


def test_a_folder_is_created_or_refused(tmp_path):
  storage.make_writable(epath.Path(tmp_path / 'a/b'), '--workdir=b', 1)
  storage.make_parent('--output', epath.Path(tmp_path / 'a/b/c/d.json'))
  assert [p.name for p in tmp_path.rglob('*')] == ['a', 'b', 'c']
  for folder in ('/proc', '/proc/nowhere'):
    with pytest.raises(UserError, match=f'^--workdir={folder} cannot be written: No such file'):
      storage.make_writable(epath.Path(folder), f'--workdir={folder}')
  with pytest.raises(UserError, match='^--output=/proc/x cannot be written: No such file'):
    storage.make_parent('--output', epath.Path('/proc/x'))


def test_two_processes_cannot_write_one_output(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  output = str(tmp_path / 'out.json')
  with storage.exclusive('--output', output):
    refused = pytest.raises(UserError, match='--output=.*: another process is writing it: wait')
    with refused, storage.exclusive('--output', os.path.relpath(output)):
      raise AssertionError
    with storage.exclusive('--output', str(tmp_path / 'other.json')):
      pass
  with storage.exclusive('--output', output), storage.exclusive('--output', None):
    pass


def test_an_output_that_is_a_source_is_refused(tmp_path):
  source, link = tmp_path / 'in.jsonl', tmp_path / 'link.jsonl'
  source.write_text('{}')
  link.symlink_to(source)
  for output, sources in ((source, (str(source),)), (link, (None, str(source))),
                          (source, (str(tmp_path / '*.jsonl'),)),
                          (os.path.relpath(source), ('x', str(link)))):
    refused = pytest.raises(UserError, match='--output=.* would overwrite what this command reads')
    with refused, storage.exclusive('--output', str(output), *sources):
      source.write_text('lost')
  assert source.read_text() == '{}'
  # An output grows in OUTPUT.partial.
  (tmp_path / 'x.json.partial').write_text('{}')
  refused = pytest.raises(UserError, match='x.json.partial would overwrite what this command')
  output = str(tmp_path / 'x.json')
  with refused, storage.exclusive('--output', output, f'{output}.partial'):
    pass


def test_links_are_not_listed_as_files(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run/a').write_text('a')
  (tmp_path / 'latest').symlink_to('run')
  (tmp_path / 'gone').symlink_to('nowhere')
  assert list(storage._files(epath.Path(tmp_path))) == ['run/a']


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
  path = epath.Path(tmp_path / 'a.json')
  path.write_text('old')

  def write_half(self, text):
    pathlib.Path(self).write_bytes(text[:1].encode())
    raise KeyboardInterrupt

  with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
    m.setattr(type(path), 'write_text', write_half)
    storage.write_whole(path, 'new')
  assert path.read_text() == 'old'
  storage.write_whole(path, 'new')
  assert path.read_text() == 'new' and [x.name for x in path.parent.iterdir()] == ['a.json']


def test_a_tilde_in_a_flag_expands_to_the_home_folder(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  assert [command._with_home(x) for x in ('--model=~/a=b', '--text=~5', '~/x', 'a=~/x')] == [
      '--model=/home/me/a=b', '--text=~5', '~/x', 'a=~/x']


def test_lists_of_numbers_are_parsed():
  assert command.numbers('--layers', ['-1', '4']) == (-1, 4)
  assert command.numbers('--rates', ['-1', '1e-4'], float) == (-1, 1e-4)
  with pytest.raises(UserError, match='--layers=1,x: give whole numbers'):
    command.numbers('--layers', ['1', 'x'])
  with pytest.raises(UserError, match='--rates=1,x: give numbers'):
    command.numbers('--rates', ['1', 'x'], float)
