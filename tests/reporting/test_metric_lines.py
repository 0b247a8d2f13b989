"""Metric lines with a fake clock: tokens per second, MFU, waits for rows."""

import functools
import threading
import types

from etils import epath
import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.parallel import chip_figures
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.reporting import metric_lines, metrics_log, trackers
from bert_jax.runtime import storage
from bert_jax.training import loop
from bert_jax.training import state as state_lib
from bert_jax.training.state import TrainState
from tests import conftest

_TOKENS = 50  # in step 1; each later step has one more
_LINES = metric_lines.MetricLines


class Clock:
  """A clock that only the test moves."""

  def __init__(self):
    self.now = 1000.0
    self.asked = threading.Event()

  def __call__(self):
    self.asked.set()
    return self.now


class Task:
  """Each step has more tokens than the last; an evaluation takes 1,000 seconds."""

  loss_weights = {'a_loss': 1.0}
  frozen = {}
  has_held_out = True
  longer_from = 1000  # after this many steps, a row has two tokens

  def __init__(self, clock):
    self._clock = clock

  def rows(self, step):
    return np.full((1, 1 + (step >= self.longer_from)), step)

  def evaluate(self, measure, step):
    self._clock.now += 1000
    return {'a_loss': 1.0}

  def measure(self, params, frozen, batch):
    raise AssertionError

  def judged_on(self, step):
    return ''

  def flops(self, step, tokens):
    return 3.0 * tokens


def metrics_of(step):
  one = jnp.float32(1)
  return {'a_loss': (one, one), 'skipped': (jnp.float32(0), one),
          'tokens': (jnp.float32(_TOKENS + step), one)}


def written(tmp_path, monkeypatch, steps, log_every, checkpoint_every, eval_every, first=0,
            inside=lambda: None, **more):
  """The training lines of a run whose steps take 1, 2, 4, ... seconds, and 500 to compile."""
  clock, compiled = Clock(), set()
  monkeypatch.setattr(chip_figures, 'chip_of', lambda _: chip_figures.Chip(10.0, 1, 1, 1))

  def save(state, step):
    clock.now += 100

  metrics = [metrics_of(step) for step in range(steps)]

  def train_step(state, batch):
    inside()
    clock.now += 2.0**state.step + (0 if batch.shape in compiled else 500)
    compiled.add(batch.shape)
    return state._replace(step=state.step + 1), metrics[state.step]

  begin = TrainState(first, None, None, {})
  monkeypatch.setattr(state_lib, 'make_init', lambda *_: (lambda key: begin, begin))
  monkeypatch.setattr(state_lib, 'make_train_step', lambda *_, **__: train_step)
  checkpoints = types.SimpleNamespace(
      save=save, check=lambda: None, close=lambda: None, offer=lambda *_: None,
      settle=lambda *_: None,
      latest=lambda: first or None, restore=lambda _: (begin, first))
  monkeypatch.setattr(metric_lines, 'MetricLines', functools.partial(_LINES, clock))
  config = config_lib.pretraining('tiny')
  config.update(log_every=log_every, checkpoint_every=checkpoint_every, eval_every=eval_every,
                trackers=(), **more)
  config.optimizer.warmup_steps = 0
  job = types.SimpleNamespace(task=Task(clock), data=Task(clock), train_steps=steps)
  loop.train(job, FrozenConfigDict(config), conftest.sub_mesh(1, 1),
             storage.Folder(epath.Path(tmp_path)), checkpoints, initial=lambda params: params)
  return [line for line in metrics_log.read_metrics(epath.Path(tmp_path) / 'metrics.jsonl')
          if 'loss' in line]


@pytest.mark.parametrize('steps, log_every, checkpoint_every, eval_every, ends', [
    (6, 1, 100, 100, [1, 2, 3, 4, 5, 6]),
    (6, 2, 100, 100, [2, 4, 6]),
    (10, 10, 10, 10, [10]),  # a former bug doubled the speed here
    (9, 3, 4, 100, [3, 4, 6, 8, 9]),  # checkpoints within lines of three
    (9, 3, 100, 4, [3, 4, 6, 8, 9]),  # evaluations within lines of three
    (8, 4, 4, 4, [4, 8]),
    (7, 5, 3, 2, [2, 3, 4, 5, 6, 7])])
def test_a_line_has_the_time_of_its_own_steps(tmp_path, monkeypatch, steps, log_every,
                                              checkpoint_every, eval_every, ends):
  lines = written(tmp_path, monkeypatch, steps, log_every, checkpoint_every, eval_every)
  assert [line['step'] for line in lines] == ends
  begin = 1  # the first step compiles and counts in no line
  for line, end in zip(lines, ends):
    timed = range(begin, end)
    begin = end
    if not timed:
      assert line['tokens_per_second'] is line['mfu'] is line['data_wait'] is None
      continue
    speed = sum(_TOKENS + step for step in timed) / sum(2.0**step for step in timed)
    np.testing.assert_allclose(line['tokens_per_second'], speed, rtol=1e-9)
    np.testing.assert_allclose(line['mfu'], 3 * speed / 10, rtol=1e-9)
    assert line['data_wait'] == 0


def test_a_hidden_transfer_within_a_step_is_an_error(tmp_path, monkeypatch):
  with pytest.raises(jax.errors.JaxRuntimeError, match='Disallowed host-to-device transfer'):
    written(tmp_path, monkeypatch, 2, 1, 100, 100,
            inside=lambda: jax.jit(lambda x: x + 1)(np.ones(2, np.float32)))


def test_the_first_step_of_a_longer_phase_is_not_timed(tmp_path, monkeypatch):
  monkeypatch.setattr(Task, 'longer_from', 3)  # the fourth step
  lines = written(tmp_path, monkeypatch, 6, 2, 100, 100)
  speeds = [(_TOKENS + 1) / 2, None, (2 * _TOKENS + 4 + 5) / (16 + 32)]
  assert [line['tokens_per_second'] for line in lines] == speeds


def test_keep_best_by_a_score_without_positions_is_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(Task, 'evaluate', lambda *_: {'a_loss': None})
  with pytest.raises(UserError, match='keep_best=a_loss: no position of the evaluation counts'):
    written(tmp_path, monkeypatch, 4, 2, 100, 2, keep_best='a_loss')
  lines = (tmp_path / 'metrics.jsonl').read_text()
  assert '"step": 2, "loss": 1.0' in lines and 'eval_' not in lines


def test_a_step_without_positions_has_no_loss(tmp_path, monkeypatch):
  nothing = (jnp.float32(0), jnp.float32(0))
  monkeypatch.setattr(Task, 'loss_weights', {'a_loss': 1.0, 'b_loss': 1.0})
  for a, expected in ((jnp.float32(1), 1.0), (jnp.float32(0), None)):
    monkeypatch.setitem(globals(), 'metrics_of', lambda step, a=a, whole=metrics_of: {
        **whole(step), 'a_loss': (a, a), 'b_loss': nothing})
    workdir = tmp_path / str(expected)
    workdir.mkdir()
    (row,) = written(workdir, monkeypatch, 1, 1, 100, 100)
    assert (row['loss'], row['a_loss'], row['b_loss']) == (expected, expected, None)


@pytest.mark.parametrize('platform, ahead', [('cpu', 0), ('tpu', 1)])
def test_a_cpu_writes_a_line_before_its_next_step(tmp_path, monkeypatch, platform, ahead):
  begun, logged, put = [], [], mesh_lib.put_batch
  tracker = types.SimpleNamespace(
      log=lambda row: logged.append((row.step, len(begun))), finish=lambda *_: None)
  monkeypatch.setattr(mesh_lib, 'put_batch',
                      lambda batch, mesh: begun.append(batch) or put(batch, mesh))
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  monkeypatch.setattr(Task, 'has_held_out', False)
  monkeypatch.setattr(trackers, 'start', lambda *_: [tracker])
  written(tmp_path, monkeypatch, 6, 2, 100, 100)
  assert logged == [(2, 2 + ahead), (4, 4 + ahead), (6, 6)]


def test_a_resumed_run_does_not_time_its_first_step(tmp_path, monkeypatch):
  lines = written(tmp_path, monkeypatch, 8, 2, 100, 100, first=4)
  assert [line['step'] for line in lines] == [6, 8]
  speeds = [(_TOKENS + 5) / 2.0**5, (2 * _TOKENS + 13) / (2.0**6 + 2.0**7)]
  np.testing.assert_allclose([line['tokens_per_second'] for line in lines], speeds, rtol=1e-9)


class Later:
  """A result that is not ready until the test sets `done`."""

  def __init__(self, value):
    self._value, self.done = value, threading.Event()

  def is_ready(self):
    return self.done.is_set()

  def block_until_ready(self):
    assert self.done.wait(10)
    return self

  def __float__(self):
    return float(self.block_until_ready()._value)


def test_the_time_of_a_line_ends_when_the_device_is_ready(monkeypatch):
  """The line comes after the next rows; the wait for them counts in the next line."""
  clock, written_lines = Clock(), []
  monkeypatch.setattr(jax, 'device_get', lambda tree: jax.tree.map(float, tree))
  lines = metric_lines.MetricLines(clock)
  assert lines.is_idle()
  lines.start_clock()

  for step, now, waits in ((1, 1010, 3.0), (2, 1030, 5.0)):
    result = jax.tree.map(lambda x: Later(float(x)), metrics_of(0))
    lines._line.waited = waits
    lines.add(result)
    assert not lines.is_idle()
    clock.asked.clear()
    lines.end(step)
    assert not clock.asked.is_set() and lines._line.waited == 0
    clock.now = now
    for x in jax.tree.leaves(result):
      x.done.set()
    assert clock.asked.wait(10) and lines.is_idle()
    lines._line.waited = 7.0  # for the rows of the next step
    clock.now += 15
    written_lines.append(lines.fetch().values(
        loss_weights={'a_loss': 1.0}, learning_rate=0.5, flops=1.0, peak_flops=None))
  assert [(line['tokens_per_second'], line['data_wait']) for line in written_lines] == [
      (50 / 10, 3 / 10), (50 / 20, 5 / 20)]


def test_only_a_wait_with_an_idle_device_counts(monkeypatch):
  clock, idle = Clock(), [True, False, True]
  lines = metric_lines.MetricLines(clock)
  monkeypatch.setattr(lines, 'is_idle', lambda: idle.pop(0))
  waited = []
  for seconds in (2.0, 30.0, 0.5):
    with lines.waiting_for_rows():
      clock.now += seconds
    waited.append(lines._line.waited)
  assert waited == [2, 2, 2.5]
