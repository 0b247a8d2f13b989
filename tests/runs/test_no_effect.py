"""A run refuses given fields without effect; values and lists on command lines."""

import dataclasses
import json
import pathlib
import re
import types

from flax import traverse_util
import jax.numpy as jnp
import pytest

from bert_jax import config as config_lib
from bert_jax.commands import config_flag
from bert_jax.data import languages
from bert_jax.errors import UserError
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.deberta import DebertaConfig
from bert_jax.runs import resolve
from tests import conftest, tiny


@pytest.fixture(scope='module')
def records(tmp_path_factory) -> str:
  """A folder that counts as token records, because it has a manifest."""
  folder = tmp_path_factory.mktemp('records')
  (folder / 'manifest.json').write_text('{}')
  return str(folder)


PHASES = {'phases': ((1, 16, 8), (1, 32, 16))}
RECORDS = {'data.source': 'RECORDS'}
# task, fields of the config, the given field, the reason why it has no effect.
CASES = [
    ('pretrain', PHASES, 'batch_size', 'phases=.* set it for every step'),
    ('pretrain', PHASES, 'max_len', 'phases=.* set it for every step'),
    *(('pretrain', RECORDS, name, 'records have|records in|folder of token records')
      for name in ('model.vocab_size', 'data.tokenizer', 'data.lowercase', 'data.heldout',
                   'data.words', 'data.lines_are_sentences', 'data.language', 'data.format',
                   'data.text_column')),
    ('pretrain', {'data.vocab': 'VOCAB'}, 'model.vocab_size', 'data.vocab=.* is given'),
    ('pretrain', {'data.vocab': 'VOCAB'}, 'data.tokenizer', 'data.vocab=.* is given'),
    ('pretrain', {'init_from': 'x'}, 'model.vocab_size', 'vocabulary of init_from=x'),
    ('pretrain', {'init_from': 'x'}, 'data.lowercase', 'vocabulary of init_from=x'),
    ('pretrain', {'teacher': 'x'}, 'data.tokenizer', 'vocabulary of teacher=x'),
    ('pretrain', {'data.lines_are_sentences': True}, 'data.language', 'where sentences end'),
    ('pretrain', {'data.format': 'wikitext'}, 'data.language', 'where sentences end'),
    ('pretrain', {'data.source': 'builtin'}, 'data.format', 'its own format'),
    ('pretrain', {}, 'data.text_column', 'is plain text'),
    ('pretrain', {'data.sequences': 'sentence_order'}, 'data.negatives', 'has no negative pairs'),
    ('pretrain', {'sharding': 'dp', 'mesh.model': 2}, 'mesh.model', 'dp splits nothing over'),
    ('pretrain', {'lora.rank': 4, 'optimizer.frozen_layers': 0}, 'optimizer.frozen_layers',
     'lora.rank=4 freezes the embeddings already'),
    ('pretrain', {}, 'lora.alpha', 'lora.rank=0 trains all parameters'),
    ('pretrain', {}, 'lora.targets', 'lora.rank=0 trains all parameters'),
    ('pretrain', {}, 'masking.span_p', 'masking.unit=span, but the unit is token'),
    ('pretrain', {'masking.unit': 'ngram'}, 'masking.span_max', 'masking.unit=span'),
    ('pretrain', {'masking.unit': 'span'}, 'masking.ngram_max', 'masking.unit=ngram'),
    ('pretrain', {'masking.unit': 'span', 'masking.span_max': 33}, 'masking.span_max',
     'at most 32 tokens: give at most that'),
    ('pretrain', {'masking.unit': 'ngram', 'masking.ngram_max': 17, 'phases': ((12, 16, 8),)},
     'masking.ngram_max', 'at most 16 tokens'),
    ('pretrain', {'masking.replace_random': 0.0}, 'masking.random_by_frequency', 'no random token'),
    ('pretrain', {}, 'masking.causal_steps', 'causal_rows=0'),
    ('pretrain', {'model.architecture': 'distilbert'}, 'model.type_vocab_size', 'no segments'),
    ('pretrain', {'model': DebertaConfig()}, 'model.conv_act', 'conv_kernel_size=0'),
    ('sequence_classification', {}, 'model.vocab_size', 'init_from determines'),
    ('sequence_classification', {}, 'eval_every', 'give data.eval'),
    ('sequence_classification', {}, 'keep_best', 'give data.eval'),
    ('sentence_embedding', {}, 'data.eval_columns', 'give data.eval'),
    ('sequence_classification', {}, 'data.eval_fields', 'give data.eval'),
    *(('sequence_classification', {'data.format': 'glue/sst2'}, name, 'data.format=glue/sst2 names')
      for name in ('data.problem', 'data.labels', 'data.skip_labels', 'data.text_column',
                   'data.text_pair_column', 'data.label_column')),
    ('sequence_classification', {'data.problem': 'regression'}, 'data.labels', 'has no labels'),
    ('sequence_classification', {'data.text_pair_column': 'b'}, 'data.long', 'single texts'),
    ('sequence_classification', {'data.format': 'glue/mrpc'}, 'data.long', 'single texts'),
    ('multiple_choice', {'data.format': 'swag'}, 'data.choices_column', 'data.format=swag names'),
    ('question_answering', {'max_len': 32, 'data.doc_stride': 29}, 'data.doc_stride',
     'holds at most 28 tokens'),
]


def make(task, fields, corpus_file, records, vocab):
  fields = dict(fields)
  c = tiny.get_config() if task == 'pretrain' else config_lib.finetuning(task)
  if 'model' in fields:
    c = config_lib.pretraining(fields.pop('model'))
  values = {'RECORDS': records, 'VOCAB': vocab}
  if task == 'pretrain':
    c.data.source = corpus_file
  c.update_from_flattened_dict({n: values.get(v, v) if isinstance(v, str) else v
                                for n, v in fields.items()})
  return c


@pytest.fixture(scope='module')
def vocab(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('vocab') / 'vocab.txt'
  path.write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a']) + '\n')
  return str(path)


@pytest.mark.parametrize('task, fields, name, reason', CASES)
def test_fields_without_effect_are_refused(corpus_file, records, vocab, task, fields, name, reason):
  c = make(task, fields, corpus_file, records, vocab)
  with pytest.raises(UserError, match=f'^--config.{name} has no effect here: .*({reason})'):
    config_lib.check_effects(c, {'seed': 0, name: None})
  config_lib.check_effects(c, {'seed': 0})  # a default without effect is fine


@pytest.mark.parametrize('task, fields, name', [
    ('pretrain', {}, 'batch_size'), ('pretrain', {}, 'model.vocab_size'),
    ('pretrain', {'phases': ((1, 16, 8), (1, 32, 8))}, 'batch_size'),  # both phases agree
    ('pretrain', {'data.vocab': 'VOCAB'}, 'data.lowercase'), ('pretrain', {}, 'data.language'),
    ('pretrain', {'data.source': '*.txt'}, 'data.format'), ('pretrain', {}, 'data.heldout'),
    ('pretrain', {'data.lines_are_sentences': True, 'data.language': 'zh'}, 'data.language'),
    ('pretrain', {'data.format': 'jsonl'}, 'data.text_column'),
    ('pretrain', {'masking.unit': 'span'}, 'masking.span_max'),
    ('pretrain', {'masking.unit': 'ngram'}, 'masking.ngram_max'),
    ('pretrain', {'masking.unit': 'ngram', 'masking.ngram_max': 32}, 'masking.ngram_max'),
    ('pretrain', {'masking.unit': 'span', 'masking.span_max': 33,
                  'phases': ((6, 16, 8), (6, 64, 8))}, 'masking.span_max'),
    ('pretrain', {'data.sequences': 'full_sentences', 'masking.causal_rows': 0.2},
     'masking.causal_steps'),
    ('pretrain', {}, 'masking.random_by_frequency'), ('pretrain', {}, 'model.type_vocab_size'),
    ('sequence_classification', {'data.eval': 'x'}, 'eval_every'),
    ('sequence_classification', {}, 'data.labels'), ('sequence_classification', {}, 'data.long'),
    ('pretrain', {'sharding': 'fsdp_tp', 'mesh.model': 2}, 'mesh.model'),
    ('pretrain', {'sharding': 'dp'}, 'mesh.model'),
    ('pretrain', {'lora.rank': 4, 'optimizer.frozen_layers': 1}, 'optimizer.frozen_layers'),
    ('question_answering', {'max_len': 32, 'data.doc_stride': 28}, 'data.doc_stride'),
    ('token_classification', {}, 'data.text_column'), ('multiple_choice', {}, 'data.text_column')])
def test_fields_with_effect_are_accepted(corpus_file, records, vocab, task, fields, name):
  config_lib.check_effects(make(task, fields, corpus_file, records, vocab), [name])


def test_every_rule_of_the_tables_has_a_case():
  tried = {name for _, _, name, _ in CASES}
  tables = [config_lib.fields(task) for task in config_lib.TASKS]
  assert {name for table in tables for name, field in table.items() if field.unused} <= tried


def test_every_rule_documents_when_a_field_has_no_effect():
  rules = {rule for task in config_lib.TASKS for field in config_lib.fields(task).values()
           for rule in (*field.unused, *field.unused_by_data)}
  assert len(rules) >= 20
  for rule in rules:
    rule = getattr(rule, 'func', rule)
    assert rule.__name__ != '<lambda>' and re.search('no effect', rule.__doc__), rule


def test_fields_of_another_architecture_are_refused(corpus_file):
  c = config_lib.pretraining('tiny')
  with c.unlocked():
    c.model.embedding_size = 8
  with pytest.raises(UserError, match='model.architecture=bert has no such field'):
    config_lib.check_effects(c, ['model.embedding_size'])


@pytest.mark.parametrize('name', ['model.vocab_size', 'data.tokenizer', 'data.lowercase'])
def test_vocabulary_fields_are_refused_for_a_mixture_with_records(corpus_file, records, name):
  c = tiny.get_config()
  c.data.source = f'{corpus_file}=1,{records}=2'
  with pytest.raises(UserError, match=f'the records in data.source={records} have their own vocab'):
    config_lib.check_effects(c, [name])
  c.data.source = f'{corpus_file}=1,{corpus_file}=2'
  config_lib.check_effects(c, [name])


@pytest.mark.parametrize('stated, lowercase, has_effect', [
    (False, True, False), (False, False, True), (True, True, True), (True, False, True)])
def test_lowercase_true_is_refused_for_a_cased_vocabulary(tmp_path, vocab, corpus_file, stated,
                                                          lowercase, has_effect):
  (tmp_path / 'vocab.txt').write_text(pathlib.Path(vocab).read_text())
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'do_lower_case': stated}))
  c = tiny.get_config()
  c.data.source, c.data.vocab, c.data.lowercase = corpus_file, str(tmp_path), lowercase
  if has_effect:
    config_lib.check_effects(c, ['data.lowercase'])
    return
  with pytest.raises(UserError, match=f'^--config.data.lowercase has no effect here: data.vocab='
                                      f'{tmp_path} is a wordpiece model, which determines the '
                                      'case itself$'):
    config_lib.check_effects(c, ['data.lowercase'])


def tree(*paths):
  return {'params': traverse_util.unflatten_dict({path: jnp.ones(2) for path in paths}, sep='/')}


@pytest.mark.parametrize('fresh, whole', [
    ((), True), (('mlm_bias',), True), (('pooler/bias', 'norm/scale'), True),
    (('bert/layers/qkv_kernel/lora_a', 'bert/layers/qkv_kernel/lora_b'), True),
    (('classifier/kernel',), False), (('bert/embeddings/token',), False),
    (('mlm_dense/kernel', 'mlm_dense/bias'), False)])
def test_initializer_range_is_refused_if_nothing_starts_at_random(fresh, whole):
  copied = ('bert/embeddings/position', 'bert/layers/up/kernel')
  task = types.SimpleNamespace(init=lambda key: tree(*copied, *fresh))
  start = types.SimpleNamespace(params=tree(*copied, 'left_out/kernel'))
  job = types.SimpleNamespace(task=task, start=start)
  c = config_lib.finetuning('sequence_classification')
  c.init_from = 'there'
  if whole:
    with pytest.raises(UserError, match='initializer_range has no effect here: every array comes '
                                        'from there, and none starts from random values'):
      config_lib.check_effects(c, ['model.initializer_range'], job)
    c.reinit_layers = 1
  config_lib.check_effects(c, ['model.initializer_range'], job)
  config_lib.check_effects(c, ['model.initializer_range'],
                           types.SimpleNamespace(task=task, start=None))


def test_fields_without_effect_on_the_data_are_refused():
  c = tiny.get_config()
  c.profile_steps = (50, 60)
  files = types.SimpleNamespace(null_threshold=None)
  data = types.SimpleNamespace(has_held_out=False, files=files)
  job = types.SimpleNamespace(data=data, train_steps=12)
  for name, reason in (('eval_every', 'no text is held out'), ('eval_batches', 'no text is held'),
                       ('profile_steps', 'the run has 12 steps')):
    with pytest.raises(UserError, match=f'--config.{name} has no effect here: {reason}'):
      config_lib.check_effects(c, [name], job)
  c.profile_steps = (12, 60)
  data.has_held_out = True
  config_lib.check_effects(c, ['eval_every', 'eval_batches', 'profile_steps'], job)
  c = config_lib.finetuning('question_answering')
  with pytest.raises(UserError, match='every question of data.train= has an answer'):
    config_lib.check_effects(c, ['data.null_threshold'], job)
  files.null_threshold = 0.0
  config_lib.check_effects(c, ['data.null_threshold'], job)


def test_rows_beyond_the_memory_are_refused(monkeypatch):
  mesh, c = conftest.sub_mesh(1, 1), conftest.tiny_config('x', batch_size=10, max_len=48)
  need = 10 * 48 * (4 * 4 + 32 * 2)  # a token has four int32 and an embedding of 32 x 2 bytes
  monkeypatch.setattr(config_lib.host, 'memory', lambda: need)
  config_lib.check_sizes(c, mesh)
  monkeypatch.setattr(config_lib.host, 'memory', lambda: need - 1)
  with pytest.raises(UserError, match='^batch_size=10 of max_len=48 needs more than 0 GiB here, '
                                      'this machine has 0: make one of them smaller$'):
    config_lib.check_sizes(c, mesh)
  # Two microbatches: one of them at a time has embeddings.
  c.optimizer.accumulation = 2
  monkeypatch.setattr(config_lib.host, 'memory', lambda: 10 * 48 * (4 * 4 + 32))
  config_lib.check_sizes(c, mesh)
  c.optimizer.accumulation = 1
  monkeypatch.undo()
  for batch_size in (2**31 - 1, 100_000_000):
    c.batch_size = batch_size
    with pytest.raises(UserError, match=f'batch_size={batch_size} of max_len=48 needs more than'):
      config_lib.check_sizes(c, mesh)


def test_unused_lengths_are_not_checked():
  c = conftest.tiny_config('x', phases=((6, 16, 8), (6, 32, 8)), max_len=512)
  config_lib.check(c)
  config_lib.check_sizes(c, conftest.sub_mesh(1, 1))


@pytest.mark.parametrize('field, value', [('layer_decay', 0.9), ('frozen_layers', 0)])
def test_layer_settings_are_refused_for_a_model_with_a_generator(field, value):
  c = conftest.tiny_config('x', **{'model.architecture': 'electra', f'optimizer.{field}': value})
  with pytest.raises(UserError, match=f'optimizer.{field}={value} counts the layers of one model'):
    config_lib.check_sizes(c, conftest.sub_mesh(1, 1))


def test_reinitialized_layers_cannot_be_frozen():
  c = config_lib.finetuning('sequence_classification')
  c.model.update(dataclasses.asdict(BertConfig()))
  c.reinit_layers, c.optimizer.frozen_layers = 2, 10
  config_lib.check_sizes(c, conftest.sub_mesh(1, 1))
  c.optimizer.frozen_layers = 11
  with pytest.raises(UserError, match='reinit_layers=2 and optimizer.frozen_layers=11: a layer'):
    config_lib.check_sizes(c, conftest.sub_mesh(1, 1))
  for frozen in (-1, 0):
    c.reinit_layers, c.optimizer.frozen_layers = 12, frozen  # all layers
    config_lib.check_sizes(c, conftest.sub_mesh(1, 1))
    c.reinit_layers = 13
    with pytest.raises(UserError, match='^reinit_layers=13 is above model.num_layers=12$'):
      config_lib.check_sizes(c, conftest.sub_mesh(1, 1))
  c.reinit_layers, c.data.train = -1, 'x'
  with pytest.raises(UserError, match='^reinit_layers=-1 must not be negative$'):
    config_lib.check(c)


@pytest.mark.parametrize('name', ['muon', 'normuon'])
def test_muon_is_refused_with_lora(name):
  c = conftest.tiny_config('x', **{'lora.rank': 2, 'optimizer.name': name})
  with pytest.raises(UserError, match=f'optimizer.name={name} is for the matrices of the layers'):
    config_lib.check(c)


# ---- lists and values ---------------------------------------------------------------------------

@pytest.mark.parametrize('text, value', [
    ('a,b,c', ('a', 'b', 'c')), ('(a,b)', ('a', 'b')), ("('a','b, c')", ('a', 'b, c')),
    ('[a]', ('a',)), ('-,x', ('-', 'x')), ('0,1,01,1.0', (0, 1, '01', '1.0')), ('', ()),
    ('()', ()), ('not good,bad', ('not good', 'bad')), ('"x,y",z', ('x,y', 'z')),
    ('((1,16,8),(1,32,8))', ((1, 16, 8), (1, 32, 8))), ('10,15', (10, 15)), ('-1', (-1,))])
def test_lists_on_a_command_line_are_parsed(text, value):
  assert config_flag.TupleParser().parse(text) == value


@pytest.mark.parametrize('text', ['((a),b)', "('a',", '(', '((1,2),x)'])
def test_malformed_lists_are_refused(text):
  with pytest.raises(ValueError, match='is not a list'):
    config_flag.TupleParser().parse(text)


@pytest.mark.parametrize('name', ['optimizer.learning_rate', 'masking.rate', 'train_epochs',
                                  'data.heldout', 'model.layer_norm_eps'])
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_numbers_that_are_not_finite_are_refused(name, value):
  with pytest.raises(UserError, match=f'^{name}=(nan|inf) must be a finite number'):
    config_lib.check(conftest.tiny_config('x', **{name: value}))


def test_only_language_codes_are_accepted():
  for code in ('en', 'zh', 'zh-tw', 'de', 'sv', 'gsw'):
    languages.check('data.language', code)
  for code in ('', 'german', 'xx', 'EN', 'en_US'):
    with pytest.raises(UserError, match='is not a language code'):
      languages.check('data.language', code)


def test_a_task_that_does_not_fit_the_config_is_refused():
  for task, other in (('sequence_classification', 'token_classification'),
                      ('multiple_choice', 'question_answering')):
    c = config_lib.finetuning(task)
    c.task = other
    with pytest.raises(UserError, match=f'task={other} does not fit this config'):
      config_lib.check(c)


@pytest.mark.parametrize('change, message', [
    (lambda c: c.__delitem__('phases'), 'has the field phases: start from'),
    (lambda c: c.optimizer.update(beta3=0.9), 'has the field optimizer.beta3: start from'),
    (lambda c: c.__delitem__('task'), 'task=None is unknown')])
def test_a_config_that_no_builder_made_is_refused(change, message):
  c = config_lib.pretraining('tiny').unlock()
  change(c)
  with pytest.raises(UserError, match=message):
    resolve.checked(c, {})


def test_a_tilde_in_workdir_expands_to_the_home_folder(tmp_path, monkeypatch, corpus_file):
  from bert_jax.runs import run

  monkeypatch.setenv('HOME', str(tmp_path))
  with pytest.raises(UserError, match='--workdir is empty'):
    run.run(conftest.tiny_config(corpus_file), '')
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match=f'--workdir={tmp_path}/file cannot be written'):
    run.run(conftest.tiny_config(corpus_file), '~/file')
  assert not pathlib.Path('~').exists()
