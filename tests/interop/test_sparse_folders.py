"""Folders of a SparseEncoder give sentence-transformers' weights, read and written."""

import io
import json
import pathlib
import sys

import numpy as np
import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import (
  MLMTransformer,
  SparseAutoEncoder,
  SparseStaticEmbedding,
  SpladePooling,
)
import torch
import transformers

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.inference import predictions
from bert_jax.interop import conversion
from bert_jax.interop import load as load_lib
from bert_jax.runs import model_fields
from bert_jax.tasks import sparse_embedding
from tests.interop import test_family, torch_bert

TEXTS = ['w1 w2', 'w3', 'Query W4, w5 find.', ' '.join(f'w{i}' for i in range(60)), '']


@pytest.fixture(scope='module')
def encoder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('mlm')
  torch_bert.make('BertForMaskedLM', folder)
  return str(folder)


def make(folder, encoder, pooling='max', activation='relu', older=False, **options) -> str:
  torch.manual_seed(0)
  if older:
    first = MLMTransformer(encoder, max_seq_length=20)
  else:
    first = Transformer(encoder, transformer_task='fill-mask', max_seq_length=20)
  SparseEncoder(modules=[first, SpladePooling(pooling, activation)], device='cpu', **options).save(
      str(folder), create_model_card=False)
  return str(folder)


def theirs(folder, texts=TEXTS, **options) -> np.ndarray:
  model = SparseEncoder(str(folder), device='cpu')
  return model.encode(texts, show_progress_bar=False, convert_to_sparse_tensor=False,
                      **options).numpy()


LAYOUTS = {
    'newer': dict(prompts={'query': 'w7 find: '}, default_prompt_name='query'),
    'older': dict(older=True, pooling='max', activation='log1p_relu', max_active_dims=7),
    'sum': dict(pooling='sum', activation='log1p_relu', similarity_fn_name='dot')}


@pytest.mark.medium
@pytest.mark.parametrize('name', LAYOUTS)
def test_a_folder_keeps_its_weights_through_conversions(tmp_path, encoder, name):
  layout = LAYOUTS[name]
  folder = make(tmp_path / 'theirs', encoder, **layout)
  ours, expected = bert_jax.from_pretrained(folder), theirs(folder)
  assert 0 < np.count_nonzero(expected) < expected.size
  np.testing.assert_allclose(sparse_embedding.vectors(ours, TEXTS), expected, atol=2e-5)
  for prompt in (*layout.get('prompts', {}), ''):
    np.testing.assert_allclose(
        sparse_embedding.vectors(ours, TEXTS, prompt),
        theirs(folder, **({'prompt_name': prompt} if prompt else {'prompt': ''})), atol=2e-5)
  conversion.convert(folder, str(tmp_path / 'ours'), 'bert_jax')
  conversion.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), expected, atol=2e-5)
  if name == 'newer':
    conversion.convert(folder, str(tmp_path / 'mlm'), 'huggingface')
    np.testing.assert_allclose(theirs(tmp_path / 'mlm', TEXTS[:3]),
                               theirs(folder, TEXTS[:3], prompt=''), atol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize('title', ['DistilBert', 'ModernBert'])
def test_other_encoders(tmp_path, title):
  test_family.make(f'{title}ForMaskedLM', tmp_path / 'mlm')
  transformers.BertTokenizer.from_pretrained(str(tmp_path / 'mlm')).save_pretrained(
      str(tmp_path / 'mlm'))
  folder = make(tmp_path / 'theirs', str(tmp_path / 'mlm'))
  np.testing.assert_allclose(
      sparse_embedding.vectors(bert_jax.from_pretrained(folder), TEXTS), theirs(folder), atol=5e-5)
  conversion.convert(folder, str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), theirs(folder), atol=5e-5)


def test_predict_gives_the_entries_of_the_folder(tmp_path, encoder, monkeypatch):
  folder = make(tmp_path / 'a', encoder, max_active_dims=5, prompts={'query': 'w7 find: '})
  bert = bert_jax.from_pretrained(folder)
  with pytest.raises(UserError, match='predict --task=sparse_embedding gives the weights'):
    bert.search(['w1'], ['w2'])
  assert bert.embed(['w1'], pooling='mean').shape == (1, 128)
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in TEXTS).encode()
  for prompt in (None, 'query'):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(lines)))
    output = tmp_path / f'{prompt}.jsonl'
    predictions.run('sparse_embedding', folder, None, str(output), predictions.Options(
        prompt=prompt))
    model = SparseEncoder(folder, device='cpu')
    expected = model.decode(model.encode(TEXTS, prompt_name=prompt))
    for line, entries in zip(output.read_text().splitlines(), expected, strict=True):
      answer = json.loads(line)['entries']
      assert list(answer) == [token for token, _ in entries] and len(answer) == 5
      np.testing.assert_allclose([*answer.values()], [weight for _, weight in entries], atol=2e-5)
  with pytest.raises(UserError, match="'passage' is unknown: expected one of document, query"):
    predictions.run('sparse_embedding', folder, None, None, predictions.Options(prompt='passage'))


def test_a_run_refuses_a_start_with_another_pooling(tmp_path, encoder):
  config = config_lib.finetuning('sparse_embedding')
  config.init_from = make(tmp_path / 'sum', encoder, pooling='sum')
  with pytest.raises(UserError, match='pools the sum of relu.*convert --to=huggingface'):
    model_fields.layout_if_unset(config, {}, load_lib.load(config.init_from))
  conversion.convert(config.init_from, str(tmp_path / 'mlm'), 'huggingface')
  config.init_from = str(tmp_path / 'mlm')
  assert model_fields.layout_if_unset(config, {}, load_lib.load(config.init_from)) == {}


def test_an_older_folder_with_more_heads_survives_a_conversion(tmp_path):
  torch_bert.make('BertForPreTraining', tmp_path / 'mlm')
  folder = make(tmp_path / 'a', str(tmp_path / 'mlm'), older=True)
  config = tmp_path / 'a/config.json'  # as the encoder was before training
  torch_bert.make('BertForPreTraining', tmp_path / 'a')
  assert json.loads(config.read_text())['architectures'] == ['BertForPreTraining']
  conversion.convert(folder, str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), theirs(folder), atol=2e-5)
  assert load_lib.load(str(tmp_path / 'back')).groups == ('mlm',)


def changed(folder, name, change):
  path = pathlib.Path(folder, name)
  path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize('name, change, message', [
    ('modules.json', lambda x: [*x, x[1] | {'type': 'sentence_transformers.models.Normalize'}],
     'Normalize is unknown in place 2: expected no module'),
    ('modules.json', lambda x: [x[0], x[1] | {'type': 'sentence_transformers.models.Pooling'}],
     'Pooling is unknown in place 1: expected SpladePooling'),
    ('1_SpladePooling/config.json', lambda x: x | {'pooling_strategy': 'mean'},
     "pooling_strategy='mean' is unknown: expected one of max, sum"),
    ('1_SpladePooling/config.json', lambda x: x | {'activation_function': 'gelu'},
     "activation_function='gelu' is unknown: expected one of relu, log1p_relu"),
    ('sentence_bert_config.json',
     lambda x: x | {'transformer_task': 'feature-extraction', 'modality_config': None},
     "transformer_task='feature-extraction': SpladePooling pools the logits of 'fill-mask'"),
    ('config_sentence_transformers.json', lambda x: x | {'max_active_dims': 0},
     'max_active_dims=0 is not a positive number'),
    ('config.json', lambda x: x | {'architectures': ['BertForSplade']},
     'needs the logits of a masked LM, but its encoder has no such head')])
def test_mistakes(tmp_path, encoder, name, change, message):
  folder = make(tmp_path / 'model', encoder, older=True)
  changed(folder, name, change)
  with pytest.raises(UserError, match=message):
    load_lib.load(folder)


def test_other_sparse_encoders_are_refused_by_the_name_of_their_module(tmp_path, encoder):
  first = Transformer(encoder, transformer_task='fill-mask')
  static = SparseStaticEmbedding(first.tokenizer)
  router = Router.for_query_document([static], [first, SpladePooling()])
  SparseEncoder(modules=[router], device='cpu').save(str(tmp_path / 'free'))
  hidden = Transformer(encoder)
  csr = [hidden, Pooling(128), SparseAutoEncoder(128, 256, k=8)]
  SparseEncoder(modules=csr, device='cpu').save(str(tmp_path / 'csr'))
  SparseEncoder(modules=[static], device='cpu').save(str(tmp_path / 'static'))
  SparseEncoder(modules=[hidden, Pooling(128), Normalize(), csr[2]], device='cpu').save(
      str(tmp_path / 'normalized'))
  for name, message in (('free', r'router.Router is unknown in place 0'),
                        ('csr', r'SparseAutoEncoder is unknown in place 2'),
                        ('static', r'SparseStaticEmbedding is unknown in place 0'),
                        ('normalized', r'SparseAutoEncoder is unknown in place 3')):
    with pytest.raises(UserError, match=message):
      load_lib.load(str(tmp_path / name))
