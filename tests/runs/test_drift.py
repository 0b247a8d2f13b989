"""A changed field is harmless, a change of the schedule, or another run."""

import json

import pytest

from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.runs import drift
from bert_jax.tasks import task_list

SCHEDULE = {'train_steps', 'train_epochs', 'train_minutes', 'phases', 'batch_size', 'max_len'}
HARMLESS = {'log_every', 'eval_every', 'eval_batches', 'checkpoint_every', 'keep_checkpoints',
            'keep_every', 'keep_best', 'profile_steps', 'trackers', 'log_batch_digest', 'platform',
            'mesh.replica', 'mesh.data', 'mesh.model', 'sharding', 'init_from', 'model.dtype',
            'model.attention', 'model.remat', 'model.scan_unroll', 'optimizer.accumulation',
            'allow_schedule_change', 'data.source', 'data.vocab', 'data.loader_workers'}


def outcome(name, task, allowed=False) -> str:
  try:
    before = [] if name == 'phases' else 1
    drift.check('w', [drift.Change(name, before, 2)], config_lib.fields(task), allowed)
  except UserError as e:
    return 'schedule' if 'allow_schedule_change' in str(e) else 'another'
  return 'harmless'


def test_each_pretraining_field_has_the_expected_outcome():
  fed_by = ('seed', 'data.pack', 'data.sequences', 'data.negatives')  # they decide the rows
  for name in config_lib.flat(config_lib.pretraining('tiny')):
    expected = ('harmless' if name in HARMLESS else
                'schedule' if name in SCHEDULE or name.startswith('optimizer.') else
                'another' if name in fed_by or not name.startswith('data.') else 'harmless')
    assert outcome(name, 'pretrain') == expected, name
  assert outcome('train_steps', 'pretrain', allowed=True) == 'harmless'
  assert outcome('seed', 'pretrain', allowed=True) == 'another'
  for name in ('task', 'masking.rate', 'model.dropout', 'model.hidden_size', 'new.field'):
    assert outcome(name, 'pretrain', allowed=True) == 'another'


# Fields that only locate, read or evaluate examples. Runs compare a digest of the examples.
READ = {'train', 'text_column', 'text_pair_column', 'label_column', 'choices_column', 'format',
        'skip_labels', 'doc_stride', 'eval', 'eval_columns', 'eval_fields', 'test', 'n_best',
        'max_answer_len', 'null_threshold', 'loader_workers'}


@pytest.mark.parametrize('task', ['sequence_classification', 'token_classification',
                                  'question_answering', 'multiple_choice', 'sentence_embedding',
                                  'reranking', 'sparse_embedding', 'late_interaction'])
def test_each_fine_tuning_field_has_the_expected_outcome(task):
  others = {name for name in config_lib.finetuning(task).data
            if outcome(f'data.{name}', task, allowed=True) == 'another'}
  assert others == set(config_lib.finetuning(task).data) - READ
  assert others <= {'problem', 'labels', 'long', 'negative_column', 'pooling', 'temperature',
                    'matryoshka', 'matryoshka_weights', 'cached_parts', 'loss',
                    'query_flops', 'document_flops', 'scores_column', 'width',
                    'query_prompt', 'document_prompt', 'query_expansion', 'query_length',
                    'skipped_words'}


def test_fields_that_define_a_fine_tuned_model_may_not_change():
  for name in ('data.temperature', 'data.pooling', 'data.long', 'data.negative_column',
               'data.labels', 'data.problem', 'data.new_field'):
    for task in task_list.ALL:
      assert outcome(name, task, allowed=True) == 'another'


def test_fields_that_decide_fine_tuning_rows_may_not_change():
  for name in ('seed', 'batch_size', 'max_len', 'optimizer.accumulation'):
    for task in task_list.ALL:
      assert outcome(name, task, allowed=True) == 'another'


def test_changes_has_only_fields_that_differ_and_that_both_configs_have():
  before = {'a': [1, 2], 'b': {'c': 1, 'gone': 2}, 'd': 0.1, 'phases': []}
  now = {'a': (1, 2), 'b': {'c': 3, 'new': 4}, 'd': 0.1, 'phases': ((2, 3, 4),)}
  assert drift.changes(json.loads(json.dumps(before)), now) == [
      ('b.c', 1, 3), ('phases', [], [[2, 3, 4]])]


def test_the_remedy_restores_the_schedule_of_the_run():
  table = config_lib.fields('pretrain')
  phases = drift.Change('phases', [[900, 128, 32], [100, 512, 32]], [])
  steps = drift.Change('train_steps', 3000, 6000)
  with pytest.raises(UserError, match=r"give --config.phases='\(\(900, 128, 32\), \(100, 512, "
                                      r"32\)\)' --config.train_steps=3000 to continue as before"):
    drift.check('w', [phases, steps], table, False)
  # The steps of a run by minutes were measured: a run has one length.
  minutes = drift.Change('train_minutes', 30.0, 60.0)
  with pytest.raises(UserError, match='give --config.train_minutes=30.0 to continue as before'):
    drift.check('w', [minutes, steps], table, False)


def test_a_refusal_names_every_field_that_means_another_run():
  table = config_lib.fields('pretrain')
  changes = [drift.Change('log_every', 1, 2), drift.Change('seed', 0, 1),
             drift.Change('train_steps', 5, 6), drift.Change('task', 'a', 'b')]
  with pytest.raises(UserError, match=r'^w holds a run with seed=0 \(now 1\), task=a \(now b\): '):
    drift.check('w', changes, table, True)
  assert drift.check('w', [changes[0], changes[2]], table, True) == [changes[0], changes[2]]
