"""Folders of MultiVectorEncoder and PyLate give sentence-transformers' vectors, both ways."""

import io
import json
import string
import sys

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.multi_vector_encoder.modules import (
  HierarchicalTokenPooling,
  MultiVectorMask,
)
import torch
import transformers

import bert_jax
from bert_jax.data.late_inputs import DOCUMENT, QUERY
from bert_jax.errors import Failed, UserError
from bert_jax.inference import predictions
from bert_jax.interop import conversion
from bert_jax.tasks import late_interaction
from tests.interop import test_family, torch_bert

QUERIES = ['w1 w2', 'Query W4, w5 find.', ' '.join(f'w{i}' for i in range(60)), '']
DOCUMENTS = [*QUERIES, '. , !', 'w9 [SEP] w8 [MASK]']
ENCODERS = {'Bert': (128, torch_bert.make), 'ModernBert': (64, test_family.make),
            'DistilBert': (64, test_family.make), 'DebertaV2': (64, test_family.make)}


@pytest.fixture(scope='module')
def encoders(tmp_path_factory):
  folders = {}
  for title, (_, make) in ENCODERS.items():
    folder = str(tmp_path_factory.mktemp(title))
    make(f'{title}Model', tmp_path_factory.getbasetemp() / folder)
    if title != 'Bert':
      transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    folders[title] = folder
  return folders


def tokens_dense(inputs, outputs, **options):
  return Dense(inputs, outputs, bias=False, activation_function=torch.nn.Identity(),
               module_input_name='token_embeddings', **options)


def expands(strategy, attend, length=12):
  return {'query_expansion': {'strategy': strategy, 'attend': attend, 'length': length}}


LAYOUTS = {
    'fixed': (expands('fixed', False), 16, {'skiplist_words': list(string.punctuation)}),
    'long': (expands('fixed', False, 24), 16, {}),
    'fixed_visible': (expands('fixed', True), 16, {}),
    'min': (expands('min', False), 16, {}),
    'min_visible': (expands('min', True) | {'query_length': 20, 'document_length': 9}, 16, {}),
    'none': ({'query_length': 6, 'document_length': 9}, 16,
             {'skiplist_words': ['w1', ',', 'no entry'], 'skiplist_tasks': ['query', 'document']}),
    'some_tokens': (expands('fixed', False), 16, {'keep_only_token_ids': [2, 43, 44, 51]}),
    'residual': ({}, 'residual', {}),
    'no_projection': ({}, None, {}),
}


def make(folder, encoder, width, name='fixed', longest=30, **options) -> str:
  torch.manual_seed(0)
  transformer, size, mask = LAYOUTS[name]
  modules = [Transformer(encoder, max_seq_length=longest, **transformer)]
  if size == 'residual':
    modules += [tokens_dense(width, 24, use_residual=True), tokens_dense(24, 24, use_residual=True)]
  elif size:
    modules.append(tokens_dense(width, size))
  modules.append(MultiVectorMask(**mask))
  if name != 'no_projection':
    modules.append(Normalize(module_input_name='token_embeddings'))
  MultiVectorEncoder(modules=modules, device='cpu', **options).save_pretrained(
      str(folder), create_model_card=False)
  return str(folder)


def theirs(folder):
  model = MultiVectorEncoder(str(folder), device='cpu')
  vectors = [encode(texts, show_progress_bar=False) for encode, texts in (
      (model.encode_query, QUERIES), (model.encode_document, DOCUMENTS))]
  return [[x.numpy() for x in of_role] for of_role in vectors], model.similarity(*vectors).numpy()


def compare(bert, folder):
  expected, scores = theirs(folder)
  ours = [late_interaction.vectors(bert, QUERIES, QUERY),
          late_interaction.vectors(bert, DOCUMENTS, DOCUMENT)]
  for role, of_role in zip(ours, expected):
    assert [x.shape for x in role] == [x.shape for x in of_role]
    for a, b in zip(role, of_role):
      np.testing.assert_allclose(a, b, atol=1e-5)
  np.testing.assert_allclose(late_interaction.max_sims(*ours), scores, rtol=1e-5, atol=1e-5)
  return expected


@pytest.mark.medium
@pytest.mark.parametrize(('name', 'title'), [
    *((name, 'Bert') for name in LAYOUTS),
    *((name, title) for title in ('ModernBert', 'DistilBert')
      for name in ('fixed', 'min_visible')),
    # Hidden tokens beyond the local window of all visible ones.
    ('long', 'ModernBert'), ('fixed_visible', 'DebertaV2')])
def test_a_folder_keeps_its_vectors_through_conversions(tmp_path, encoders, name, title):
  prompts = {'query': 'w7 find: ', 'passage': 'w8 '} if name == 'fixed' else None
  folder = make(tmp_path / 'theirs', encoders[title], ENCODERS[title][0], name, prompts=prompts)
  compare(bert_jax.from_pretrained(folder), folder)
  conversion.convert(folder, str(tmp_path / 'ours'), 'bert_jax')
  conversion.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), 'sentence_transformers')
  back = bert_jax.from_pretrained(str(tmp_path / 'back'))
  for a, b in zip(compare(back, tmp_path / 'back'), theirs(folder)[0]):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize('tasks, roles', [
    (None, (DOCUMENT,)), ([], ()), ('document', (DOCUMENT,)), (['query'], (QUERY,))])
def test_the_roles_of_skipped_words(tmp_path, encoders, tasks, roles):
  folder = make(tmp_path / 'theirs', encoders['Bert'], 128, 'none')
  path, = tmp_path.glob('theirs/*MultiVectorMask/config.json')
  path.write_text(json.dumps(json.loads(path.read_text()) | {'skiplist_tasks': tasks}))
  assert bert_jax.from_pretrained(folder).late.texts.skipped_in == roles


def test_hidden_tokens_of_deberta_are_refused(tmp_path, encoders):
  folder = make(tmp_path / 'theirs', encoders['DebertaV2'], 64, 'fixed')
  with pytest.raises(UserError, match='attend=false.*is not supported for deberta-v2'):
    bert_jax.from_pretrained(folder)


@pytest.mark.parametrize('name', ['fixed', 'min', 'min_visible', 'none'])
def test_the_length_of_a_role_wins_over_max_seq_length(tmp_path, encoders, name):
  folder = make(tmp_path / 'theirs', encoders['Bert'], 128, name, longest=8)
  compare(bert_jax.from_pretrained(folder), folder)


def to_pylate(folder, marks=('[Q] ', '[D] '), longest=30, lowercases=False, **settings):
  """Rewrites a folder of two modules as PyLate 1 saves it, with its marks as added tokens."""
  # With `lowercases` the package lowercases, not the tokenizer.
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), do_lower_case=not lowercases)
  model = transformers.AutoModel.from_pretrained(str(folder))
  tokenizer.add_tokens([mark for mark in marks if mark.startswith('[Q') or mark.startswith('[D')])
  model.resize_token_embeddings(len(tokenizer))
  tokenizer.save_pretrained(str(folder))
  model.save_pretrained(str(folder))
  path = folder / 'modules.json'
  modules = json.loads(path.read_text())[:2]
  modules[0]['type'], modules[1]['type'] = (
      'sentence_transformers.models.Transformer', 'pylate.models.Dense.Dense')
  path.write_text(json.dumps(modules))
  (folder / 'sentence_bert_config.json').write_text(
      json.dumps({'max_seq_length': longest, 'do_lower_case': lowercases}))
  (folder / 'config_sentence_transformers.json').write_text(json.dumps({
      'model_type': 'ColBERT', 'prompts': {}, 'default_prompt_name': None,
      'similarity_fn_name': 'MaxSim', 'query_prefix': marks[0], 'document_prefix': marks[1],
      'query_length': 14, 'document_length': 20, 'attend_to_expansion_tokens': False,
      **settings}))
  fields = json.loads((folder / '1_Dense/config.json').read_text())
  fields = {x: y for x, y in fields.items() if not x.startswith('module_')}
  (folder / '1_Dense/config.json').write_text(json.dumps(fields))


@pytest.mark.medium
@pytest.mark.parametrize('settings', [
    {}, {'marks': ('[unused0] ', 'w3 ')}, {'attend_to_expansion_tokens': True},
    {'do_query_expansion': False, 'skiplist_words': ['w1']}, {'longest': 13},
    {'lowercases': True}])
def test_folders_of_pylate(tmp_path, encoders, settings):
  folder = tmp_path / 'theirs'
  make(folder, encoders['Bert'], 128)
  to_pylate(folder, **settings)
  bert = bert_jax.from_pretrained(str(folder))
  expected = compare(bert, folder)
  if not settings:
    # [CLS], the mark as one token, the text, [SEP], [MASK].
    ids = bert.late.inputs(['w1'], bert.tokenizer, QUERY, 30)[0][0].ids
    assert bert.tokenizer.tokens(ids) == ['[CLS]', '[Q] ', 'w1', '[SEP]', *['[MASK]'] * 10]
  conversion.convert(str(folder), str(tmp_path / 'back'), 'sentence_transformers')
  for a, b in zip(theirs(tmp_path / 'back')[0], expected):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-5)


def test_predict_gives_vectors_and_rankings(tmp_path, encoders, monkeypatch):
  folder = make(tmp_path / 'a', encoders['Bert'], 128)
  lines = [*({'text': text} for text in QUERIES), {'query': 'w1 w2', 'documents': DOCUMENTS},
           {'text': 'w1', 'documents': 'w1'}]
  answers = {}
  for prompt in ('', 'passage'):
    with pytest.raises(UserError) as error:
      predictions.run('late_interaction', folder, None, None, predictions.Options(prompt=prompt))
    assert str(error.value) == (
        f'--prompt={prompt} has no effect here: --prompt=query gives query vectors, '
        '--prompt=document gives document vectors')
  for prompt in (None, 'query'):
    sent = ''.join(json.dumps(line) + '\n' for line in lines[:-1 if prompt else None]).encode()
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(sent)))
    output = tmp_path / f'{prompt}.jsonl'
    options = predictions.Options(prompt=prompt)
    if prompt:
      predictions.run('late_interaction', folder, None, str(output), options)
    else:
      with pytest.raises(Failed, match='1 of 6 examples could not be answered'):
        predictions.run('late_interaction', folder, None, str(output), options)
    answers[prompt] = [json.loads(line) for line in output.read_text().splitlines()]
  assert answers[None][5]['error'].endswith("line 6: 'documents' must be a list of texts")
  (queries, documents), scores = theirs(folder)
  for answer, expected in zip(answers['query'], queries):
    np.testing.assert_allclose(answer['vectors'], expected, atol=1e-5)
  for answer, expected in zip(answers[None], documents[:4]):
    np.testing.assert_allclose(answer['vectors'], expected, atol=1e-5)
  for prompt in (None, 'query'):
    ranking = answers[prompt][4]['ranking']
    np.testing.assert_allclose([x['score'] for x in ranking], np.sort(scores[0])[::-1], rtol=1e-5)
    assert sorted(x['document'] for x in ranking) == [*range(len(DOCUMENTS))]
    for x in ranking:
      assert x['score'] == pytest.approx(scores[0, x['document']], rel=1e-5)


def test_search_ranks_by_max_sim(tmp_path, encoders):
  folder = make(tmp_path / 'a', encoders['Bert'], 128)
  bert = bert_jax.from_pretrained(folder)
  scores = theirs(folder)[1]
  for hits, expected in zip(bert.search(QUERIES, DOCUMENTS, top_k=3), scores):
    assert [x['document'] for x in hits] == np.argsort(-expected, kind='stable')[:3].tolist()
  with pytest.raises(UserError, match='this model has a vector for each token'):
    bert.embed(QUERIES)


def test_mistakes(tmp_path, encoders):
  folder = make(tmp_path / 'a', encoders['Bert'], 128)

  def refused(message, change):
    before = {path: path.read_text() for path in (tmp_path / 'a').rglob('*.json')}
    change()
    with pytest.raises(UserError, match=message):
      bert_jax.from_pretrained(folder)
    for path, content in before.items():
      path.write_text(content)

  def setting(file, **fields):
    path = tmp_path / 'a' / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

  refused('1_Dense is not a linear Dense of the tokens',
          lambda: setting('1_Dense/config.json', activation_function='torch.nn.Tanh'))
  refused('1_Dense: its residual must turn vectors of 128 into vectors of 16',
          lambda: setting('1_Dense/config.json', use_residual=True))
  refused("query_expansion='other' is unknown: use none, fixed, min",
          lambda: setting('sentence_bert_config.json',
                          query_expansion={'strategy': 'other', 'length': 8}))
  refused('it must have a length, and no token', lambda: setting('sentence_bert_config.json',
                                                query_expansion={'strategy': 'fixed'}))
  refused('bert_jax expands with .MASK.', lambda: setting(
      'sentence_bert_config.json',
      query_expansion={'strategy': 'fixed', 'token': 'w1', 'length': 8}))
  modules = json.loads((tmp_path / 'a/modules.json').read_text())
  pooled = [*modules, {'idx': 4, 'name': '4', 'path': '', 'type': (
      f'{HierarchicalTokenPooling.__module__}.HierarchicalTokenPooling')}]
  refused('the module .*HierarchicalTokenPooling is unknown in place 4',
          lambda: (tmp_path / 'a/modules.json').write_text(json.dumps(pooled)))
  refused('the module Dense needs a Pooling before it, or the model_type MultiVectorEncoder',
          lambda: setting('config_sentence_transformers.json', model_type=None))
  for to, message in (('huggingface', 'has the heads pooler, projection'),
                      ('onnx', '--to=onnx is not for late_interaction')):
    with pytest.raises(UserError, match=message):
      conversion.convert(folder, str(tmp_path / to), to)
