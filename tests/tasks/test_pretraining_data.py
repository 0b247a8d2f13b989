"""The rows of a pretraining run: rates, evaluations, phases, packing and random tokens."""

import dataclasses
import types

import jax
from ml_collections import ConfigDict
import numpy as np

from bert_jax.data.phases import Phases
from bert_jax.model.bert_config import BertConfig
from bert_jax.objectives import masking, objectives
from bert_jax.objectives.masking import MaskingConfig, Vocabulary
from bert_jax.runs import pretrain
from bert_jax.tasks.pretraining import Pretraining
from bert_jax.tasks.pretraining_data import PretrainingData
from tests.data.made import FIRST, TOKENIZER, make_records

V = 4096
CONFIG = BertConfig(vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32,
                    max_positions=32, dropout=0.5, attention_dropout=0.0)
DOCUMENTS = [[5, 6, 7, 8]] * 60


def made(seed=0, phases=(), pack=True, **masking_fields):
  corpus = types.SimpleNamespace(
      train=make_records(DOCUMENTS), heldout=make_records(DOCUMENTS),
      tokenizer=types.SimpleNamespace(**vars(TOKENIZER), vocab_size=V, kind='wordpiece'),
      counts=np.ones(V, np.int64), notes=(), unigram_entropy=7.0)
  objective = objectives.create('', 'next_sentence', CONFIG)
  task = Pretraining(objective, MaskingConfig(**masking_fields),
                     Vocabulary(size=V, special_ids=(0, 1, 2, 3, 4), mask_id=3))
  data = ConfigDict({'pack': pack, 'sequences': 'next_sentence', 'negatives': 'other_document',
                     'source': 'x'})
  return PretrainingData.create(task, corpus, Phases.create(phases, 9, 32, 4), data, seed=seed,
                                eval_batches=0)


def evaluated(data, step):
  batches = []

  def measure(batch):
    batches.append(batch)
    return {'mlm_loss': (1.0, 1.0), 'nsp_loss': (1.0, 1.0), 'tokens': (20.0, 1.0)}

  data.evaluate(measure, step)
  return [batch.tokens.ids for batch in batches]


def test_each_step_is_masked_at_its_own_rate():
  data = made(rate=0.3, final_rate=0.1)
  for step in range(9):
    rate = 0.3 - 0.025 * step
    np.testing.assert_allclose(data.rows(step).mask_rate, np.full(4, rate), rtol=1e-6)


def test_every_run_evaluates_all_held_out_rows_in_the_same_order():
  one, two = made(seed=0), made(seed=5)
  assert (one.rows(0).tokens.ids != two.rows(0).tokens.ids).any()
  for a, b in zip(evaluated(one, 1), evaluated(two, 1), strict=True):
    np.testing.assert_array_equal(a, b)
  tokens = sum((ids >= FIRST).sum() for ids in evaluated(one, 1))
  assert tokens == one.corpus.heldout.num_tokens


def test_an_evaluation_has_no_causal_rows():
  data, batches = made(causal_rows=0.5), []

  def measure(batch):
    batches.append(batch)
    return {'mlm_loss': (1.0, 1.0), 'nsp_loss': (1.0, 1.0), 'tokens': (20.0, 1.0)}

  assert data.rows(0).tokens.causal.any()
  data.evaluate(measure, 1)
  assert batches and all(batch.tokens.causal is None for batch in batches)


def test_phases_are_evaluated_at_their_length_and_count_their_flops():
  data = made(phases=((4, 32, 4), (5, 16, 4)))
  assert [evaluated(data, step)[0].shape[1] for step in (4, 5, 9)] == [32, 16, 16]
  assert [data.flops(step, 10.0) for step in (3, 4)] == [
      10 * data.task.objective.flops_per_token(length, 0.15) for length in (32, 16)]


def test_without_packing_each_row_has_one_pair():
  packed, plain = (made(pack=pack).rows(0).tokens.text_ids for pack in (True, False))
  assert plain.max() == 1 < packed.max()


def test_random_tokens_follow_the_corpus_on_request():
  counts = np.arange(V)
  corpus = types.SimpleNamespace(counts=counts, tokenizer=types.SimpleNamespace(
      pad_id=0, unk_id=4, cls_id=1, sep_id=2, mask_id=3, vocab_size=V))
  assert pretrain.vocabulary(corpus, MaskingConfig()).frequencies is None
  vocabulary = pretrain.vocabulary(corpus, MaskingConfig(random_by_frequency=True))
  np.testing.assert_array_equal(
      vocabulary.frequencies, masking.cumulative_frequencies(counts, (0, 4, 1, 2, 3)))


def test_microbatches_of_pretraining_have_their_own_dropout():
  keys = []
  data = made()
  task = dataclasses.replace(data.task, objective=types.SimpleNamespace(
      loss=lambda params, frozen, rows, masked, of: keys.append(of.dropout) or {}))
  rows = data.rows(0)
  for first in (0, 4):
    task.loss({}, {}, rows._replace(row=rows.row + first), jax.random.key(0))
  one, two = map(jax.random.key_data, keys)
  assert (one != two).any()
