"""A data set that tensorflow-datasets knows, downloaded and prepared without TensorFlow."""

import functools
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import zipfile

import pytest

from bert_jax.errors import UserError
from bert_jax.labelled import glue, table

ROOT = pathlib.Path(__file__).parents[2]
SPLITS = {
    'train': [('a "fine film', 1), ('no fun', 0), ('unbearably dull , and long', 0),
              ("it 's très bon", 1), ('good', 1)],
    'dev': [('bad', 0), ('better', 1)],
    'test': [('unknown', None)],
}
# Colab's machines and most others have neither TensorFlow nor h5py.
WITHOUT_TENSORFLOW = '''
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    return None if name in ('tensorflow', 'h5py') else super().find_spec(name, path, target)

sys.meta_path = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
'''
SCRIPT = WITHOUT_TENSORFLOW + '''
import json
from bert_jax import errors
from bert_jax.data import corpus
from bert_jax.labelled import glue
from tensorflow_datasets.core.download import downloader

downloader.MAX_RETRIES = 0
server, *names = sys.argv[1:]

def read(split):
  try:
    return [(row.values['sentence'], row.values.get('label'))
            for row in glue.read('tfds:glue/sst2', glue.find('glue/sst2'), split)]
  except (errors.Failed, errors.UserError) as e:
    return f'{type(e).__name__}: {e}'

unreachable = read('train')
import tensorflow_datasets as tfds
from tensorflow_datasets.text.glue import Glue
Glue.builder_configs['sst2'].data_url = server + 'missing.zip'
missing = read('train')
Glue.builder_configs['sst2'].data_url = server + 'changed.zip'
Glue.url_infos[server + 'changed.zip'] = next(iter(Glue.url_infos.values()))
changed = read('train')
Glue.builder_configs['sst2'].data_url = server + 'broken.zip'
broken = read('train')
Glue.builder_configs['sst2'].data_url = server + 'SST-2.zip'
print(json.dumps({
    'failures': [unreachable, missing, changed, broken],
    'splits': [read(split) for split in ('train', 'validation', 'test')],
    'texts': list(corpus.tfds_documents('glue/sst2', 'sentence')),
    'known': [tfds.builder_cls(name).name for name in names]}))
assert 'tensorflow' not in sys.modules and 'h5py' not in sys.modules
'''


@pytest.fixture
def server(tmp_path):
  """The address of a server with SST-2 as GLUE distributes it."""
  with zipfile.ZipFile(tmp_path / 'SST-2.zip', 'w') as packed:
    for split, examples in SPLITS.items():
      lines = ['index\tsentence' if split == 'test' else 'sentence\tlabel']
      lines += [f'{i}\t{text}' if split == 'test' else f'{text}\t{label}'
                for i, (text, label) in enumerate(examples)]
      packed.writestr(f'SST-2/{split}.tsv', '\n'.join(lines) + '\n')
  (tmp_path / 'broken.zip').write_text('no archive')
  (tmp_path / 'changed.zip').write_bytes((tmp_path / 'SST-2.zip').read_bytes())
  handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()


def test_a_known_data_set_is_prepared_and_read(tmp_path, server):
  names = ('super_glue', 'wikipedia', 'c4', 'wiki40b', 'xnli', 'imdb_reviews', 'ag_news_subset',
           'squad', 'cnn_dailymail', 'wmt14_translate')
  environment = os.environ | {
      'PYTHONPATH': str(ROOT), 'TFDS_DATA_DIR': str(tmp_path / 'data'), 'no_proxy': '127.0.0.1',
      'https_proxy': 'http://127.0.0.1:9'}  # the discard port: nothing answers
  result = subprocess.run([sys.executable, '-c', SCRIPT, server, *names], env=environment,
                          capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stderr
  assert 'Dl Size' not in result.stderr  # progress is for terminals
  output = json.loads(result.stdout.splitlines()[-1])
  assert output['known'] == list(names)
  unreachable, missing, changed, broken = output['failures']
  do = (': run the same command again, or set TFDS_DATA_DIR to a folder in which another machine '
        'prepared the data set with file_format=array_record')
  failed = 'Failed: tfds:glue/sst2: the download failed '
  assert unreachable == (f'{failed}(https://dl.fbaipublicfiles.com/glue/data/SST-2.zip: '
                         f'[Errno 111] Connection refused){do}')
  assert missing == f'{failed}(Failed to get url {server}missing.zip. HTTP code: 404.){do}'
  assert changed.startswith(f'{failed}(Artifact {server}changed.zip, downloaded to ')
  assert changed.endswith(f', has wrong checksum:){do}')
  assert broken == f'{failed}(File is not a zip file){do}'
  for split, read in zip(SPLITS, output['splits']):
    written = [[text, None if label is None else str(label)] for text, label in SPLITS[split]]
    assert sorted(read) == sorted(written)
  assert sorted(output['texts']) == sorted(text for text, _ in SPLITS['train'])


def test_a_test_set_has_the_order_of_its_file(monkeypatch):
  """tfds stores it in the order of a hash, and a submission numbers its lines."""
  def rows(order):
    return [table.Row('x', {'sentence': str(i), 'idx': i, 'label': -1}) for i in order]

  task = glue.find('glue/sst2')
  monkeypatch.setattr(table, 'read_tfds', lambda *_: iter(rows((2, 0, 1))))
  assert [row.values['sentence'] for row in glue._from_tfds('tfds:x', task, 'test')] == [
      '0', '1', '2']
  assert [row.values['sentence'] for row in glue._from_tfds('tfds:x', task, 'train')] == [
      '2', '0', '1']
  monkeypatch.setattr(table, 'read_tfds', lambda *_: iter(rows((2, 0))))
  with pytest.raises(UserError, match='tfds:x is a part of a test set'):
    list(glue._from_tfds('tfds:x', task, 'test'))
