"""The reports of a run, through the object that the training loop calls in each step."""

import json

from etils import epath
import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.errors import Failed
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.reporting import batch_digests
from bert_jax.reporting import reporter as reporter_lib
from bert_jax.runtime import storage
from tests import conftest


class Halves:
  """Both halves of a task: a step has one row, its number."""

  loss_weights = {'a_loss': 1.0}

  def rows(self, step):
    return np.full((1, 1), step)

  def flops(self, step, tokens):
    return tokens


def make_reporter(folder, **fields):
  config = config_lib.pretraining('tiny')
  config.update(trackers=(), **fields)
  return reporter_lib.Reporter(
      Halves(), Halves(), FrozenConfigDict(config), conftest.sub_mesh(1, 1),
      storage.Folder(epath.Path(folder)), first_step=0, train_steps=3000,
      learning_rate=lambda step: 1 / (1 + step))


def make_steps(reporter, steps, skipped=0.0):
  one = jnp.float32(1)
  for step in steps:
    reporter.before_step(step, Halves().rows(step - 1))
    reporter.after_step(step, {'a_loss': (one * step, one), 'tokens': (one, one),
                               'skipped': (one * skipped, one)})


def lines(folder):
  return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_a_line_waits_for_the_next_step_unless_it_is_written_now(tmp_path):
  reporter = make_reporter(tmp_path)
  make_steps(reporter, [1, 2])
  reporter.end_line(2, write_now=False)
  assert not lines(tmp_path)
  make_steps(reporter, [3])
  reporter.end_line(3, write_now=True)
  reporter.close()
  assert [(x['step'], x['loss'], x['learning_rate']) for x in lines(tmp_path)] == [
      (2, 1.5, 1 / 2), (3, 3.0, 1 / 3)]


def test_an_evaluation_comes_before_its_warning(tmp_path):
  reporter = make_reporter(tmp_path)
  reporter.evaluation(5, {'a_loss': 1.0, 'b_loss': None})
  reporter.close()
  scores, warning = lines(tmp_path)
  assert scores == {'step': 5, 'eval_a_loss': 1.0, 'eval_b_loss': None}
  assert warning['step'] == 5 and 'no position of the evaluation counts for b_loss' in (
      warning['warning'])


@pytest.mark.parametrize('logs', [True, False])
def test_errors_and_lines_have_the_digests_of_the_rows(tmp_path, logs):
  """The fifth skipped step in a row names its rows, whether digests are logged or not."""
  digests = [f'{batch_digests.batch_digest(Halves().rows(i)):016x}' for i in range(5)]
  reporter = make_reporter(tmp_path, log_batch_digest=logs)
  make_steps(reporter, [1, 2, 3, 4, 5], skipped=1.0)
  with pytest.raises(Failed, match=rf'the last of them step 5 \(rows {digests[4]}\)'):
    reporter.end_line(5, write_now=True)
  reporter.close()
  assert lines(tmp_path)[0].get('batch_digests') == (digests if logs else None)


def test_processes_other_than_the_first_write_nothing(tmp_path, monkeypatch):
  mesh_lib.feed(conftest.sub_mesh(1, 1))  # cached: other tests need the real process index
  monkeypatch.setattr(jax, 'process_index', lambda *_: 1)
  reporter = make_reporter(tmp_path)
  make_steps(reporter, [1, 2])
  reporter.end_line(2, write_now=True)
  reporter.evaluation(2, {'a_loss': 1.0})
  reporter.close()
  assert not list(tmp_path.iterdir())
