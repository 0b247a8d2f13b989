"""Conversions verify themselves, and leave no files if they fail."""

import dataclasses
import json
import pathlib
import shutil

from etils import epath
import jax.export
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import torch
import transformers

import bert_jax
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError
from bert_jax.evaluation import glue_suite
from bert_jax.interop import conversion, huggingface, native, stablehlo, verify
from bert_jax.interop import load as load_lib
from bert_jax.interop.onnx_export import folder as onnx_folder
from bert_jax.interop.pretrained import Pretrained
from bert_jax.model import architectures
from bert_jax.parallel import sharding
from bert_jax.runs import run
from bert_jax.runtime import sealed
from bert_jax.tasks import sequence_classification
from tests import conftest, made_tasks
from tests.interop import torch_bert


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('theirs')
  torch_bert.make('BertForPreTraining', folder)
  return folder


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path):
  (tmp_path / 'notes.txt').write_text('mine')
  (tmp_path / 'out.partial').write_text('mine')
  source = made_tasks.model(tmp_path / 'model')
  for output, message in (('notes.txt/out', 'cannot be written: '),
                          ('out', 'out.partial is a file'),
                          ('gs://bucket/out', 'give a local folder')):
    path = output if '://' in output else str(tmp_path / output)
    with pytest.raises(UserError, match=f'--output={path}.*{message}'):
      conversion.convert(source, path, 'bert_jax')
  assert (tmp_path / 'out.partial').read_text() == 'mine'


@pytest.mark.parametrize('task, labels', [
    ('', ()), ('sequence_classification', ('a', 'b', 'c')), ('question_answering', ('0', '1'))])
def test_a_card_counts_all_parameters(tmp_path, task, labels):
  model = load_lib.load(made_tasks.with_head(tmp_path, task, labels, () if task else ('mlm',)))
  flat = load_file(str(tmp_path / 'model.safetensors'))
  expected = sum(x.size for x in flat.values())
  assert f'\n{expected:,} parameters, ' in huggingface.card(model, (), ())


def test_facts_that_an_export_loses_are_named(tmp_path):
  model = load_lib.load(made_tasks.with_head(tmp_path, 'question_answering', ('0', '1')))
  trained = dataclasses.replace(model, facts={
      'max_len': 64, 'doc_stride': 64, 'n_best': 20, 'null_threshold': 0.0})
  notes = [text for title, text in verify.compare(trained, model, epath.Path(tmp_path))
           if title == 'note' and ' in one model' in text]
  # Without a stride, answers read windows of at most 384 tokens.
  assert verify._fact(dataclasses.replace(model, facts={'max_len': 512}), 'max_len', 0) == 384
  assert verify._fact(dataclasses.replace(
      model, facts={'max_len': 512, 'doc_stride': 128}), 'max_len', 0) == 512
  assert notes == ['doc_stride is 64 in one model and 128 in the other: answers may differ',
                   'null_threshold is 0.0 in one model and None in the other: answers may differ']


def test_facts_that_an_onnx_file_loses_are_named(tmp_path):
  model = load_lib.load(made_tasks.with_head(tmp_path / 'm', 'sequence_classification',
                                             ('no', 'yes')))
  trained = dataclasses.replace(model, facts={'max_len': 32, 'long': 'chunks_mean'})
  onnx_folder.save(trained, epath.Path(tmp_path / 'out'))
  assert ('note', 'long is chunks_mean in one model and head in the other: answers may differ'
          ) in [*onnx_folder.compare(trained, epath.Path(tmp_path / 'out'))]


def test_a_head_that_an_embedder_cannot_keep_is_named(tmp_path, capsys):
  source = made_tasks.with_head(tmp_path / 'm', 'sequence_classification', ('no', 'yes'))
  conversion.convert(source, str(tmp_path / 'out'), 'sentence_transformers')
  lost = [line for line in capsys.readouterr().out.splitlines() if 'left out' in line]
  assert len(lost) == 1 and 'classifier' in lost[0] and 'an embedder does not use' in lost[0]


def test_a_folder_that_pytorch_reads_differently_is_refused(theirs, tmp_path, monkeypatch):
  monkeypatch.setattr(verify, '_transformers_outputs', lambda _, model: {
      'hidden states': verify._outputs(model)['hidden states'] + 1})
  with pytest.raises(UserError, match='^PyTorch: the hidden states differ'):
    conversion.convert(str(theirs), str(tmp_path / 'out'), 'huggingface')
  assert not list(tmp_path.iterdir())


def test_older_packages_are_not_compared(monkeypatch):
  versions = {'torch': '2.1.0+cpu', 'transformers': '4.57.1', 'sentence-transformers': '6.0.0'}
  monkeypatch.setattr(verify.importlib.metadata, 'version', versions.get)
  assert verify.missing('torch', 'transformers') == 'transformers 4.57.1 is older than 5'
  assert verify.missing('sentence-transformers') == ''
  monkeypatch.setattr(verify.importlib.util, 'find_spec', lambda name: None)
  assert verify.missing('torch', 'transformers') == 'torch and transformers are not installed'


def test_outputs_are_compared_in_whole_float32(tmp_path, monkeypatch):
  """A GPU or TPU would round the factors of products, unlike PyTorch on the CPU."""
  model = load_lib.load(made_tasks.model(tmp_path / 'm'))
  seen = []

  def jit(function):
    seen.append(jax.config.jax_default_matmul_precision)
    return function

  monkeypatch.setattr(verify.jax, 'jit', jit)
  verify._outputs(model)
  assert seen == ['highest'] and jax.config.jax_default_matmul_precision is None


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, corpus_file):
  folder = tmp_path_factory.mktemp('run') / 'run'
  run.run(conftest.tiny_config(corpus_file, **{'data.heldout': 0.1}), str(folder))
  return folder


def test_a_conversion_and_back_keeps_every_bit(theirs, tmp_path, capsys):
  conversion.convert(str(theirs), str(tmp_path / 'ours'), 'bert_jax')
  conversion.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), 'huggingface')
  a, b = (load_file(str(d / 'model.safetensors')) for d in (theirs, tmp_path / 'back'))
  assert a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
  out = capsys.readouterr().out
  assert f'{len(a)}, all equal to the bit' in out and 'MLM logits      differ from PyTorch' in out
  conversion.convert(str(theirs), str(tmp_path / 'back'), None, verify_only=True)
  assert 'hold the same model' in capsys.readouterr().out


def test_labels_and_task_survive(tmp_path):
  torch_bert.make('BertForTokenClassification', tmp_path / 'a', id2label={0: 'O', 1: 'B', 2: 'I'})
  conversion.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'bert_jax')
  model = load_lib.load(str(tmp_path / 'b'))
  assert (model.task, model.labels) == ('token_classification', ('O', 'B', 'I'))


@pytest.mark.medium
def test_a_trained_model_gives_the_same_answers_in_transformers(workdir, tmp_path):
  conversion.convert(str(workdir), str(tmp_path / 'hf'), 'huggingface')
  model = transformers.BertForPreTraining.from_pretrained(str(tmp_path / 'hf')).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'hf'))
  text = 'The old [MASK] sees the river.'
  inputs = tokenizer(text, return_tensors='pt')
  with torch.no_grad():
    logits = model(**inputs).prediction_logits[0]
  bert = bert_jax.from_pretrained(str(workdir))
  for mask in bert.fill_mask(text):
    expected = logits[mask['position']].numpy()
    assert inputs['input_ids'][0, mask['position']] == bert.tokenizer.mask_id
    for candidate in mask['candidates']:
      i = tokenizer.convert_tokens_to_ids(candidate['token'])
      assert abs(candidate['logit'] - expected[i]) < 2e-5
  card = (tmp_path / 'hf' / 'README.md').read_text()
  for part in ('| Steps | 12 |', 'corpus.txt', 'mlm_loss', '| Command | `python '):
    assert part in card, part


def test_stablehlo_gives_the_vectors_of_the_model(theirs, tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'platform', lambda: 'gpu')  # GPU kernels need known lengths
  conversion.convert(str(theirs), str(tmp_path / 'served'), 'stablehlo')
  encoder = jax.export.deserialize((tmp_path / 'served' / 'encoder.stablehlo').read_bytes())
  assert set(encoder.platforms) == {'cpu', 'cuda', 'tpu'}
  monkeypatch.undo()  # the model itself runs on this machine
  bert = bert_jax.from_pretrained(str(theirs))
  for texts in (['w1 w2 w3'], ['w9', 'w1 w2 w3 w4 w5', 'a b c d']):  # two shapes, one file
    encoded = bert.encode(texts)
    rows = [bert.row(text) for text in texts]
    ids = np.zeros(encoded.mask.shape, np.int32)
    for i, row in enumerate(rows):
      ids[i, :len(row.ids)] = row.ids
    hidden, pooled = encoder.call(ids, np.zeros_like(ids), encoded.mask.astype(np.int32))
    np.testing.assert_allclose(np.asarray(hidden)[encoded.mask], encoded.hidden[encoded.mask],
                               atol=1e-5)
    np.testing.assert_allclose(pooled, encoded.pooled, atol=1e-5)


def spoil(name, change):
  """A `save` that writes a model with one tensor changed."""
  save = huggingface.save

  def spoiled(model, directory):
    save(model, directory)
    path = str(directory / 'model.safetensors')
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)

  return spoiled


def test_a_wrong_export_is_refused(theirs, tmp_path, monkeypatch):
  query = 'bert.encoder.layer.1.attention.self.query.weight'
  monkeypatch.setattr(huggingface, 'save', spoil(query, lambda x: np.ascontiguousarray(x.T)))
  with pytest.raises(UserError, match='layer.1.attention.self.query.weight differs'):
    conversion.convert(str(theirs), str(tmp_path / 'out'), 'huggingface')
  assert not list(tmp_path.iterdir())


def test_a_wrong_vocabulary_is_refused(theirs, tmp_path, monkeypatch):
  save = huggingface.save

  def spoiled(model, directory):
    save(model, directory)
    config = directory / 'tokenizer_config.json'
    config.write_text(json.dumps(json.loads(config.read_text()) | {'do_lower_case': False}))

  monkeypatch.setattr(huggingface, 'save', spoiled)
  with pytest.raises(UserError, match='the tokenizers differ at'):
    conversion.convert(str(theirs), str(tmp_path / 'out'), 'huggingface')
  assert not list(tmp_path.iterdir())


def test_verify_writes_nothing(theirs, tmp_path, capsys):
  def content():
    return {path: path.read_bytes() for path in theirs.rglob('*') if path.is_file()}

  before = content()
  conversion.convert(str(theirs), None, 'bert_jax', verify_only=True)
  assert 'nothing was kept' in capsys.readouterr().out
  assert content() == before
  other = tmp_path / 'other'
  shutil.copytree(theirs, other)
  path = str(other / 'model.safetensors')
  save_file(load_file(path) | {'cls.predictions.bias': np.ones(1000, np.float32)}, path)
  with pytest.raises(UserError, match='the tensor cls.predictions.bias differs'):
    conversion.convert(str(theirs), str(other), None, verify_only=True)


def test_mistakes(theirs, tmp_path):
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'file').write_text('mine')
  for arguments, message in (
      ((str(theirs), str(tmp_path / 'full'), 'huggingface'), 'is not only a converted model'),
      ((str(theirs), str(tmp_path / 'x'), 'torch'), '--to=torch is unknown'),
      ((str(theirs), None, 'huggingface'), 'give --output=DIR'),
      ((str(tmp_path), str(tmp_path / 'x'), 'huggingface'), 'holds no model')):
    with pytest.raises(UserError, match=message):
      conversion.convert(*arguments)
  assert (tmp_path / 'full' / 'file').read_text() == 'mine' and not (tmp_path / 'x').exists()


def test_a_damaged_folder_of_bert_jax_is_refused(theirs, tmp_path):
  native.save(huggingface.load(epath.Path(theirs)), epath.Path(tmp_path) / 'ours')
  shutil.rmtree(tmp_path / 'ours' / 'params')
  with pytest.raises(UserError, match='ours is damaged: it cannot be read'):
    load_lib.load(str(tmp_path / 'ours'))
  pathlib.Path(tmp_path / 'ours' / 'bert.json').write_text('{"model": {"hidden_size": 7}}')
  with pytest.raises(UserError, match='bert.json is damaged'):
    load_lib.load(str(tmp_path / 'ours'))
  content = sealed.seal({'model': {'hidden_size': 7}})
  pathlib.Path(tmp_path / 'ours' / 'bert.json').write_text(json.dumps(content))
  with pytest.raises(UserError, match='not divisible'):
    load_lib.load(str(tmp_path / 'ours'))


@pytest.mark.parametrize('name', ['bert.json', 'tokenizer/vocab.txt', 'params'])
def test_a_flipped_bit_is_refused(theirs, tmp_path, name):
  native.save(huggingface.load(epath.Path(theirs)), epath.Path(tmp_path) / 'ours')
  conversion.convert(str(tmp_path / 'ours'), None, None, verify_only=True)
  path = tmp_path / 'ours' / name
  if path.is_dir():
    path = next((path / 'd').iterdir())
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  with pytest.raises(UserError, match='damaged|cannot be read'):
    conversion.convert(str(tmp_path / 'ours'), None, None, verify_only=True)


@pytest.mark.medium
@pytest.mark.parametrize('member', ['modernbert', 'mpnet'])
def test_stablehlo_is_verified_if_attention_depends_on_the_length(member, tmp_path):
  """A model with windows computes the longer of the compared rows in blocks."""
  local = {'local_window': 8, 'conv_reach': 1} if member == 'modernbert' else {}
  tokenizer = made_tasks.tokenizer()
  config = architectures.make_config({
      'architecture': member, 'vocab_size': tokenizer.vocab_size, 'hidden_size': 32,
      'num_heads': 4, 'num_layers': 4, 'intermediate_size': 64, 'max_positions': 64, **local})
  model = glue_suite.twin_of(Pretrained(config, {}, tokenizer))
  stablehlo.save(model, epath.Path(tmp_path))
  assert list(stablehlo.compare(model, epath.Path(tmp_path)))
  other = dataclasses.replace(model, params=jax.tree.map(lambda x: x + 0.01, model.params))
  with pytest.raises(UserError, match='the outputs differ by'):
    list(stablehlo.compare(other, epath.Path(tmp_path)))


def test_an_exported_classifier_keeps_its_max_len(tmp_path, capsys):
  """Its run cut texts at max_len; transformers cuts at model_max_length."""
  folder = made_tasks.with_head(tmp_path / 'a', 'sequence_classification', ('no', 'yes'))
  model = load_lib.load(folder)
  trained = dataclasses.replace(model, facts={**model.facts, 'max_len': 24, 'long': 'tail'})
  native.save(trained, epath.Path(tmp_path / 'b'))
  conversion.convert(str(tmp_path / 'b'), str(tmp_path / 'c'), 'huggingface')
  assert load_lib.load(str(tmp_path / 'c')).facts['max_len'] == 24
  assert transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'c')).model_max_length == 24
  out = capsys.readouterr().out
  assert 'long is tail in one model and head in the other: answers may differ' in out
  assert 'max_len is' not in out
  conversion.convert(str(tmp_path / 'b'), folder, None, verify_only=True)
  assert 'max_len is 24 in one model and 64 in the other' in capsys.readouterr().out
  other = dataclasses.replace(model, problem='multi_label')
  native.save(other, epath.Path(tmp_path / 'd'))
  with pytest.raises(UserError, match='for sequence_classification single_label with the labels no'
                     ', yes, the other for sequence_classification multi_label'):
    conversion.convert(folder, str(tmp_path / 'd'), None, verify_only=True)


@pytest.mark.medium
@pytest.mark.parametrize('segments', [1, 2])
@pytest.mark.parametrize('kind', ['wordpiece', 'bpe', 'sentencepiece'])
def test_an_export_gives_the_second_text_its_segment_in_transformers(tmp_path, kind, segments):
  texts = [s for d in conftest.make_documents(30) for s in d]
  tokenizer = training.train(kind, lambda: texts, 320, False)
  torch.manual_seed(0)
  source, out = tmp_path / 'source', tmp_path / 'out'
  transformers.BertForSequenceClassification(transformers.BertConfig(
      vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
      intermediate_size=64, max_position_embeddings=64, type_vocab_size=segments, num_labels=3,
      pad_token_id=tokenizer.pad_id, initializer_range=.3)).save_pretrained(str(source))
  tokenizer.save(epath.Path(source))
  conversion.convert(str(source), str(out), 'huggingface')
  bert = bert_jax.from_pretrained(str(out))
  ours = bert.model.tokenizer
  assert ours.serialized() == tokenizer.serialized()  # records stay usable
  pair = texts[0], texts[1]
  joined = inputs_lib.join(ours, *ours.encode_batch(pair))
  encoded = transformers.AutoTokenizer.from_pretrained(str(out))(*pair, return_tensors='pt')
  assert encoded['input_ids'][0].tolist() == list(joined.ids)
  if segments == 1:
    assert 'token_type_ids' not in encoded
  else:
    assert encoded['token_type_ids'][0].tolist() == joined.type_ids and 1 in joined.type_ids
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(str(out)).eval()
  answer, = sequence_classification.classify(bert, [pair])
  np.testing.assert_allclose(list(answer['probabilities'].values()),
                             torch.softmax(theirs(**encoded).logits, -1)[0].tolist(), atol=1e-5)
