"""Runs every file in configs/, shrunk to a few seconds."""

import json
import math
import pathlib
import runpy

import pytest

from bert_jax import config as config_lib
from bert_jax import config_fields, config_files
from bert_jax.errors import UserError
from bert_jax.runs import resolve, run
from tests import conftest, made_tasks, tiny
from tests.interop import torch_bert

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / 'configs').glob('*.py'))
# Nothing is held out: no evaluation compiles. tests/test_family.py evaluates every architecture,
# some of them in its slow tests.
SMALL = {'model.hidden_size': 32, 'model.num_heads': 4, 'model.intermediate_size': 64,
         'model.num_layers': 2, 'model.max_positions': 64, 'model.vocab_size': 200,
         'model.scan_unroll': 1, 'batch_size': 8, 'train_steps': 2, 'max_len': 32, 'log_every': 1,
         'train_minutes': 0.0, 'optimizer.warmup_steps': 1, 'optimizer.warmup_ratio': 0.0,
         'data.heldout': 0.0}


def finetune(config, tmp_path):
  config.update_from_flattened_dict({
      'init_from': made_tasks.start(tmp_path / 'model', config.task), 'batch_size': 8,
      'max_len': 32, 'log_every': 1, 'train_epochs': 0.0, 'train_steps': 2, 'model.scan_unroll': 1,
      **made_tasks.files(config.task, tmp_path, 20, 8)})
  run.run(config, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  assert [x['step'] for x in lines if 'loss' in x] == [1, 2]
  guess = {'sequence_classification': 2, 'token_classification': 3, 'question_answering': 15,
           'multiple_choice': 3,  # labels, tags, about 15 tokens, choices
           # Two texts of a pair share words: random weights already leave 4 of 8 (1.27 to 1.54 over
           # six seeds' dropout).
           'sentence_embedding': 4, 'sparse_embedding': 8, 'late_interaction': 8,
           'reranking': 2}[config.task]
  assert abs(lines[0]['loss'] - math.log(guess)) < 0.7
  resolved = json.loads((tmp_path / 'run/run.json').read_text())['config']
  assert 'eval_' + resolved['keep_best'] in lines[-1]


# Other default tests cover these configs with other sizes, rates and masks.
SLOW = ('mini', 'small', 'medium', 'base', 'large', 'chinese_base', 'roberta_base', 'modern_base',
        'long_documents', 'deberta_v3_base')


@pytest.mark.medium
@pytest.mark.parametrize('path', [
    pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
    for path in CONFIGS])
def test_each_config_trains(path, tmp_path, corpus_file):
  config = runpy.run_path(str(path))['get_config']()
  assert config.is_locked
  if config.task != 'pretrain':
    return finetune(config, tmp_path)
  phases = config.phases and ((1, 32, 8), (1, 32, 8))  # of one length: one compilation
  source = corpus_file
  if config.data.format == 'wikitext':
    source = str(tmp_path / 'wiki.train.raw')
    pathlib.Path(source).write_text(''.join(
        f' = Title {i} = \n\n ' + ' '.join(s[:-1] + ' .' for s in d) + ' \n'
        for i, d in enumerate(conftest.make_documents(30))))
  config.update_from_flattened_dict({**SMALL, 'phases': phases, 'data.source': source})
  if config.model.architecture == 'modernbert':
    config.model.num_layers = 4  # one layer, and a group of three
  if config.data.tokenizer == 'bpe':
    config.model.vocab_size = 300  # room for the bytes
  if config.objective == 'distillation':
    torch_bert.make('BertForMaskedLM', tmp_path / 'teacher', hidden_size=32, num_attention_heads=4,
                    intermediate_size=64, max_position_embeddings=64, vocab_size=200)
    config.teacher = str(tmp_path / 'teacher')
  if config.model.activation is None:  # it starts from another model
    torch_bert.make('BertModel', tmp_path / 'model', hidden_size=32, num_attention_heads=4,
                    intermediate_size=64, max_position_embeddings=64, vocab_size=200)
    config.init_from = str(tmp_path / 'model')
  run.run(config, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  assert [x['step'] for x in lines if 'loss' in x] == [1, 2]
  # An untrained model guesses: a token of the vocabulary and, for pairs, one of two labels.
  vocabulary = json.loads((tmp_path / 'run/run.json').read_text())['config']['model']['vocab_size']
  # Binary labels: one for a pair, one for every token in ELECTRA.
  detects = config.model.architecture == 'electra' or config.objective.startswith('replaced')
  labels = 50 if detects else config.data.sequences != 'full_sentences'
  loss = lines[0]['mlm_loss' if config.objective == 'distillation' else 'loss']
  assert abs(loss - math.log(vocabulary) - labels * math.log(2)) < 1.0


@pytest.mark.parametrize('task', config_lib.TASKS)
def test_a_config_has_the_fields_of_its_table(task):
  config = config_lib.pretraining('base') if task == 'pretrain' else config_lib.finetuning(task)
  table, values = config_lib.fields(task), config_lib.flat(config)
  assert values.keys() == table.keys() and table['task'].default == task
  for name, value in values.items():
    unset = value is None and name.startswith('model.')  # `init_from` sets it
    assert unset or name == 'model.scan_unroll' or value == table[name].default, name
  # A new field needs only an entry. By default it may not change and always has an effect.
  field = config_fields.Field(3, config_fields.at_least(1))
  more = config_fields.with_values(table, {'data.new': field, 'seed': None, 'log_every': 7})
  assert more.keys() == table.keys() - {'seed'} | {'data.new'} and more['log_every'].default == 7
  assert field.on_resume == config_fields.ANOTHER_RUN and not field.unused
  with pytest.raises(UserError, match='^data.new=0 must be at least 1$'):
    more['data.new'].check('data.new', 0)


@pytest.mark.parametrize('content, message', [
    ('def get_config(): pass', 'its get_config\\(\\) returns NoneType, not a ConfigDict'),
    ('def get_config(): return {}', 'its get_config\\(\\) returns dict, not a ConfigDict'),
    ('def get_config(): return open("nowhere")', 'FileNotFoundError'),
    ('def get_config(): return {}["host"]', "KeyError: 'host'"),
    ('x = 1', 'it has no get_config')])
def test_a_file_without_a_config_is_refused(tmp_path, content, message):
  (tmp_path / 'my.py').write_text(content)
  with pytest.raises(UserError, match=message):
    config_files.load(tmp_path / 'my.py')


def test_a_field_that_is_none_is_refused():
  config = tiny.get_config()
  config.train_steps = None
  with pytest.raises(UserError, match='train_steps is None: give a value; 0, an empty text'):
    resolve.checked(config, {})
