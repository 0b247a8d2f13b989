"""Where a run starts: an imported model, new words, vectors from a file."""

import functools
import json
import pathlib
import shutil
import types

from etils import epath
import jax
import numpy as np
import pytest
import transformers

import bert_jax
from bert_jax import config as config_lib
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.interop import conversion, huggingface, verify
from bert_jax.model import architectures
from bert_jax.model.distilbert import DistilBertConfig
from bert_jax.runs import drift, initial, model_fields, run
from bert_jax.training import loop
from tests import conftest, made_tasks
from tests.interop import torch_bert

VOCAB = 400


@pytest.fixture(scope='module')
def published(tmp_path_factory, corpus_file):
  """A small model of transformers, without heads, whose vocabulary knows the corpus."""
  folder = tmp_path_factory.mktemp('published')
  theirs = torch_bert.make('BertModel', folder, hidden_size=32, num_attention_heads=4,
                           intermediate_size=64, max_position_embeddings=64, vocab_size=VOCAB)
  words = dict.fromkeys(pathlib.Path(corpus_file).read_text().lower().replace('.', ' .').split())
  letters = 'abcdefghijklmnopqrstuvwxyz0123456789'
  entries = list(dict.fromkeys(
      [*torch_bert.SPECIAL, *letters, *(f'##{c}' for c in letters), *words]))
  entries += [f'[unused{i}]' for i in range(VOCAB - len(entries))]
  (folder / 'vocab.txt').write_text('\n'.join(entries) + '\n')
  assert theirs.config.vocab_size == len(entries)
  return folder


def config(source, start, **overrides):
  """tests/tiny.py with the sizes of the model in `start`, and a learning rate near zero."""
  c = conftest.tiny_config(source, init_from=str(start), train_steps=2, **{
      'optimizer.learning_rate': 1e-30, 'optimizer.warmup_steps': 0, 'data.heldout': 0.0})
  with c.unlocked():
    for name in ('vocab_size', 'hidden_size', 'num_layers', 'num_heads', 'intermediate_size',
                 'max_positions'):
      c.model[name] = None
  c.update_from_flattened_dict(overrides)
  return c


def table(model):
  return np.asarray(model.params['params']['bert']['embeddings']['token'])


@pytest.mark.medium
def test_a_run_continues_a_published_model(published, tmp_path, corpus_file, capsys):
  run.run(config(corpus_file, published), str(tmp_path / 'run'))
  out = capsys.readouterr().out
  assert 'new             mlm_bias, mlm_dense, mlm_norm, nsp: not in' in out
  theirs, ours = (bert_jax.from_pretrained(str(d)) for d in (published, tmp_path / 'run'))
  assert ours.config.hidden_size == 32 and ours.tokenizer.vocab == theirs.tokenizer.vocab
  texts = ['the old king', 'a river']
  np.testing.assert_allclose(ours.embed(texts), theirs.embed(texts), atol=1e-6)
  # The run resumes without the model that it started from.
  gone = shutil.copytree(published, tmp_path / 'gone')
  run.run(config(corpus_file, gone), str(tmp_path / 'again'))
  shutil.rmtree(gone)
  run.run(config(corpus_file, gone, train_steps=3, allow_schedule_change=True),
          str(tmp_path / 'again'))
  lines = (tmp_path / 'again' / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(lines[-1])['step'] == 3


@pytest.mark.medium
def test_heads_that_the_run_lacks_are_left_out(tmp_path, corpus_file, capsys):
  torch_bert.make('BertForPreTraining', tmp_path / 'model', hidden_size=32, num_attention_heads=4,
                  intermediate_size=64, max_position_embeddings=64, vocab_size=200)
  run.run(config(corpus_file, tmp_path / 'model', **{'data.sequences': 'full_sentences'}),
          str(tmp_path / 'run'))
  assert 'left out        bert/pooler, nsp: not in this run' in capsys.readouterr().out
  ours = bert_jax.from_pretrained(str(tmp_path / 'run'))
  theirs = bert_jax.from_pretrained(str(tmp_path / 'model'))
  assert ours.model.groups == ('mlm',)
  for name in ('mlm_dense', 'mlm_norm'):
    for leaf, x in ours.params['params'][name].items():
      np.testing.assert_array_equal(x, theirs.params['params'][name][leaf])


@pytest.mark.medium
def test_new_words_start_as_the_mean_of_their_pieces(published, tmp_path, corpus_file):
  (tmp_path / 'words.txt').write_text('Kingbird\nstonehouse\n\nking\n')
  run.run(config(corpus_file, published, **{'add_tokens': str(tmp_path / 'words.txt')}),
          str(tmp_path / 'run'))
  before, after = (bert_jax.from_pretrained(str(d)) for d in (published, tmp_path / 'run'))
  assert after.config.vocab_size == VOCAB + 2  # the vocabulary already has king
  assert after.tokenizer.vocab[VOCAB:] == ['kingbird', 'stonehouse']
  np.testing.assert_allclose(table(after)[:VOCAB], table(before)[:VOCAB], atol=1e-20)
  for i, word in enumerate(('kingbird', 'stonehouse'), VOCAB):
    pieces = before.tokenizer.encode_batch([word])[0]
    assert len(pieces) > 1 and after.tokenizer.encode_batch([word])[0] == [i]
    np.testing.assert_allclose(table(after)[i], table(before)[pieces].mean(0), atol=1e-7)
  assert np.abs(table(after)[VOCAB + 2:]).max() < 1e-20
  # The export has the new words too.
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'hf'), 'huggingface')
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'hf'))
  assert tokenizer.tokenize('A Kingbird sees the stonehouse') == [
      'a', 'kingbird', 'sees', 'the', 'stonehouse']
  model, loading = transformers.BertForPreTraining.from_pretrained(
      str(tmp_path / 'hf'), output_loading_info=True)
  assert not any(loading.values()) and model.config.vocab_size == VOCAB + 2


@pytest.mark.slow
def test_new_words_with_punctuation_become_single_tokens(published, tmp_path, corpus_file):
  (tmp_path / 'words.txt').write_text('COVID-19\nsnake_case\n3.5mm\n')
  run.run(config(corpus_file, published, **{'add_tokens': str(tmp_path / 'words.txt')}),
          str(tmp_path / 'run'))
  before, after = (bert_jax.from_pretrained(str(d)) for d in (published, tmp_path / 'run'))
  assert after.tokenizer.vocab[VOCAB:] == ['covid-19', 'snake_case', '3.5mm']
  text = 'The king: Covid-19, snake_case. covid-195 3.5mm'
  ids = after.tokenizer.encode_batch([text])[0]
  assert [i for i in ids if i >= VOCAB] == [VOCAB, VOCAB + 1, VOCAB + 2]  # no part of covid-195
  offsets = after.tokenizer.encode_with_offsets([text])[0]
  assert [text[s:e] for i, (s, e) in zip(*offsets) if i >= VOCAB] == [
      'Covid-19', 'snake_case', '3.5mm']
  old = before.tokenizer.encode_batch(['covid-19'])[0]
  np.testing.assert_allclose(table(after)[VOCAB], table(before)[old].mean(0), atol=1e-7)
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'hf'), 'huggingface')
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'hf'))
  assert theirs(text, add_special_tokens=False)['input_ids'] == ids
  again = bert_jax.from_pretrained(str(tmp_path / 'hf'))
  assert again.tokenizer.encode_batch([text])[0] == ids


def test_the_summary_counts_lora_factors_apart_from_new_layers(capsys):
  layer = {'qkv_kernel': {name: jax.numpy.ones((1, 2)) for name in ('lora_a', 'lora_b')}}
  fresh = {'params': {'bert': {'layers': layer, 'pooler': {'bias': jax.numpy.ones(2)}},
                      'classifier': {'bias': jax.numpy.ones(2)}}}
  start = types.SimpleNamespace(config=types.SimpleNamespace(num_layers=1), params={
      'params': {'bert': {'pooler': {'bias': np.zeros(2)}}}})
  initial.from_model(fresh, start, 'there')
  assert [line.split(None, 1) for line in capsys.readouterr().out.splitlines()] == [
      ['initialized', '1 arrays from there, in addition to its frozen encoder'],
      ['new', '2 factors on the frozen encoder, which change nothing yet'],
      ['new', 'classifier: not in there']]


def test_a_vocabulary_larger_than_the_corpus_prints_a_note(tmp_path, corpus_file, monkeypatch,
                                                           capsys):
  monkeypatch.setattr(loop, 'train', lambda *arguments, **_: arguments[4].close())  # checkpoints
  for size in (3000, 100):
    run.run(conftest.tiny_config(corpus_file, **{'model.vocab_size': size}),
            str(tmp_path / f'{size}'))
    output = ' '.join(capsys.readouterr().out.split())
    saved = json.loads((tmp_path / f'{size}/run.json').read_text())['config']
    entries = saved['model']['vocab_size']
    note = f'note model.vocab_size=3,000: the corpus gives {entries} entries'
    assert (note in output, 'the corpus gives' in output) == ((True, True) if size == 3000
                                                              else (False, False))
    assert entries < size or size == entries == 100


@pytest.mark.slow
def test_word_vectors_initialize_the_known_words(tmp_path, corpus_file, capsys):
  rng = np.random.default_rng(0)
  # GloVe has words with spaces.
  vectors = {'king': rng.normal(size=32), '. . .': rng.normal(size=32),
             'river': rng.normal(size=32), 'zebra': rng.normal(size=32)}
  lines = ['4 32', *(' '.join([word, *map(str, x)]) for word, x in vectors.items())]
  (tmp_path / 'vectors.txt').write_text('\n'.join(lines) + '\n')
  overrides = {'optimizer.learning_rate': 1e-30, 'optimizer.warmup_steps': 0}
  plain = conftest.tiny_config(corpus_file, train_steps=1, **overrides)
  run.run(plain, str(tmp_path / 'plain'))
  run.run(conftest.tiny_config(corpus_file, train_steps=1, **overrides, **{
      'embedding_init': str(tmp_path / 'vectors.txt')}), str(tmp_path / 'run'))
  assert 'initialized     2 of ' in capsys.readouterr().out
  before, after = (bert_jax.from_pretrained(str(tmp_path / d)) for d in ('plain', 'run'))
  ids = [after.tokenizer.vocab.index(word) for word in ('king', 'river')]
  others = np.setdiff1d(np.arange(after.config.vocab_size), ids)
  np.testing.assert_array_equal(table(after)[others], table(before)[others])
  given = np.stack([vectors['king'], vectors['river']])
  scale = np.sqrt(np.mean(table(before)[ids] ** 2) / np.mean(given ** 2))
  np.testing.assert_allclose(table(after)[ids], given * scale, rtol=1e-5)


def write(path, text):
  path.write_text(text)
  return str(path)


def test_mistakes_are_refused(published, tmp_path, corpus_file):
  words = tmp_path / 'words.txt'
  for i, (overrides, message) in enumerate((
      ({'add_tokens': write(words, 'new york\n')}, "line 1: 'new york' has 2 words: give"),
      ({'add_tokens': write(tmp_path / 'none.txt', 'king\n')}, 'has no word that is not yet in'),
      ({'add_tokens': '/nowhere'}, 'add_tokens=/nowhere cannot be read'),
      ({'add_tokens': str(words), 'init_from': ''}, 'model.hidden_size is not set'),
      ({'embedding_init': write(tmp_path / 'v', 'king 1 2\nriver 1\n')}, 'line 2: 1 numbers'),
      ({'embedding_init': write(tmp_path / 'w', 'king 1 2\n')}, 'vectors of 2, the model is'),
      ({'embedding_init': write(tmp_path / 'x', 'king a b\n')}, "no numbers after 'king'"),
      ({'embedding_init': write(tmp_path / 'y', 'zebra 1 2\n')}, 'no vector for any entry'),
      ({'init_from': str(tmp_path / 'none')}, 'is not a folder here'),
      ({'max_len': 128}, 'max_len=128 is above model.max_positions=64'))):
    with pytest.raises(UserError, match=message):
      run.run(config(corpus_file, published, **overrides), str(tmp_path / f'run{i}'))
  c = conftest.tiny_config(corpus_file, **{'add_tokens': str(words)})
  with pytest.raises(UserError, match='extends the vocabulary of another model'):
    run.run(c, str(tmp_path / 'fresh'))


def test_cased_models_stay_cased(published, tmp_path, corpus_file):
  """A folder with do_lower_case=false trains with capitals."""
  folder = pathlib.Path(shutil.copytree(published, tmp_path / 'cased'))
  (folder / 'tokenizer_config.json').write_text('{"do_lower_case": false}')
  run.run(config(corpus_file, folder), str(tmp_path / 'run'))
  assert not tokenizer_reader.load(tmp_path / 'run' / 'tokenizer').lowercase
  assert not huggingface.load(epath.Path(folder)).tokenizer.lowercase


@pytest.mark.parametrize('name', ['add_tokens', 'embedding_init', 'reinit_layers'])
def test_fields_of_the_start_are_outside_the_model_group(name):
  config = config_lib.finetuning('sequence_classification')
  assert name in config and name not in config.model
  with pytest.raises(UserError, match=f'unknown config field --config.model.{name}: did you mean '
                                      f'--config.{name}'):
    config_lib.check_overrides(config, [f'--config.model.{name}=x'])
  before, now = {'model': {name: 'x'}}, {name: 'y', 'model': {}}
  assert drift.changes(before, now) == [drift.Change(name, 'x', 'y')]


def test_a_teacher_uses_the_dtype_and_attention_of_its_student(tmp_path):
  """It uses no dropout, so that a kernel without dropout can run it."""
  c = config_lib.pretraining('tiny')
  folder = made_tasks.start(tmp_path / 'teacher', 'sparse_embedding')
  c.update_from_flattened_dict({'teacher': folder, 'model.hidden_size': 32, 'phases': (),
                                'max_len': 64, 'model.dtype': 'bfloat16',
                                'model.attention': 'xla'})
  theirs = initial.load_teacher(c).config
  assert (theirs.dtype, theirs.attention) == ('bfloat16', 'xla')
  assert theirs.dropout == theirs.attention_dropout == 0
  c.max_len = 128
  with pytest.raises(UserError, match='reads at most 64 tokens, but rows have up to 128'):
    initial.load_teacher(c)
  c.max_len, c.model.hidden_size = 64, 64
  with pytest.raises(UserError, match='their hidden states cannot be compared'):
    initial.load_teacher(c)


def test_a_student_starts_with_layers_of_its_teacher(tmp_path):
  torch_bert.make('BertForMaskedLM', tmp_path, hidden_size=32, num_attention_heads=4,
                  num_hidden_layers=4, intermediate_size=64, max_position_embeddings=64,
                  vocab_size=VOCAB)
  teacher = huggingface.load(epath.Path(tmp_path))
  sizes = {name: getattr(teacher.config, name) for name in (
      'vocab_size', 'hidden_size', 'num_heads', 'intermediate_size', 'max_positions')}
  whole = initial.student(teacher, DistilBertConfig(num_layers=4, **sizes))
  batch = verify.sample(teacher, 3, 40)._replace(type_ids=np.zeros((3, 40), np.int32))
  a, b = (jax.jit(functools.partial(architectures.make_encoder(m.config).apply, method='encode'))(
      {'params': m.params['params']['bert']}, batch) for m in (teacher, whole))
  np.testing.assert_allclose(a, b, atol=2e-6)

  half = initial.student(teacher, DistilBertConfig(num_layers=2, **sizes))
  kernels = [m.params['params']['bert']['layers']['attention']['qkv_kernel']
             for m in (teacher, half)]
  np.testing.assert_array_equal(kernels[1], np.asarray(kernels[0])[[0, 2]])
  assert initial.student(teacher, DistilBertConfig(num_layers=5, **sizes)) is None
  assert initial.student(teacher, DistilBertConfig(**sizes | {'num_heads': 2})) is None


@pytest.mark.slow
def test_a_student_deeper_than_its_teacher_starts_at_random(corpus_file, tmp_path, capsys):
  short = {'train_steps': 2, 'optimizer.warmup_steps': 1}
  run.run(conftest.tiny_config(corpus_file, **short), str(tmp_path / 'teacher'))
  c = conftest.tiny_config(
      corpus_file, **short, objective='distillation', teacher=str(tmp_path / 'teacher'),
      **{'model.num_layers': 3})
  c.data.source = str(tmp_path / 'teacher/corpus')  # both use one vocabulary
  capsys.readouterr()
  run.run(c, str(tmp_path / 'run'))
  assert 'student         starts from random values: the teacher' in capsys.readouterr().out


def test_tables_of_different_lengths_are_refused(tmp_path):
  """The digest of a vocabulary leaves out the rows without an entry."""
  tokenizer = made_tasks.tokenizer()
  size = tokenizer.vocab_size
  assert size + 2 <= 128  # one padded table

  def check(what, rows):
    model = types.SimpleNamespace(tokenizer=tokenizer.padded(rows),
                                  config=types.SimpleNamespace(vocab_size=rows))
    model_fields.check_vocabulary(what, 'm', model, tokenizer, epath.Path(tmp_path / 'v'), False)

  check('init_from', size + 2)  # a run drops the unused rows
  check('teacher', size)
  for what, rows in (('teacher', size + 2), ('init_from', 200)):
    with pytest.raises(UserError, match=f'{what}=m has a table of {rows} rows, the vocabulary of '
                                        f'the corpus {size} entries: prepare records with --vocab'):
      check(what, rows)
    assert tokenizer_reader.load(epath.Path(tmp_path / 'v')).vocab_size == rows


@pytest.mark.medium
def test_a_refused_teacher_changes_no_file_of_the_run(corpus_file, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('teacher', 'other'):
    made_tasks.with_head(tmp_path / name, '', (), ('mlm',))
  (tmp_path / 'other/tokenizer.json').unlink()
  vocab = tmp_path / 'other/vocab.txt'
  words = vocab.read_text().splitlines()
  vocab.write_text('\n'.join([*words[:-2], words[-1], words[-2]]) + '\n')

  def c(teacher):
    return conftest.tiny_config(corpus_file, train_steps=1, max_len=16, objective='distillation',
                                teacher=teacher, **{
                                    'optimizer.warmup_steps': 0,
                                    'data.sequences': 'full_sentences'})

  def files():
    return {path: path.read_bytes() for path in pathlib.Path('run').rglob('*')
            if path.is_file()}

  run.run(c('teacher'), 'run')
  before = files()
  with pytest.raises(UserError) as e:
    run.run(c('other'), 'run')
  assert str(e.value) == ('teacher=other has another vocabulary than the run in run: give the '
                          'teacher of that run, or use another --workdir')
  assert files() == before
  # Only a damaged vocabulary is replaced, from the teacher of the run.
  pathlib.Path('run/tokenizer/vocab.txt').write_text('damage')
  run.run(c('teacher'), 'run')
  assert files() == before
