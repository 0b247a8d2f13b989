import numpy as np
import pytest

from bert_jax.data.pairs import Layout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource
from bert_jax.errors import UserError
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.tasks.pretraining import Pretraining, PretrainingData
from tests.data.made import TOKENIZER, varied


def test_locate():
  phases = Phases.create(((900, 128, 256), (100, 512, 64)), 1000, 512, 256)
  assert phases.locate(0) == (0, (900, 128, 256), 0)
  assert phases.locate(899) == (0, (900, 128, 256), 899)
  assert phases.locate(900) == (1, (100, 512, 64), 0)
  assert phases.locate(999) == (1, (100, 512, 64), 99)


def test_none_is_one_phase():
  assert Phases.create((), 10, 128, 32) == ((10, 128, 32),)


@pytest.mark.parametrize('phases', [((5, 128, 8),), ((5, 128), (5, 128)), ((10, 0, 8),),
                                    ((10.0, 8, 8),)])
def test_wrong_phases(phases):
  with pytest.raises(UserError, match='phases='):
    Phases.create(phases, 10, 128, 8)


def test_a_phase_begins_where_the_one_before_ended():
  phases = Phases.create(((10, 64, 8), (10, 64, 16), (5, 512, 4), (1, 64, 8)), 26, 64, 8)
  rows = (300, 300, 40, 300)  # an epoch has
  assert [phases.first_row(i, rows) for i in range(4)] == [0, 80, 32, 390]  # 240 / 300 = 32 / 40
  # Rounded up: 100 of 300 rows are 13.3 of 40, and 15 of those 112.5 of 300.
  phases = Phases.create(((25, 64, 4), (1, 512, 1), (1, 64, 4)), 27, 64, 4)
  assert [phases.first_row(i, (300, 40, 300)) for i in range(3)] == [0, 14, 113]


def _task(phases):
  records = varied(120, block=50)
  sources = [RowSource(records, Layout(phase.max_len, 4), 0, TOKENIZER) for phase in phases]
  return PretrainingData(Pretraining(None, MaskingConfig(), None), None, phases, 0,
                         tuple(sources), ())


def test_a_batch_warmup_reads_each_row_of_the_epoch_once():
  source = _task(Phases.create((), 1, 64, 1)).train_rows[0]
  assert 240 < source.rows < 2 * 240  # less than an epoch
  phases = Phases.create(((10, 64, 8), (source.rows // 16 - 5, 64, 16)), 5 + source.rows // 16,
                         64, 8)
  task = _task(phases)
  read = [task.rows(step).rows.ids for step in range(5 + source.rows // 16)]
  np.testing.assert_array_equal(np.concatenate(read), source.batch(0, source.rows // 16 * 16).ids)
  # A run that is resumed in the second phase.
  np.testing.assert_array_equal(_task(phases).rows(13).rows.ids, read[13])


def test_a_phase_of_another_length_reads_what_the_one_before_has_not():
  short, long = (_task(Phases.create((), 1, n, 1)).train_rows[0] for n in (32, 64))
  steps = short.rows // 2
  task = _task(Phases.create(((steps, 32, 1), (long.rows // 2, 64, 1)), steps + long.rows // 2,
                             64, 1))
  rows = task.rows(steps).rows.ids
  np.testing.assert_array_equal(rows, long.batch(-(-steps * long.rows // short.rows), 1).ids)
