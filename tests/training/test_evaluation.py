"""One evaluation alone: its checkpoint, its lines, and their order."""

import types

import numpy as np

from bert_jax.training import loop
from bert_jax.training.state import TrainState
from tests import conftest


def evaluate(events, stops=False):
  """Runs an evaluation of one batch after step 7; its events are appended to the list."""

  def scores(measure, step):
    return {'loss': float(measure(np.full((1, 2), step)).sum())}

  def event(name):
    return lambda *args: events.append((name, *args))

  return loop._evaluate(
      TrainState(7, 'params', None, None), 7, data=types.SimpleNamespace(
          evaluate=scores, judged_on=lambda step: f'rows of {step}'),
      eval_step=lambda state, batch: np.asarray(batch), mesh=conftest.sub_mesh(1, 1),
      notice=types.SimpleNamespace(reached=lambda: stops), keep_best='loss',
      checkpoints=types.SimpleNamespace(offer=event('offer')),
      reporter=types.SimpleNamespace(evaluation=event('report')))


def test_the_best_checkpoint_is_saved_before_the_evaluation_is_reported():
  events = []
  assert evaluate(events)
  assert events == [('offer', 'params', 7, {'loss': 14.0}, 'rows of 7'),
                    ('report', 7, {'loss': 14.0})]


def test_an_interrupted_evaluation_saves_and_reports_nothing():
  events = []
  assert not evaluate(events, stops=True)
  assert not events
