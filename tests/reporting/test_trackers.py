"""Trackers: records in the files of TensorBoard and W&B survive kills; mistakes are errors."""

import contextlib
import functools
import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import types

from etils import epath
import pytest
from tensorboardX.proto import event_pb2
import wandb
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal import datastore

from bert_jax.errors import Failed, UserError
from bert_jax.reporting import metrics_log, trackers
from bert_jax.runs import run
from tests import conftest

CONFIG = {'seed': 3, 'optimizer': {'learning_rate': 0.5}}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')


def records(workdir) -> list:
  """The records of W&B's files, the oldest run first."""
  wandb.teardown()  # its process finishes the files
  result = []
  for path in sorted(workdir.glob('wandb/offline-run-*/run-*.wandb')):
    store = datastore.DataStore()
    store.open_for_scan(str(path))
    with contextlib.suppress(AssertionError):  # a kill cuts the last record short
      while (data := store.scan_data()) is not None:
        result.append(wandb_internal_pb2.Record.FromString(data))
  return result


def history(workdir) -> list[dict]:
  """The logged values, without the values that W&B adds."""
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


def write(workdir, first_step, train, evaluated, names=('tensorboard', 'wandb'), **more):
  """Logs the steps of one process of a run."""
  workdir.mkdir(exist_ok=True)
  log = metrics_log.MetricsLog(
      epath.Path(workdir), first_step=first_step, last_step=8,
      start_trackers=functools.partial(trackers.start, names, CONFIG, workdir.name))
  for step in train:
    log.train(step, {'loss': 1 / step, 'tokens_per_second': 5.0, 'mfu': None, **more})
    if step in evaluated:
      log.evaluation(step, {'loss': 2 / step, 'f1': None if step == 4 else 0.5})
  return log


def test_a_resumed_run_continues_its_record(tmp_path):
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
  """The events of a TensorBoard file, a sequence of (length, checksum, event, checksum)."""
  content, start, result = path.read_bytes(), 0, []
  while start < len(content):
    length = struct.unpack_from('<Q', content, start)[0]
    result.append(event_pb2.Event.FromString(content[start + 12:start + 12 + length]))
    start += length + 16
  return result


def tensorboard(workdir) -> tuple[list[tuple[int, str, float]], list[str]]:
  """The (step, name, value) that TensorBoard shows, and the texts."""
  kept, texts = [], []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    for event in events(path):
      if event.session_log.status == event_pb2.SessionLog.START:
        kept = [x for x in kept if x[0] < event.step]
      for value in event.summary.value:
        if value.tag.startswith('config'):
          texts.append(value.tensor.string_val[0].decode())
        else:
          kept.append((event.step, value.tag, value.simple_value))
  return kept, texts


def test_tensorboard_shows_repeated_steps_once(tmp_path):
  workdir = tmp_path / 'run'
  write(workdir, 0, (2, 4, 6), (), ['tensorboard']).close()
  write(workdir, 4, (6, 8), (), ['tensorboard']).close()  # in the same second
  kept, texts = tensorboard(workdir)
  assert [step for step, name, _ in kept if name == 'train/loss'] == [2, 4, 6, 8]
  assert len(texts) == 2 and '"learning_rate": 0.5' in texts[0]


# It imports little. W&B writes whole blocks of 32 KiB, so short rows do not reach its file.
KILLED = """
import json, os, sys
from etils import epath
from bert_jax.reporting import trackers
workdir, first_step, more = epath.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
workdir.mkdir(exist_ok=True)
record = trackers.start(('tensorboard', 'wandb'), {}, 'run', workdir, first_step, ())
more = {f'train/a_metric_with_a_long_name_{i}': 0.1 * i for i in range(more)}
with (workdir / 'metrics.jsonl').open('a') as file:
  for step in range(first_step + 1, 41):
    rows = [trackers.Row(step, {'train/loss': 1 / step, **more})]
    rows += [trackers.Row(step, {'eval/loss': 2 / step})] * (step % 20 == 0)
    for row in rows:
      for tracker in record:
        tracker.log(row)
      file.write(json.dumps({'step': step, **{
          name.removeprefix('train/').replace('/', '_'): x for name, x in row.scalars.items()}})
          + '\\n')
  file.flush()
os.kill(os.getpid(), 9)
"""


def kill(workdir, first_step=0, more=0):
  """A process of a run logs every step to 40, evaluates 20 and 40, and is killed."""
  command = [sys.executable, '-c', KILLED, str(workdir), str(first_step), str(more)]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == -signal.SIGKILL, done.stderr
  return workdir


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """Two workdirs of killed processes: the first wrote no block of W&B's file, the second did."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('WANDB_MODE', 'offline')
    folder = tmp_path_factory.mktemp('killed')
    return {more: kill(folder / str(more), more=more) for more in (0, 40)}


def kinds_and_steps(workdir) -> list[tuple[str, int]]:
  names = [(next(iter(row.keys() - {'step'})).partition('/')[0], row.get('step'))
           for row in history(workdir)]
  return sorted(name for name in names if name[0] in ('train', 'eval'))


ALL_ROWS = sorted([('train', step) for step in range(1, 41)] + [('eval', 20), ('eval', 40)])


@pytest.mark.medium
@pytest.mark.parametrize('more, checkpoint', [(0, 30), (40, 30), (40, 5), (40, 40)])
def test_no_step_is_lost_after_a_kill(tmp_path, killed, more, checkpoint):
  workdir = shutil.copytree(killed[more], tmp_path / 'run')
  survived = kinds_and_steps(workdir)
  assert (0 < len(survived) < 40) if more else not survived
  shown, _ = tensorboard(workdir)
  assert sorted((name.partition('/')[0], step) for step, name, _ in shown
                if name.endswith('/loss')) == ALL_ROWS
  write(workdir, checkpoint, range(checkpoint + 1, 41), (20, 40)).close()
  assert kinds_and_steps(workdir) == ALL_ROWS  # each once
  losses = {row['step']: row['train/loss'] for row in history(workdir) if 'train/loss' in row}
  assert losses == {step: 1 / step for step in range(1, 41)}


def test_no_step_is_lost_after_two_kills(tmp_path, killed):
  workdir = shutil.copytree(killed[40], tmp_path / 'run')
  kill(workdir, first_step=10)  # killed before it writes a block
  write(workdir, 39, (40,), (40,)).close()
  assert kinds_and_steps(workdir) == ALL_ROWS


def test_a_finished_run_completes_its_record(tmp_path, killed):
  """A kill may come after the last step, before W&B has written its files."""
  workdir = shutil.copytree(killed[0], tmp_path / 'run')
  names = ('tensorboard', 'wandb')
  assert not metrics_log.is_recorded(epath.Path(workdir), names)
  assert metrics_log.is_recorded(epath.Path(workdir), ('tensorboard',))
  write(workdir, 40, (), ()).close()
  assert metrics_log.is_recorded(epath.Path(workdir), names)
  assert kinds_and_steps(workdir) == ALL_ROWS


def test_uploaded_files_may_be_deleted(tmp_path):
  """`wandb sync --clean` deletes them. The run does not send their rows again."""
  workdir = tmp_path / 'run'
  write(workdir, 0, (2, 4, 6), (4,)).close()
  wandb.teardown()
  for path in workdir.glob('wandb/offline-run-*'):
    path.rename(tmp_path / path.name)
  write(workdir, 4, (6, 8), (8,)).close()
  assert kinds_and_steps(workdir) == [('eval', 8), ('train', 8)]


@pytest.mark.parametrize('server, sent', [
    (None, [('train', 2), ('train', 4), ('eval', 4)]), (2, [('train', 4), ('eval', 4)]),
    (4, [('eval', 4)])])
def test_only_rows_that_the_server_may_lack_are_sent(tmp_path, monkeypatch, server, sent):
  """The server reports its last step, but not whether it has the evaluation of that step."""
  logged = []
  online = types.SimpleNamespace(
      offline=False, disabled=False, url='https://w/run', define_metric=lambda *_, **__: None,
      summary={'step': server} if server else {},
      log=lambda row: logged.append((list(row)[1].partition('/')[0], row['step'])))
  monkeypatch.setattr(wandb, 'init', lambda **_: online)
  tracker = trackers.WeightsAndBiases()
  rows = [trackers.Row(2, {'train/loss': 1.0}), trackers.Row(4, {'train/loss': 1.0}),
          trackers.Row(4, {'eval/loss': 1.0})]
  tracker.start(CONFIG, 'run', epath.Path(tmp_path), '', 4, rows)
  assert logged == sent


@pytest.mark.slow
def test_a_run_records_its_config_and_commit(corpus_file, tmp_path):
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


def test_an_unknown_tracker_is_refused():
  with pytest.raises(UserError, match="trackers='wandbb' is unknown: use tensorboard, wandb"):
    trackers.check(('wandbb',), given=True)


def test_only_the_default_tracker_may_be_missing(corpus_file, tmp_path, monkeypatch, capsys):
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
  assert trackers.start(('tensorboard',), {}, '', epath.Path(tmp_path), 0, ()) == []
  assert 'tensorboardX is not installed: no record for tensorboard' in capsys.readouterr().out
  assert not (tmp_path / 'run').exists()


LOGIN = """
from etils import epath
from bert_jax.commands import command
from bert_jax.reporting import trackers
trackers._check_server = lambda url: None
command.run_command(lambda _: trackers.start(('wandb',), {}, '', epath.Path('.'), 0, ()))
"""


def test_a_missing_wandb_login_is_an_error_of_one_line(tmp_path):
  """Even in a terminal, where W&B would prompt for a key."""
  env = {k: v for k, v in os.environ.items() if not k.startswith('WANDB')}
  env |= {'HOME': str(tmp_path), 'PYTHONPATH': os.getcwd()}
  terminal, other_end = pty.openpty()
  done = subprocess.run([sys.executable, '-c', LOGIN], cwd=tmp_path, env=env, stdin=other_end,
                        stdout=other_end, stderr=other_end, timeout=60)
  os.close(other_end)
  text = os.read(terminal, 100_000).decode()
  os.close(terminal)
  assert done.returncode == 2 and text == (
      'bert_jax: trackers: wandb does not start: No API key configured. Use `wandb login` to log '
      'in; `wandb login`, or WANDB_MODE=offline for a record in the workdir\r\n')


def set_variables(monkeypatch, variables):
  """Sets W&B's variables in this process, where W&B then starts again."""
  wandb.teardown()
  for name in [name for name in os.environ if name.startswith('WANDB_')]:
    monkeypatch.delenv(name)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)


@pytest.mark.parametrize('variables, told', [
    ({'WANDB_API_KEY': 'short'}, 'WANDB_API_KEY invalid: API key must have 40+ characters, has 5'),
    ({'WANDB_MODE': 'offlin'}, "Input should be 'online', 'offline', 'shared', 'disabled', "),
    ({'WANDB_RUN_ID': 'a/b', 'WANDB_MODE': 'offline'}, 'Run ID cannot contain the characters')])
def test_wrong_variables_of_wandb_are_refused(tmp_path, monkeypatch, variables, told):
  monkeypatch.setattr(trackers, '_check_server', lambda url: None)
  set_variables(monkeypatch, variables)
  with pytest.raises(UserError) as error:
    trackers.start(('wandb',), {}, '', epath.Path(tmp_path), 0, ())
  assert str(error.value).startswith('trackers: wandb does not start: ')
  assert told in str(error.value) and str(error.value).endswith(
      f'; correct or unset its variables (set are: {", ".join(sorted(variables))})')
  set_variables(monkeypatch, {'WANDB_MODE': 'offline'})  # correct them
  tracker, = trackers.start(('wandb',), {}, '', epath.Path(tmp_path), 0, ())
  tracker.finish(epath.Path(tmp_path), ())


def test_an_unreachable_server_is_an_error(tmp_path, monkeypatch):
  """W&B itself would retry for half an hour and print nothing."""
  with contextlib.closing(socket.socket()) as free:
    free.bind(('127.0.0.1', 0))
    url = f'http://127.0.0.1:{free.getsockname()[1]}'
  set_variables(monkeypatch, {'WANDB_BASE_URL': url, 'WANDB_API_KEY': 40 * 'a'})
  for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy', 'no_proxy'):
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(Failed, match=f'wandb cannot reach {url}: .*; WANDB_MODE=offline keeps'):
    trackers.start(('wandb',), {}, '', epath.Path(tmp_path), 0, ())


def test_wandb_prints_one_line(tmp_path, monkeypatch, capfd):
  set_variables(monkeypatch, {'WANDB_MODE': 'offline'})
  write(tmp_path / 'run', 0, (2, 4), (4,), ['wandb']).close()
  wandb.teardown()
  captured = capfd.readouterr()
  folder = tmp_path / 'run/wandb/offline-run-*'
  assert captured.out.splitlines()[0] == (
      f'  wandb           offline: `wandb sync --append {folder}` uploads it')
  assert all(line.startswith('step ') for line in captured.out.splitlines()[1:])
  assert 'wandb' not in captured.err and len(list(folder.parent.glob(folder.name))) == 1
