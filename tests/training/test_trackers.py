"""Trackers: one record over kills, read back from TensorBoard's files and W&B's, and mistakes."""

import functools
import importlib.util
import json
import struct
import subprocess
import time

from etils import epath
import pytest
from tensorboardX.proto import event_pb2
import wandb
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal import datastore

from bert_jax.errors import UserError
from bert_jax.runs import run
from bert_jax.training import metrics_log, trackers
from tests import conftest

CONFIG = {'seed': 3, 'optimizer': {'learning_rate': 0.5}}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')


def records(workdir) -> list:
  """The records of W&B's files, the oldest run first."""
  wandb.teardown()  # its process writes the files to the end
  result = []
  for path in sorted(workdir.glob('wandb/offline-run-*/run-*.wandb')):
    store = datastore.DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
      record = wandb_internal_pb2.Record()
      record.ParseFromString(data)
      result.append(record)
  return result


def history(workdir) -> list[dict]:
  """The logged values, without W&B's own."""
  rows = []
  for record in records(workdir):
    if record.WhichOneof('record_type') == 'history':
      row = {'/'.join(item.nested_key) or item.key: json.loads(item.value_json)
             for item in record.history.item}
      rows.append({name: value for name, value in row.items() if name[0] != '_'})
  return rows


def config_of(workdir) -> dict:
  """The config of the newest run."""
  update = [r.run.config.update for r in records(workdir) if r.WhichOneof('record_type') == 'run']
  return {item.key: json.loads(item.value_json) for item in update[-1]}


def write(workdir, first_step, train, evaluated, names=('tensorboard', 'wandb')):
  """Logs the steps of one process of a run."""
  workdir.mkdir(exist_ok=True)
  log = metrics_log.MetricsLog(
      epath.Path(workdir), first_step=first_step, last_step=8, active=True,
      start_trackers=functools.partial(trackers.start, names, CONFIG, workdir.name))
  for step in train:
    log.train(step, {'loss': 1 / step, 'tokens_per_second': 5.0, 'mfu': None})
    if step in evaluated:
      log.evaluation(step, {'loss': 2 / step, 'f1': None if step == 4 else 0.5})
  return log


def test_a_run_that_goes_on_continues_its_record(tmp_path):
  workdir = tmp_path / 'run'
  write(workdir, 0, (2, 4, 6), (4,)).close()
  write(workdir, 4, (6, 8), (6, 8)).close()  # from the checkpoint of step 4
  rows = history(workdir)
  numbers = [row for row in rows if {'train/loss', 'eval/loss'} & row.keys()]
  assert numbers == [
      {'step': 2, 'train/loss': 0.5, 'train/tokens_per_second': 5.0},
      {'step': 4, 'train/loss': 0.25, 'train/tokens_per_second': 5.0},
      {'step': 4, 'eval/loss': 0.5},
      {'step': 6, 'train/loss': 1 / 6, 'train/tokens_per_second': 5.0},  # once
      {'step': 6, 'eval/loss': 1 / 3, 'eval/f1': 0.5},
      {'step': 8, 'train/loss': 0.125, 'train/tokens_per_second': 5.0},
      {'step': 8, 'eval/loss': 0.25, 'eval/f1': 0.5}]
  ids = {r.run.run_id for r in records(workdir) if r.WhichOneof('record_type') == 'run'}
  assert ids == {json.loads((workdir / 'wandb.json').read_text())['id']}
  table = [row['evaluations/path'] for row in rows if 'evaluations/path' in row][-1]
  files = list(workdir.glob(f'wandb/offline-run-*/files/{table}'))
  assert json.loads(files[0].read_text()) == {
      'columns': ['step', 'eval_loss', 'eval_f1'],
      'data': [[4, 0.5, None], [6, 1 / 3, 0.5], [8, 0.25, 0.5]]}
  picture = [row for row in rows if 'curves/path' in row][-1]
  assert picture['curves/path'].endswith('.png')
  pictures = list(workdir.glob(f'wandb/offline-run-*/files/{picture["curves/path"]}'))
  assert pictures[0].read_bytes() == (workdir / 'curves.png').read_bytes()
  assert config_of(workdir)['optimizer'] == {'learning_rate': 0.5}


def events(path) -> list:
  """The events of a file of TensorBoard's: (length, checksum, event, checksum) again and again."""
  content, start, result = path.read_bytes(), 0, []
  while start < len(content):
    length = struct.unpack_from('<Q', content, start)[0]
    result.append(event_pb2.Event.FromString(content[start + 12:start + 12 + length]))
    start += length + 16
  return result


def test_tensorboard_drops_the_steps_that_are_made_again(tmp_path):
  workdir = tmp_path / 'run'
  write(workdir, 0, (2, 4, 6), (), ['tensorboard']).close()
  time.sleep(1.1)  # the names of the files have the second
  write(workdir, 4, (6, 8), (), ['tensorboard']).close()
  kept, texts = [], []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    for event in events(path):
      if event.session_log.status == event_pb2.SessionLog.START:
        kept = [x for x in kept if x[0] < event.step]
      for value in event.summary.value:
        if value.tag == 'train/loss':
          kept.append((event.step, value.simple_value))
        elif value.tag.startswith('config'):
          texts.append(value.tensor.string_val[0].decode())
  assert [step for step, _ in kept] == [2, 4, 6, 8]
  assert len(texts) == 2 and '"learning_rate": 0.5' in texts[0]


def test_a_run_gives_config_and_commit(corpus_file, tmp_path):
  c = conftest.tiny_config(corpus_file, train_steps=2, trackers=('wandb',), **{
      'optimizer.warmup_steps': 1})
  run.run(c, str(tmp_path / 'run'))
  assert not (tmp_path / 'run/tensorboard').exists()
  train = next(row for row in history(tmp_path / 'run') if 'train/loss' in row)
  lines = metrics_log.read_metrics(epath.Path(tmp_path / 'run/metrics.jsonl'))
  assert train['train/loss'] == lines[0]['loss']
  config = config_of(tmp_path / 'run')
  assert config['data']['heldout'] == 0.0 and config['model']['hidden_size'] == 32
  done = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True)
  assert config['commit'].removesuffix('-dirty') == done.stdout.strip()


def test_an_unknown_name_is_a_mistake():
  with pytest.raises(UserError, match="trackers='wandbb' is unknown: use tensorboard, wandb"):
    trackers.check(('wandbb',), given=True)


def test_a_tracker_that_is_not_installed(corpus_file, tmp_path, monkeypatch, capsys):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: (
      None if name in ('wandb', 'tensorboardX') else find(name)))
  for name, package in (('wandb', 'wandb'), ('tensorboard', 'tensorboardX')):
    with pytest.raises(UserError, match=f"'{name}' is not installed: pip install {package}$"):
      run.run(conftest.tiny_config(corpus_file, trackers=(name,)), str(tmp_path / 'run'),
              given={'trackers': ('tensorboard',)})
  with pytest.raises(UserError, match='pip install wandb'):
    trackers.check(('tensorboard', 'wandb'), given=False)
  trackers.check(('tensorboard',), given=False)  # the default, on a machine with few packages
  assert trackers.start(('tensorboard',), CONFIG, 'run', epath.Path(tmp_path), 0) == []
  assert 'tensorboardX is not installed: no record for tensorboard' in capsys.readouterr().out
  assert not (tmp_path / 'run').exists()


def test_a_service_that_refuses_is_one_line(tmp_path, monkeypatch):
  def refuse(**_):
    raise wandb.errors.UsageError('no API key')

  monkeypatch.setattr(wandb, 'init', refuse)
  with pytest.raises(UserError, match='trackers: wandb does not start: no API key; `wandb login`'):
    trackers.start(('wandb',), CONFIG, 'run', epath.Path(tmp_path), 0)
