"""Real packed rows through the whole model."""

import dataclasses
import functools
import pickle
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from bert_jax.data import rows as rows_lib
from bert_jax.data.pairs import RowLayout
from bert_jax.data.phases import Phases
from bert_jax.data.rows import Rows
from bert_jax.data.tokens import Tokens
from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives.masking import MaskingConfig, Vocabulary
from bert_jax.tasks import metrics, task_list
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from tests.data.made import FIRST, TOKENIZER, make_records

L, P, V = 32, 4, 4096
CONFIG = BertConfig(vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
                    max_positions=L, initializer_range=0.5)


@functools.cache
def _model():
  model = BertForPreTraining(CONFIG)
  tokens = jnp.zeros((1, L), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), Tokens(*[tokens] * 4), tokens, tokens[:, :P])
  everywhere = jnp.arange(L)[None]
  return jax.jit(lambda batch, cls: model.apply(params, batch, everywhere, cls))


def _logits(rows, ids):
  one = rows.tokens._replace(ids=ids[None])
  return jax.tree.map(np.asarray, _model()(one, rows.starts))


@settings(deadline=None, max_examples=40)
@given(documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=4,
                          max_size=20), seed=st.integers(0, 9), data=st.data())
def test_a_packed_pair_changes_no_bit_of_the_others(documents, seed, data):
  records = make_records(documents)
  walk = rows_lib.RowSource(records, RowLayout(L, P), seed, TOKENIZER)
  numbers = [i for i in range(walk.rows) if walk.batch(i, 1).tokens.text_ids.max() > 1]
  if not numbers:
    return
  rows = walk.batch(data.draw(st.sampled_from(numbers)), 1)
  changed = data.draw(st.integers(1, int(rows.tokens.text_ids.max())))
  ids = np.array(rows.tokens.ids[0])
  other = np.where((rows.tokens.text_ids[0] == changed) & (ids >= FIRST),
                   (ids * 7 + 1000) % V, ids)
  other[rows.tokens.text_ids[0] == 0] = 77  # the padding tokens change nothing either
  (mlm, nsp), (mlm_other, nsp_other) = _logits(rows, ids), _logits(rows, other)
  rest = (rows.tokens.text_ids[0] > 0) & (rows.tokens.text_ids[0] != changed)
  assert (mlm[0, rest] == mlm_other[0, rest]).all()
  assert (mlm[0, rows.tokens.text_ids[0] == changed] != mlm_other[
      0, rows.tokens.text_ids[0] == changed]).any()
  for pair in range(P):
    if pair < rows.tokens.text_ids.max():
      assert (nsp[0, pair] == nsp_other[0, pair]).all() == (pair + 1 != changed)


def make_task(batches, eval_batches=1, **masking):
  rows = Rows(*[None] * 4, row=np.arange(3))
  held_out = types.SimpleNamespace(epoch_batches=lambda *_: (rows for _ in range(batches)), rows=4)
  objective = types.SimpleNamespace(loss_weights={'mlm_loss': 1.0, 'nsp_loss': 1.0})
  task = Pretraining(objective, MaskingConfig(**masking), None)
  return PretrainingData(task, types.SimpleNamespace(unigram_entropy=7.0),
                         Phases.create((), 9, 8, 1), eval_batches, (), (held_out,))


def test_scores_of_rows_of_another_length_are_not_compared():
  data = make_task(1)
  all_rows = dataclasses.replace(data, eval_batches=0)
  assert {all_rows.judged_on(step) for step in (0, 4, 9)} == {''}  # one length
  assert {data.judged_on(step) for step in (0, 4, 9)} == {'the first 1 rows of 8'}
  phases = Phases.create(((4, 16, 1), (2, 16, 2), (3, 32, 1)), 9, 8, 1)
  all_rows = dataclasses.replace(all_rows, phases=phases, eval_rows=data.eval_rows * 3)
  assert [all_rows.judged_on(step) for step in (4, 6, 7, 9)] == ['rows of 16'] * 2 + [
      'rows of 32'] * 2
  # Two batches of 1 or 2 of the 4 held-out rows: the middle phase reads them all.
  two = dataclasses.replace(all_rows, eval_batches=2)
  assert [two.judged_on(step) for step in (4, 6, 9)] == [
      'the first 2 rows of 16', 'rows of 16', 'the first 2 rows of 32']


def test_scores_say_whether_low_is_good():
  """A new score must be in one of the two sets: `keep_best` reads them to choose a checkpoint."""
  assert make_task(1).lower_is_better == {'loss', 'mlm_loss', 'nsp_loss'}
  lower = {name: {'loss'} & set(kind.files.lower_is_better) for name, kind in task_list.ALL.items()}
  assert all(lower.values())
  others = {score for kind in task_list.ALL.values()
            if isinstance(kind.files.score_names, tuple)
            for score in {*kind.files.score_names} - {*kind.files.lower_is_better}}
  assert others == {'accuracy', 'precision', 'recall', 'f1', 'exact_match', 'ndcg_10', 'mrr_10',
                    'map'}
  regression = metrics.regression(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
  lower = task_list.ALL['sequence_classification'].files.lower_is_better
  assert set(regression) - {*lower} == {'pearson', 'spearman'}


def test_worker_processes_get_no_teacher():
  data = dataclasses.replace(make_task(1), eval_rows=())
  data = dataclasses.replace(data, task=dataclasses.replace(
      data.task, frozen={'teacher': jnp.ones(10**6)}))
  sent = pickle.dumps(data.rows)
  assert len(sent) < 10**4 and pickle.loads(sent).__self__.task.frozen == {}
  assert data.task.frozen['teacher'].size == 10**6


def evaluation(counts, eval_batches=1):
  """The scores of batches whose metrics have these sums and counts, and the batches left."""
  batches = iter(counts)
  task = make_task(len(counts), eval_batches)
  return task.evaluate(lambda _: next(batches), 1), len(list(batches))


def test_evaluations_mask_at_the_rate_of_the_last_step():
  rates = []

  def measure(batch):
    rates.append(batch.mask_rate)
    return {'mlm_loss': (1.0, 1.0), 'nsp_loss': (1.0, 1.0), 'tokens': (20.0, 1.0)}

  for step in (1, 5, 9):
    make_task(1, rate=0.3, final_rate=0.15).evaluate(measure, step)
  np.testing.assert_array_equal(rates, np.full((3, 3), np.float32(0.15)))
  make_task(1, rate=0.3).evaluate(measure, 5)
  assert rates.pop() is None  # then the step masks at masking.rate


def test_a_score_without_positions_is_none_instead_of_0():
  nothing = {'mlm_loss': (0.0, 0.0), 'nsp_loss': (0.0, 0.0), 'tokens': (0.0, 1.0)}
  lone = {'mlm_loss': (6.0, 3.0), 'nsp_loss': (0.0, 0.0), 'tokens': (20.0, 1.0)}
  pair = {'mlm_loss': (4.0, 1.0), 'nsp_loss': (0.5, 1.0), 'tokens': (20.0, 1.0)}
  # A batch of empty rows does not count: the evaluation takes the next batch.
  assert evaluation([nothing, pair, lone]) == (
      {'loss': 4.5, 'mlm_loss': 4.0, 'nsp_loss': 0.5, 'unigram_entropy': 7.0}, 1)
  assert evaluation([nothing, lone, nothing, pair], 2) == (
      {'loss': 10 / 4 + 0.5, 'mlm_loss': 2.5, 'nsp_loss': 0.5, 'unigram_entropy': 7.0}, 0)
  assert evaluation([lone]) == (
      {'loss': 2.0, 'mlm_loss': 2.0, 'nsp_loss': None, 'unigram_entropy': 7.0}, 0)
  assert evaluation([nothing]) == (
      {'loss': None, 'mlm_loss': None, 'nsp_loss': None, 'unigram_entropy': 7.0}, 0)


def make_data(documents, max_len=32, weights=('mlm_loss', 'nsp_loss'), counts=None, **fields):
  """The data of a run on documents with sentences of these lengths."""
  masking_fields = {name: fields.pop(name) for name in list(fields) if name == 'max_predictions'}
  records = make_records(documents)
  if counts is None:
    counts = np.ones(V, np.int64)
  corpus = types.SimpleNamespace(
      train=records, heldout=make_records([]), tokenizer=types.SimpleNamespace(
          **vars(TOKENIZER), vocab_size=V, kind='wordpiece'), counts=counts, notes=())
  task = Pretraining(types.SimpleNamespace(loss_weights=dict.fromkeys(weights, 1.0)),
                     MaskingConfig(**masking_fields),
                     Vocabulary(size=V, special_ids=(0, 1, 2, 3, 4), mask_id=3))
  data = ConfigDict({'pack': True, 'sequences': 'next_sentence', 'negatives': 'other_document',
                     'source': 'x', **fields})
  return PretrainingData.create(task, corpus, Phases.create((), 9, max_len, 4), data, seed=0,
                                eval_batches=0)


def warnings(data):
  return [line for name, line in data.describe() if name == 'WARNING']


def test_rows_with_few_pairs_give_a_warning():
  long = [[40, 45, 50]] * 60
  few = long + [[5, 5]] * 2
  (warning,) = warnings(make_data(few))
  assert 'rows of 32 has a pair to ask about' in warning
  assert 'raise max_len, or give data.sequences=full_sentences' in warning
  # Both remedies, and an objective that asks about no pair.
  assert warnings(make_data(few, max_len=128)) == []
  assert warnings(make_data(few, sequences='full_sentences', weights=('mlm_loss',))) == []
  assert warnings(make_data(few, weights=('mlm_loss',))) == []
  for documents in (long[:9] + [[5, 5, 30]], long + [[3, 40, 9, 8]], [[31, 40]] * 50 + [[10, 10]]):
    assert len(warnings(make_data(documents))) == 1
  assert warnings(make_data([[5, 6, 7, 8, 9]] * 40)) == []


def test_rows_without_a_false_pair_give_a_warning():
  (warning,) = warnings(make_data([[5] * 2000, [5, 5]]))
  assert 'of the pairs in rows of 32 are true next sentences' in warning
  assert warnings(make_data([[5] * 2000, [5] * 2000])) == []


@pytest.mark.parametrize('documents, message', [
    ([[9], [7], [30], [12]] * 9, 'every document is one sentence'),
    ([[40, 50]] * 9, 'no two neighboring sentences fit into a row of 32')])
def test_rows_without_a_pair_are_refused(documents, message):
  with pytest.raises(UserError, match=message):
    make_data(documents)
  assert make_data(documents, sequences='full_sentences', weights=('mlm_loss',)).train_rows[0].rows


def test_a_text_without_anything_to_predict_is_refused():
  counts = np.zeros(V, np.int64)
  counts[4] = 1000  # [UNK]
  with pytest.raises(UserError, match='every token of the text is .UNK.: masked LM has nothing'):
    make_data([[5, 6, 7]] * 9, counts=counts)
  counts[77] = 1
  make_data([[5, 6, 7]] * 9, counts=counts)


def test_more_predictions_than_a_row_has_tokens_are_refused():
  documents = [[5, 6, 7]] * 20
  for most in (33, 64, 10_000):
    with pytest.raises(UserError, match=f'max_predictions={most} is more than the 32 tokens'):
      make_data(documents, max_predictions=most)
  for most in (0, 1, 32):
    make_data(documents, max_predictions=most)
  make_data(documents, max_len=64, max_predictions=33)
