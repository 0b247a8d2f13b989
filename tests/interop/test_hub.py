"""`convert --push`: the files that the hub gets from its client, over a replaced transport."""

import base64
import json
import re

from etils import epath
import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import _http
import pytest

from bert_jax.errors import Failed, UserError
from bert_jax.interop import conversion, load, verify
from bert_jax.runs import run
from tests import conftest, made_tasks
from tests.interop import torch_bert


class Hub:
  """The part of the hub's interface that an upload uses: branches of files, in memory."""

  def __init__(self):
    self.branches: dict[str, dict[str, bytes]] = {}
    self.blobs: dict[str, bytes] = {}
    self.status = 200

  def __call__(self, request: httpx2.Request) -> httpx2.Response:
    path, body = request.url.path, request.read()
    if self.status != 200:
      return httpx2.Response(self.status, json={'error': 'no'})
    if path == '/api/repos/create':
      self.branches.setdefault('main', {})
      return httpx2.Response(200, json={'url': 'https://huggingface.co/us/bert'})
    if match := re.fullmatch(r'/api/models/us/bert/branch/(.+)', path):
      self.branches.setdefault(match[1], dict(self.branches['main']))
      return httpx2.Response(200, json={})
    if '/preupload/' in path:
      return httpx2.Response(200, json={'files': [
          {'path': file['path'], 'shouldIgnore': False,
           'uploadMode': 'lfs' if file['path'].endswith('.safetensors') else 'regular'}
          for file in json.loads(body)['files']]})
    if path.endswith('/info/lfs/objects/batch'):
      return httpx2.Response(200, json={'objects': [
          {**blob, 'actions': {'upload': {'href': f'https://huggingface.co/put/{blob["oid"]}'}}}
          for blob in json.loads(body)['objects']]})
    if path.startswith('/put/'):
      self.blobs[path.removeprefix('/put/')] = body
      return httpx2.Response(200, json={})
    if match := re.fullmatch(r'/api/models/us/bert/commit/(.+)', path):
      for line in map(json.loads, body.splitlines()):
        value = line['value']
        if line['key'] == 'file':
          self.branches[match[1]][value['path']] = base64.b64decode(value['content'])
        elif line['key'] == 'lfsFile':
          self.branches[match[1]][value['path']] = self.blobs[value['oid']]
      return httpx2.Response(200, json={'commitUrl': 'https://huggingface.co/us/bert/commit/1',
                                        'commitOid': '1'})
    return httpx2.Response(200, json={'siblings': [], 'sha': '1', 'id': 'us/bert'})


@pytest.fixture
def hub(monkeypatch):
  monkeypatch.setenv('HF_TOKEN', 'hf_x')
  monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
  server = Hub()
  huggingface_hub.set_client_factory(
      lambda: httpx2.Client(transport=httpx2.MockTransport(server), follow_redirects=True))
  yield server
  huggingface_hub.set_client_factory(_http.default_client_factory)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, corpus_file):
  folder = tmp_path_factory.mktemp('hub') / 'run'
  run.run(conftest.tiny_config(corpus_file), str(folder))  # checkpoints of steps 4, 8, 12
  return folder


@pytest.mark.medium
def test_every_checkpoint_is_a_branch(hub, workdir, tmp_path):
  conversion.convert(str(workdir), str(tmp_path / 'out'), 'huggingface', push='us/bert')
  assert hub.branches.keys() == {'main', 'step-4', 'step-8', 'step-12'}
  for branch, files in hub.branches.items():
    folder = epath.Path(tmp_path / branch)
    folder.mkdir()
    for name, content in files.items():
      (folder / name).write_bytes(content)
    step = int(branch.partition('-')[2] or 12)
    assert dict(verify.compare(load.load(str(workdir), step), load.load(str(folder)), folder))
    where = "'us/bert'" if branch == 'main' else f"'us/bert', revision='{branch}'"
    card = files['README.md'].decode()
    assert f'BertForPreTraining.from_pretrained({where})' in card and 'THIS_FOLDER' not in card
  weights = {branch: files['model.safetensors'] for branch, files in hub.branches.items()}
  assert weights['main'] == weights['step-12'] and len(set(weights.values())) == 3


def test_a_failed_upload_is_repeated_by_the_same_command(hub, workdir, tmp_path):
  arguments = str(workdir), str(tmp_path / 'out'), 'huggingface'
  hub.status = 400
  with pytest.raises(Failed, match='(?s)--push=us/bert: .*: run the same command to upload'):
    conversion.convert(*arguments, push='us/bert')
  hub.status = 403
  with pytest.raises(UserError, match='you may not write there: log in with `hf auth login`'):
    conversion.convert(*arguments, push='us/bert')
  hub.status = 200
  conversion.convert(*arguments, push='us/bert')
  assert len(hub.branches) == 4
  with pytest.raises(UserError, match='already exists: give another --output, or'):
    conversion.convert(*arguments)


def test_a_failed_upload_of_an_embedder_is_repeated_too(hub, tmp_path):
  torch_bert.make('BertForPreTraining', tmp_path / 'model')
  arguments = str(tmp_path / 'model'), str(tmp_path / 'out'), 'sentence_transformers'
  hub.status = 400
  with pytest.raises(Failed, match='--push=us/bert'):
    conversion.convert(*arguments, push='us/bert')
  hub.status = 200
  conversion.convert(*arguments, push='us/bert')
  assert 'modules.json' in hub.branches['main']
  assert "'us/bert'" in hub.branches['main']['README.md'].decode()
  assert 'THIS_FOLDER' in (tmp_path / 'out/README.md').read_text()  # for another name
  for name in ('README.md', 'modules.json'):
    (tmp_path / 'out' / name).unlink()
    with pytest.raises(UserError, match='already exists and is not a folder of --to='):
      conversion.convert(*arguments, push='us/bert')


@pytest.mark.parametrize('name', ['bert', 'us/bert/x', 'us/', 'u s/bert'])
def test_a_wrong_name_is_refused_before_anything_is_written(name, workdir, tmp_path):
  with pytest.raises(UserError, match='is not a name on the hub: give ORGANIZATION/NAME'):
    conversion.convert(str(workdir), str(tmp_path / 'out'), 'huggingface', push=name)
  assert not (tmp_path / 'out').exists()


@pytest.mark.medium
def test_the_hub_reads_the_metadata_of_every_card(tmp_path):
  """Every kind of folder has a card whose header the hub's own class reads."""
  kinds = {
      'bert': (made_tasks.model(tmp_path / 'a'), 'huggingface', 'transformers', None),
      'classifier': (made_tasks.with_head(tmp_path / 'b', 'sequence_classification', ('no', 'yes')),
                     'huggingface', 'transformers', None),
      'embedder': (made_tasks.model(tmp_path / 'c'), 'sentence_transformers',
                   'sentence-transformers', 'sentence-similarity'),
      'late': (made_tasks.late(tmp_path / 'd'), 'sentence_transformers', 'sentence-transformers',
               'sentence-similarity')}
  for name, (source, to, library, pipeline) in kinds.items():
    conversion.convert(source, str(tmp_path / name), to)
    card = huggingface_hub.ModelCard.load(tmp_path / name / 'README.md')
    assert (card.data.library_name, card.data.pipeline_tag) == (library, pipeline)
    assert {'bert', 'bert_jax'} <= set(card.data.tags)
    assert 'parameters' in card.text and '```python' in card.text
