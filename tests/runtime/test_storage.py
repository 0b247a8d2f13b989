"""Folders and sealed files: odd names, replaced folders, and copies of a bucket."""

import json
import pathlib

from etils import epath
import pytest

from bert_jax.data import records
from bert_jax.errors import UserError
from bert_jax.runtime import host, sealed, storage


def test_brackets_in_the_name_of_a_folder_are_no_pattern(tmp_path):
  folder = epath.Path(tmp_path) / 'run[1]'
  (folder / 'sub').mkdir(parents=True)
  for name in ('b.json', 'a.json', 'c.txt', 'sub/d.json'):
    (folder / name).write_text(name)
  assert [path.name for path in storage.matching(folder, '*.json')] == ['a.json', 'b.json']
  assert storage.matching(folder / 'nowhere', '*') == []
  assert sealed.digests(folder).keys() == {'a.json', 'b.json', 'c.txt', 'sub/d.json'}


def test_a_replaced_folder_leaves_the_users_backup(tmp_path):
  whole, folder, backup = (epath.Path(tmp_path) / name
                           for name in ('new', 'records', 'records.replaced'))
  for path in (whole, folder, backup):
    path.mkdir()
    (path / 'file').write_text(path.name)
  storage.replace_folder(whole, folder)
  assert (folder / 'file').read_text() == 'new'
  assert (backup / 'file').read_text() == 'records.replaced'
  assert sorted(path.name for path in tmp_path.iterdir()) == ['records', 'records.replaced']


def test_a_path_that_is_not_utf8_does_not_damage_a_sealed_file(tmp_path):
  content = {'command': 'python caf\udce9.py'}
  path = epath.Path(tmp_path) / 'run.json'
  path.write_text(json.dumps(sealed.seal(content)))
  assert sealed.read(path) == content


def test_a_file_too_large_for_a_description_is_refused(tmp_path, monkeypatch):
  path = epath.Path(tmp_path) / 'config.json'
  path.write_text('{"a": 1}')
  monkeypatch.setattr(storage, '_LARGEST_JSON', 3)
  with pytest.raises(UserError, match='too large to describe a model'):
    storage.read_json(path)


def test_records_in_a_bucket_are_not_replaced():
  with pytest.raises(UserError, match='replaces folders of this machine'):
    records.replacing('gs://bucket/records')


def test_a_fetched_folder_has_no_empty_folders(tmp_path, monkeypatch):
  """An empty tokenizer/ of a stopped run would look like the folder of another program."""
  monkeypatch.setattr(storage, 'is_remote', lambda path: 'bucket' in path)
  monkeypatch.setattr(host, 'cache_folder', lambda: tmp_path / 'cache')
  remote = epath.Path(tmp_path) / 'bucket'
  (remote / 'logs').mkdir(parents=True)
  (remote / 'logs/kept.txt').write_text('kept')
  folder = storage.Folder(remote)
  for name in ('corpus/tokenizer/vocab.txt', 'logs/deep/old.txt'):
    (folder.local / name).parent.mkdir(parents=True)
    (folder.local / name).write_text('old')
  folder.fetch()
  local = pathlib.Path(folder.local)
  assert sorted(str(path.relative_to(local)) for path in local.rglob('*')) == [
      'logs', 'logs/kept.txt']
