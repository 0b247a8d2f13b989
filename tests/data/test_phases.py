import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data import rows as rows_lib
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import RowSource, first_rows
from bert_jax.errors import UserError
from bert_jax.objectives.masking import MaskingConfig
from bert_jax.runs import resolve
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from tests.data.made import FIRST, TOKENIZER, varied


def test_locate():
  phases = Phases.create(((900, 128, 256), (100, 512, 64)), 1000, 512, 256)
  assert phases.locate(0) == (0, (900, 128, 256), 0)
  assert phases.locate(899) == (0, (900, 128, 256), 899)
  assert phases.locate(900) == (1, (100, 512, 64), 0)
  assert phases.locate(999) == (1, (100, 512, 64), 99)


def test_an_empty_list_of_phases_is_one_phase():
  assert Phases.create((), 10, 128, 32) == ((10, 128, 32),)


@pytest.mark.parametrize('phases', [((5, 128, 8),), ((5, 128), (5, 128)), ((10, 0, 8),),
                                    ((10.0, 8, 8),)])
def test_wrong_phases(phases):
  with pytest.raises(UserError, match='phases='):
    Phases.create(phases, 10, 128, 8)


@pytest.mark.parametrize('phases, total', [
    (((3_000_000_000, 128, 8),), 3_000_000_000),
    (((2_000_000_000, 128, 8), (147_483_648, 64, 8)), 2**31)])
def test_more_steps_than_a_run_can_have(phases, total):
  """The message names the given field, whatever the config file says about train_steps."""
  config = config_lib.pretraining('tiny')
  config.phases = phases
  with pytest.raises(UserError, match=f'^phases=.* sum to {total}, a run has at most 2147483647'):
    resolve.fitted(config, {'phases': ()})
  config.phases = ((2**31 - 1, 128, 8),)  # the remedy: as many as a run can have
  config, _ = resolve.fitted(config, {'phases': ()})
  config_lib.check(config)
  assert config.train_steps == 2**31 - 1


def _task(phases):
  records = varied(120, block=50)
  sources = [RowSource(records, RowLayout(phase.max_len, 4), 0, TOKENIZER) for phase in phases]
  return PretrainingData(Pretraining(None, MaskingConfig(), None), None, phases, 0,
                         tuple(sources), ())


def test_a_batch_warmup_reads_each_row_of_the_epoch_once():
  source = _task(Phases.create((), 1, 64, 1)).train_rows[0]
  assert 240 < source.rows < 2 * 240  # less than an epoch
  phases = Phases.create(((10, 64, 8), (source.rows // 16 - 5, 64, 16)), 5 + source.rows // 16,
                         64, 8)
  task = _task(phases)
  read = [task.rows(step).tokens.ids for step in range(5 + source.rows // 16)]
  whole = source.batch(0, source.rows // 16 * 16)
  np.testing.assert_array_equal(np.concatenate(read), whole.tokens.ids)
  # A run that resumes in the second phase.
  np.testing.assert_array_equal(_task(phases).rows(13).tokens.ids, read[13])


def _read(source, first, count):
  """The tokens in some rows of the walk."""
  if not count:
    return set()
  ids = source.take(first + np.arange(count), np.arange(count)).tokens.ids
  return set(ids[ids >= FIRST].tolist())


@pytest.mark.parametrize('lengths', [(32, 64), (64, 32), (16, 128)])
def test_a_phase_of_another_length_repeats_no_token_of_the_epoch(lengths, monkeypatch):
  monkeypatch.setattr(rows_lib, '_WINDOW', 50)  # many windows in a small corpus
  records = varied(250, block=60)
  sources = [RowSource(records, RowLayout(n, 4), 3, TOKENIZER) for n in lengths]
  before, after = sources
  assert min(len(source._first_block) for source in sources) > 5
  for epoch in (0, 1):
    for count in np.linspace(1, before.rows - 1, 9).astype(int):
      _, first = first_rows(sources, (epoch * before.rows + count, 1))
      rest = (epoch + 1) * after.rows - first  # rows left in the epoch
      assert 0 <= rest < after.rows
      read, left = _read(before, epoch * before.rows, count), _read(after, first, rest)
      assert not read & left
      # At most the rest of one window of each length is left out.
      windows = sum(max(map(int, np.diff(records.blocks[:, 0]))) * np.diff(s._first_block).max()
                    for s in sources)
      assert records.num_tokens - len(read) - len(left) <= windows
  assert first_rows(sources, (before.rows, 1)) == (0, after.rows)  # a whole epoch


def test_phases_of_one_length_continue_at_the_next_row():
  records = varied(60)
  same = [RowSource(records, RowLayout(32, 4), 0, TOKENIZER) for _ in range(3)]
  assert first_rows(same, (7, 100, 1)) == (0, 7, 107)
  # A corpus of one window: rows of another length begin with the next epoch.
  other = RowSource(records, RowLayout(64, 4), 0, TOKENIZER)
  assert first_rows((same[0], other, same[0]), (7, 5, 1)) == (0, other.rows, 2 * same[0].rows)


def test_a_second_phase_starts_at_its_first_row(monkeypatch):
  monkeypatch.setattr(rows_lib, '_WINDOW', 50)
  phases = Phases.create(((20, 32, 4), (5, 64, 4)), 25, 0, 0)
  task = _task(phases)
  first = first_rows(task.train_rows, (80, 20))[1]
  assert first % task.train_rows[1].rows
  expected = task.train_rows[1].batch(1, 4, first=first)
  np.testing.assert_array_equal(task.rows(21).tokens.ids, expected.tokens.ids)
  seen = [task.rows(step).tokens.ids for step in range(25)]
  tokens = np.concatenate([ids[ids >= FIRST] for ids in seen])
  assert len(tokens) == len(np.unique(tokens))
