"""Fields about examples have an effect, or are refused with their reason; the summary counts."""

import json
import types

import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data.inputs import Input
from bert_jax.errors import UserError
from bert_jax.labelled import conll, texts
from bert_jax.labelled.packed_examples import Batches, Features
from bert_jax.runs import finetune
from bert_jax.tasks import finetuning_data, task_list
from bert_jax.tasks.question_answering import QuestionFiles
from bert_jax.tasks.reranking import RerankingFiles
from bert_jax.tasks.sentence_embedding import SentenceEmbedding
from bert_jax.tasks.sequence_classification import SequenceFiles
from bert_jax.tasks.token_classification import TokenFiles


def job(train, evals=(), count=0, places=1):
  """The fields of a job that the table of effects reads."""
  splits = [types.SimpleNamespace(
      examples=examples, features=types.SimpleNamespace(count=count))
      for examples in (train, *evals)]
  data = types.SimpleNamespace(train=splits[0], evals=splits[1:], has_held_out=bool(evals),
                               feed=types.SimpleNamespace(of=places))
  return types.SimpleNamespace(data=data)


LISTS = {'query': 'a', 'positives': ['b'], 'negatives': ['c']}
MINED = {'query': 'a', 'positive': 'b', 'negative_1': 'c', 'negatives': ['c']}
COLUMNS = {'query': 'a', 'document': 'b', 'label': 1}


@pytest.mark.parametrize('train, held_out, test, has_effect', [
    ([LISTS], [], '', False), ([MINED], [LISTS], '', False), ([LISTS, LISTS], [MINED], '', False),
    ([COLUMNS], [], '', True), ([LISTS], [COLUMNS], '', True), ([LISTS, COLUMNS], [], '', True),
    ([LISTS | {'query': 'b'}, COLUMNS | {'query': 'b'}], [], '', True),
    ([LISTS], [], 'test.tsv', True)])  # the test file may have columns
def test_a_reranker_of_lists_refuses_column_fields(tmp_path, train, held_out, test, has_effect):
  c = config_lib.finetuning('reranking')
  c.data.test = test
  groups = []
  for i, rows in enumerate((train, held_out)):
    (tmp_path / f'{i}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    groups.append(RerankingFiles.read(str(tmp_path / f'{i}.jsonl'), c.data, 'train', []))
  for name in ('data.text_pair_column', 'data.label_column'):
    if has_effect:
      config_lib.check_effects(c, [name], job(groups[0], groups[1:]))
    else:
      with pytest.raises(UserError, match=f'^--config.{name} has no effect here: every line has'):
        config_lib.check_effects(c, [name], job(groups[0], groups[1:]))
  config_lib.check_effects(c, ['data.text_column'], job(groups[0], groups[1:]))


@pytest.mark.parametrize('batch_size, count, places, accumulation, most', [
    (1000, 2, 1, 1, 2), (3, 2, 1, 1, 2), (16, 2, 8, 1, 8), (9, 5, 2, 2, 8), (33, 32, 1, 1, 32),
    (2, 2, 1, 1, 0), (8, 2, 8, 1, 0), (8, 5, 2, 2, 0), (8, 100, 1, 1, 0)])
def test_a_batch_larger_than_the_data_is_refused(batch_size, count, places, accumulation, most):
  """The mesh and the microbatches divide a batch, so the suggested size fits both."""
  for task in ('sequence_classification', 'sentence_embedding', 'question_answering'):
    c = config_lib.finetuning(task)
    c.batch_size, c.optimizer.accumulation, c.data.train = batch_size, accumulation, 'x'
    of = job([], count=count, places=places)
    if most:
      with pytest.raises(UserError, match=f'^--config.batch_size has no effect here: data.train=x '
                                          f'has {count} examples: give at most {most}$'):
        config_lib.check_effects(c, ['batch_size'], of)
      c.batch_size = most
    config_lib.check_effects(c, ['batch_size'], of)


def test_the_summary_counts_the_examples_of_a_step():
  inputs = [Input([1, 2, 3], [0, 0, 0])] * 20
  features = Features(inputs, np.arange(20))
  assert [Batches(features, batch_size=n, pad_id=0).most_examples for n in (8, 20, 1000)] == [
      8, 20, 20]


@pytest.mark.parametrize('task', ['token_classification', 'multiple_choice', 'question_answering'])
def test_tasks_without_pairs_have_no_column_for_one(task):
  with pytest.raises(UserError, match='unknown config field --config.data.text_pair_column'):
    config_lib.check_overrides(config_lib.finetuning(task), ['--config.data.text_pair_column=x'])


def test_a_single_label_is_refused(tmp_path):
  """For tags and for classes, whether the file has other labels or only this one."""
  for labels, tags in ((('O',), ('O', 'B-A')), (('B-A',), ('B-A', 'B-A')), (('O',), ('O', 'O'))):
    c = config_lib.finetuning('token_classification')
    c.data.train, c.data.labels = 'train.conll', labels
    with pytest.raises(UserError, match=f'^data.labels={labels[0]} is one tag: name every tag of '
                                        'train.conll, or leave data.labels out'):
      TokenFiles.make(c, [conll.TaggedWords('', ('a', 'b'), tags)], [])
  c.data.labels = ()
  with pytest.raises(UserError, match="^train.conll has the tag 'O' only"):
    TokenFiles.make(c, [conll.TaggedWords('', ('a', 'b'), ('O', 'O'))], [])
  c = config_lib.finetuning('sequence_classification')
  c.data.train, c.data.labels = 'train.tsv', ('yes',)
  examples = [texts.TextExample('', 'x', None, label) for label in ('yes', 'no')]
  with pytest.raises(UserError, match='^data.labels=yes is one label: name every label of'):
    SequenceFiles.check_training(c, examples)
  c.data.problem = 'multi_label'  # a text may have the single label or none
  SequenceFiles.check_training(c, examples)


@pytest.mark.parametrize('task, best', [
    ('token_classification', 'f1'), ('question_answering', 'f1'), ('multiple_choice', 'accuracy'),
    ('sentence_embedding', 'spearman'), ('sparse_embedding', 'spearman'),
    ('late_interaction', 'spearman'), ('reranking', 'ndcg_10')])
def test_keep_best_auto_chooses_the_score_of_the_task(task, best):
  c = config_lib.finetuning(task)
  c.keep_best = 'auto'
  data = types.SimpleNamespace(files=task_list.ALL[task].files(SentenceEmbedding(None)))
  assert finetune._best(c, data) == best


READ = {'sequence_classification': 'format, label_column, problem, text_column, text_pair_column',
        'token_classification': 'format, label_column, text_column',
        'multiple_choice': 'choices_column, format, label_column, text_column',
        'reranking': 'format, label_column, text_column, text_pair_column'}


@pytest.mark.parametrize('task, field', [
    ('sequence_classification', 'long'), ('token_classification', 'problem'),
    ('multiple_choice', 'long'), ('reranking', 'loss'), ('question_answering', 'text_column'),
    ('sentence_embedding', 'pooling'), ('sentence_embedding', 'text_column'),
    ('sparse_embedding', 'negative_column'), ('late_interaction', 'query_prompt'),
    ('late_interaction', 'document_prompt'), ('late_interaction', 'query_expansion'),
    ('late_interaction', 'scores_column')])
def test_data_eval_may_have_other_columns_but_no_other_fields(task, field):
  """data.eval is encoded like data.train: no field changes that, and no file is read first."""
  c = config_lib.finetuning(task)
  c.data.train, c.data.eval, c.data.eval_fields = 'nowhere', 'nowhere', (f'{field}=x',)
  with pytest.raises(UserError) as e:
    finetuning_data.read(task_list.ALL[task].files, c, None, None)
  known = READ.get(task, 'format')
  assert str(e.value) == f"the field in data.eval_fields='{field}' is unknown: use {known}"
  for name in known.split(', '):
    c.data.eval_fields = (f'{name}=x',)
    with pytest.raises(UserError, match='nowhere'):
      finetuning_data.read(task_list.ALL[task].files, c, None, None)


def test_an_unknown_format_of_questions_is_refused():
  c = config_lib.finetuning('question_answering')
  c.data.format = 'tsv'
  with pytest.raises(UserError, match="^data.format='tsv' is unknown: use squad$"):
    QuestionFiles.read('nowhere', c.data, 'validation', [])
