"""Each warning comes once; a run that cannot recover stops."""

import json
import math
import re

import pytest

from bert_jax.errors import Failed
from bert_jax.reporting import health as health_lib
from bert_jax.runs import run
from tests import conftest


def line(loss, skipped_steps=0):
  return {'loss': loss, 'skipped_steps': skipped_steps}


@pytest.fixture
def settled(monkeypatch):
  """The health of a run that is long past its start."""
  monkeypatch.setattr(health_lib, '_SETTLED', -1)
  return health_lib.Health(3000)


def warnings(watch, metrics, waited=(0.0,)):
  return list(watch.line(metrics, waited))


def test_a_spike_of_the_loss_gives_one_warning():
  watch = health_lib.Health(3000)
  noise = [0.1, -0.1, 0.05, -0.05]
  for i in range(40):
    assert not warnings(watch, line(7 - 0.05 * i + noise[i % 4]))
  assert not warnings(watch, line(6.3))  # within the likely range of the last lines
  (warning,) = warnings(watch, line(9.0))
  assert re.match(r'the loss jumped from about 5\.\d\d to 9\.00\.', warning)
  assert not warnings(watch, line(9.5)) and not warnings(watch, line(math.nan))


def test_a_spike_in_the_first_lines_gives_no_warning():
  watch = health_lib.Health(3000)
  for loss in (5, 5, 5, 9, 5, 5, 5, 5, 5):
    assert not warnings(watch, line(loss))


def test_skipped_steps_give_one_warning_and_five_in_a_row_end_the_run():
  watch = health_lib.Health(3000)
  (warning,) = warnings(watch, line(5.0, 2))
  assert warning.startswith('2 steps had a loss or gradient that is not finite')
  assert not warnings(watch, line(5.0, 1))
  watch.steps(1, [True, True, False, True, True], str)
  watch.steps(6, [True, True], str)  # four in a row, over two lines
  with pytest.raises(Failed, match=r'in 5 steps in a row, the last of them step 8 \(rows of 8\)'):
    watch.steps(8, [True, True, True], 'of {}'.format)
  watch = health_lib.Health(3000)
  watch.steps(1, [True] * 4 + [False] + [True] * 4, str)


def test_a_device_that_waits_for_rows_gives_one_warning(settled):
  assert not warnings(settled, line(5.0), [0.04])
  (warning,) = warnings(settled, line(5.0), [0.5])
  assert 'the device waited 50% of the time for rows: more data.loader_workers' in warning
  assert not warnings(settled, line(5.0), [0.5])


def test_a_slow_host_is_named(settled):
  (warning,) = warnings(settled, line(5.0), [0.01, 0.02, 0.4, 0.01])
  assert 'process 2 of 4 is slower than the others' in warning and 'waited 40%' in warning
  (warning,) = warnings(settled, line(5.0), [0.3, 0.3, 0.4, 0.3])  # every host waits
  assert 'the device waited 40%' in warning


def test_a_wait_at_the_start_gives_no_warning():
  assert not warnings(health_lib.Health(3000), line(5.0), [0.9])


def scores(mlm, accuracy, name='nsp'):
  return {'mlm_loss': mlm, f'{name}_accuracy': accuracy, 'unigram_entropy': 7.0}


def test_an_objective_that_does_not_learn_gives_one_warning():
  def messages(step, values, steps=3000):
    return list(health_lib.Health(steps).evaluation(step, values))

  assert not messages(999, scores(7.0, 0.5)) and not messages(1000, scores(6.9, 0.6))
  assert not messages(500, scores(7.0, 0.5), steps=999)  # a short run need not learn
  assert 'no better than guessing by token frequency: 6.96 and 7.00' in messages(
      1000, scores(6.96, 0.5))[0]
  assert '(while NSP learns): 6.96' in messages(1000, scores(6.96, 0.7))[0]
  assert 'MLM learns and SOP does not (accuracy 0.54)' in messages(1000, scores(5, 0.54, 'sop'))[0]
  assert not messages(1000, {'mlm_loss': 5.0, 'unigram_entropy': 7.0})  # no pairs
  assert not messages(1000, {'accuracy': 0.5})  # fine-tuning
  watch = health_lib.Health(3000)
  assert [len(list(watch.evaluation(step, scores(7, 0.5)))) for step in (1000, 2000)] == [1, 0]


def test_an_evaluation_without_positions_gives_one_warning():
  watch = health_lib.Health(3000)
  empty = {'mlm_loss': 5.0, 'nsp_loss': None, 'nsp_accuracy': None, 'unigram_entropy': 7.0}
  (warning,) = watch.evaluation(1000, empty)
  assert warning.startswith('no position of the evaluation counts for nsp_loss, nsp_accuracy: hold')
  assert not list(watch.evaluation(2000, empty))
  assert len(list(health_lib.Health(9).evaluation(1, dict.fromkeys(empty)))) == 1
  assert not warnings(watch, line(None))


@pytest.mark.slow
def test_a_run_that_diverges_stops(tmp_path, corpus_file):
  config = conftest.tiny_config(corpus_file, **{
      'optimizer.learning_rate': 1e30, 'optimizer.warmup_steps': 0, 'train_steps': 40,
      'eval_every': 40, 'checkpoint_every': 40, 'log_every': 3, 'log_batch_digest': True})
  with pytest.raises(Failed, match=r'not finite in 5 steps in a row, the last of them step (\d+) '
                                   r'\(rows ([0-9a-f]{16})\)') as error:
    run.run(config, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  training = [x for x in lines if 'loss' in x]
  digests = [d for x in training for d in x['batch_digests']]
  step, digest = str(error.value).split('last of them step ')[1].split(')')[0].split(' (rows ')
  assert digests[int(step) - 1] == digest
  # The lines count the skipped steps. A line with only skipped steps has no loss.
  assert [(x['step'], x['skipped_steps'], x['loss'] is None) for x in training] == [
      (3, 2, False), (6, 3, True)]
  assert [x['step'] for x in lines if 'warning' in x] == [3]
