import io
import json
import os
import signal
import sys
import time
import types

from etils import epath
import pytest

from bert_jax.reporting import metrics_log
from bert_jax.runtime import console


def test_truncation_removes_later_lines_and_a_half_written_one(tmp_path):
  path = epath.Path(tmp_path / 'metrics.jsonl')
  lines = [{'step': s, 'loss': 1.0} for s in (10, 20, 30)]
  path.write_text(''.join(json.dumps(x) + '\n' for x in lines) + '{"step": 40, "lo')
  metrics_log.truncate_metrics(path, 20)
  assert metrics_log.read_metrics(path) == lines[:2]
  metrics_log.truncate_metrics(epath.Path(tmp_path / 'none.jsonl'), 5)
  assert not (tmp_path / 'none.jsonl').exists()


def test_values_that_are_not_finite_are_null_in_json(tmp_path, capsys):
  r = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10)
  r.train(5, {'loss': float('nan'), 'mlm_loss': 2.0, 'tokens_per_second': None})
  r.evaluation(5, {'mlm_loss': 3.0, 'nsp_loss': None, 'unigram_entropy': 4.0})
  r.close()
  assert metrics_log.read_metrics(epath.Path(tmp_path / 'metrics.jsonl')) == [
      {'step': 5, 'loss': None, 'mlm_loss': 2.0, 'tokens_per_second': None},
      {'step': 5, 'eval_mlm_loss': 3.0, 'eval_nsp_loss': None, 'eval_unigram_entropy': 4.0}]
  out = capsys.readouterr().out
  assert 'step 5/10' in out and 'held out:  mlm_loss 3.000  nsp_loss -  unigram' in out
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_curves_are_drawn_every_half_minute_and_at_the_end(tmp_path, monkeypatch):
  drawn, now = [], [0.0]
  monkeypatch.setattr(metrics_log.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(metrics_log, '_draw_curves', lambda lines, path: drawn.append(len(lines)))
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10)
  for seconds in (1, 29, 31, 32, 60):
    now[0] = float(seconds)
    log.evaluation(seconds, {'mlm_loss': 3.0})
  assert drawn == [3]
  log.close()
  assert drawn == [3, 5]


@pytest.mark.parametrize('seconds, text', [
    (0.4, '0 s'), (59.4, '59 s'), (59.6, '1 min'), (3_599, '59 min'), (12_000, '3 h 20 min'),
    (86_400, '1 d 0 h'), (367_200, '4 d 6 h')])
def test_durations(seconds, text):
  assert console.duration(seconds) == text


def test_the_bar_says_the_time_left_in_days():
  bar = metrics_log._Bar(total=100_000, initial=10_000, file=io.StringIO(),
                    bar_format='{n_fmt}/{total_fmt} [{left} left]')
  bar.n = 10_001
  bar.start_t -= 3.98  # 3.98 s and the time until `str`; 89,999 steps are left: 358,196 s
  assert str(bar) == '10001/100000 [4 d 3 h left]'
  bar.close()


def test_later_estimates_of_the_time_left_exclude_the_compilation(tmp_path, monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(metrics_log.time, 'monotonic', lambda: now[0])
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=100, last_step=200)
  for step, seconds in ((110, 30.0), (120, 35.0), (140, 45.0)):
    now[0] = seconds
    log.train(step, {'loss': 1.0, 'tokens_per_second': 1.0})
  log.close()
  lefts = [line.split('  ')[-1] for line in capsys.readouterr().out.splitlines()]
  assert lefts == ['4 min left', '40 s left', '30 s left']


class InterruptedTracker:
  """Ctrl-C comes in the middle of a call."""

  def __init__(self):
    self.logged = []

  def log(self, row):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python handles the signal here
    self.logged.append(tuple(row))

  def finish(self, workdir, evaluations):
    self.logged.append('finished')


def test_ctrl_c_waits_for_the_trackers(tmp_path):
  tracker = InterruptedTracker()
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10,
                               start_trackers=lambda *_: [tracker])
  with pytest.raises(KeyboardInterrupt):
    log.train(5, {'loss': 1.0, 'tokens_per_second': 1.0})
  log.close()
  assert tracker.logged == [(5, {'train/loss': 1.0, 'train/tokens_per_second': 1.0}), 'finished']


def test_every_line_to_a_pipe_is_flushed(tmp_path, monkeypatch):
  """Without a flush, Python writes whole blocks to a pipe, and a kill would lose lines."""
  pipe = io.BytesIO()
  monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(pipe))
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10)
  log.evaluation(5, {'loss': 1.0})
  assert pipe.getvalue() == b'step 5  held out:  loss 1.000\n'
  log.evaluation(6, {'loss': 1.5}, ['it rises'])
  assert pipe.getvalue().endswith(b'step 6  warning: it rises\n')


def test_the_last_evaluation_draws_the_curves_at_once(tmp_path):
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10)
  log.evaluation(5, {'loss': 1.0})
  assert not (tmp_path / 'curves.png').exists()  # drawing takes a second
  log.evaluation(10, {'loss': 1.0})
  assert (tmp_path / 'curves.png').exists()


def test_trackers_get_evaluations_without_a_loss(tmp_path):
  """An embedder is judged by its correlations alone."""
  lines = []
  tracker = types.SimpleNamespace(log=lambda row: None,
                                  finish=lambda workdir, evaluations: lines.extend(evaluations))
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10,
                               start_trackers=lambda *_: [tracker])
  log.train(5, {'loss': 1.0, 'tokens_per_second': 1.0})
  log.evaluation(5, {'spearman': 0.5})
  log.close()
  assert lines == [{'step': 5, 'eval_spearman': 0.5}]


def test_an_evaluation_is_complete_only_after_every_tracker_has_it(tmp_path):
  """A resumed run repeats an evaluation that metrics.jsonl lacks."""
  seen = []
  tracker = types.SimpleNamespace(log=lambda row: seen.append(
      metrics_log.is_evaluated(epath.Path(tmp_path), row.step)))
  log = metrics_log.MetricsLog(epath.Path(tmp_path), first_step=0, last_step=10,
                               start_trackers=lambda *_: [tracker])
  log.evaluation(5, {'loss': 1.0})
  assert seen == [False] and metrics_log.is_evaluated(epath.Path(tmp_path), 5)
