"""A server that does not answer is an error at once."""

import socket
import time

from etils import epath
import pytest

from bert_jax import config as config_lib
from bert_jax.errors import Failed, UserError
from bert_jax.inference import predictions
from bert_jax.interop import load
from bert_jax.runtime import network, storage
from bert_jax.tasks import finetuning_data, task_list
from tests import made_tasks

PROXIES = ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY',
           'no_proxy', 'NO_PROXY')


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
  for name in PROXIES:
    monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port():
  """The port of a server that accepts connections."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    yield server.getsockname()[1]


def closed() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def test_a_server_that_answers_passes_the_check(port):
  network.check(f'http://127.0.0.1:{port}/path?query')


@pytest.mark.parametrize('make_url, message', [
    (lambda: f'http://127.0.0.1:{closed()}', r'127.0.0.1 does not answer \(Connection refused\)'),
    (lambda: f'https://127.0.0.1:{closed()}/x', r'127.0.0.1 does not answer'),
    (lambda: 'https://nowhere.invalid', r'nowhere.invalid does not answer \(\S.*\)')])
def test_a_server_that_does_not_answer_is_an_error(make_url, message):
  with pytest.raises(OSError, match=message):
    network.check(make_url())


def test_an_address_behind_a_proxy_is_not_checked(monkeypatch):
  monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')
  network.check('https://nowhere.invalid')


@pytest.mark.parametrize('variables, server', [
    ({}, 'https://storage.googleapis.com'),
    ({'STORAGE_EMULATOR_HOST': 'default'}, 'https://storage.googleapis.com'),
    ({'STORAGE_EMULATOR_HOST': 'localhost:9000'}, 'http://localhost:9000'),
    ({'STORAGE_EMULATOR_HOST': 'https://b:1'}, 'https://b:1'),
    ({'GOOGLE_CLOUD_UNIVERSE_DOMAIN': 'x.goog'}, 'https://storage.x.goog')])
@pytest.mark.parametrize('name', ['--workdir', 'data.source', '--output'])
def test_the_server_of_a_bucket_is_checked_before_the_bucket(monkeypatch, variables, server, name):
  for variable in ('STORAGE_EMULATOR_HOST', 'GOOGLE_CLOUD_UNIVERSE_DOMAIN'):
    monkeypatch.delenv(variable, raising=False)
  for variable, value in variables.items():
    monkeypatch.setenv(variable, value)
  asked = []

  def check(url):
    asked.append(url)
    raise OSError('it does not answer (No route to host)')

  monkeypatch.setattr(network, 'check', check)
  monkeypatch.setattr(epath, 'Path', None)  # TensorFlow and gcsfs try for a minute
  with pytest.raises(Failed, match=f'^{name}=gs://b/x cannot be reached: it does not answer .*: '
                                   'fix the network and run the same command again$'):
    storage.check(name, 'gs://b/x')
  assert asked == [server]
  storage.check(name, 'here/x')  # no bucket, no network
  with pytest.raises(UserError, match='buckets are named gs://'):
    storage.check(name, 's3://b/x')
  assert asked == [server]


def test_an_unreachable_bucket_is_an_error_within_seconds(monkeypatch):
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'127.0.0.1:{closed()}')
  began = time.monotonic()
  with pytest.raises(Failed, match='127.0.0.1 does not answer'):
    storage.check('--workdir', 'gs://b/x')
  assert time.monotonic() - began < 5



def test_a_model_in_an_unreachable_bucket_is_an_error(monkeypatch):
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{closed()}')
  with pytest.raises(Failed, match='model=gs://no/m cannot be reached: 127.0.0.1 does not answer'):
    load.load('gs://no/m')


def test_examples_in_an_unreachable_bucket_are_an_error(monkeypatch, tmp_path):
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{closed()}')
  with pytest.raises(Failed, match='--input=gs://no/x.jsonl cannot be reached'):
    predictions.run('embed', made_tasks.model(tmp_path / 'm'), 'gs://no/x.jsonl', None)
  config = config_lib.finetuning('sequence_classification')
  for field in ('train', 'eval'):
    config.data.train, config.data.eval = 'a.tsv', 'b.tsv'
    config.data[field] = 'gs://no/t.tsv'
    with pytest.raises(Failed, match=f'data.{field}=gs://no/t.tsv cannot be reached'):
      finetuning_data.read(task_list.ALL[config.task].files, config, None, None)
