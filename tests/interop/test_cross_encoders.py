"""Folders of a CrossEncoder: activation and prompts, read, used and written."""

import json
import pathlib

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
import torch

import bert_jax
from bert_jax.errors import UserError
from bert_jax.inference import predictions
from bert_jax.interop import conversion
from bert_jax.interop import load as load_lib
from bert_jax.runtime import console
from bert_jax.tasks import reranking, sequence_classification
from tests.interop import torch_bert

PAIRS = [('w1 w2', 'w3'), ('Query W4', 'w5 find.'), ('w6', ' '.join(f'w{i}' for i in range(9)))]
IDENTITY = 'torch.nn.modules.linear.Identity'


@pytest.fixture(scope='module')
def classifier(tmp_path_factory):
  """A classifier with one output, whose logits are far from 0."""
  folder = tmp_path_factory.mktemp('classifier')
  model = torch_bert.make('BertForSequenceClassification', folder, num_labels=1)
  with torch.no_grad():
    model.classifier.bias.fill_(2.9)
    model.classifier.weight.mul_(20)
  model.save_pretrained(str(folder))
  return folder


def copied(classifier, folder, **fields) -> str:
  """The classifier with further fields of config.json, as the hub has it."""
  folder.mkdir()
  for path in classifier.iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  config = json.loads((folder / 'config.json').read_text()) | fields
  (folder / 'config.json').write_text(json.dumps(config))
  return str(folder)


def saved(classifier, folder, **options) -> str:
  """The classifier as the package saves it."""
  CrossEncoder(str(classifier), device='cpu', **options).save(
      str(folder), create_model_card=False)
  return str(folder)


def theirs(folder, **options) -> np.ndarray:
  return CrossEncoder(str(folder), device='cpu').predict(PAIRS, **options)


def ours(folder, prompt=None) -> np.ndarray:
  """The scores of `predict --task=reranking`, in the order of the pairs."""
  bert = bert_jax.from_pretrained(str(folder))
  answers = reranking.rank(bert, [(query, [document]) for query, document in PAIRS], prompt)
  return np.array([answer['ranking'][0]['score'] for answer in answers])


FOLDERS = {
    'new key': lambda c, d: copied(c, d, sentence_transformers={
        'activation_fn': IDENTITY, 'version': '4.1.0'}),
    'old key': lambda c, d: copied(c, d, sbert_ce_default_activation_function=IDENTITY),
    'both keys': lambda c, d: copied(
        c, d, sbert_ce_default_activation_function=IDENTITY,
        sentence_transformers={'activation_fn': 'torch.nn.modules.activation.Tanh'}),
    'no key': copied,
    'saved': lambda c, d: saved(c, d, activation_fn=torch.nn.Identity()),
    'prompts': lambda c, d: saved(
        c, d, activation_fn=torch.nn.Softplus(), prompts={'query': 'w7 find: ', 'task': 'w9 '},
        default_prompt_name='query', max_length=12),
    'softsign is kept by name': lambda c, d: saved(c, d, activation_fn=torch.nn.Softsign())}


@pytest.mark.parametrize('settings, segments', [
    ({}, 2),
    ({'model_input_names': ['input_ids', 'attention_mask']}, 1),
    ({'model_input_names': ['input_ids', 'token_type_ids', 'attention_mask']}, 2),
    ({'tokenizer_class': 'DistilBertTokenizer'}, 1)])
def test_the_tokenizer_decides_on_the_segments_of_a_pair(tmp_path, classifier, settings, segments):
  folder = pathlib.Path(copied(classifier, tmp_path / 'theirs'))
  path = folder / 'tokenizer_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | settings))
  expected = theirs(folder)
  assert bert_jax.from_pretrained(str(folder)).model.config.type_vocab_size == segments
  np.testing.assert_allclose(ours(folder), expected, atol=2e-5)
  conversion.convert(str(folder), str(tmp_path / 'out'), 'huggingface')
  np.testing.assert_allclose(theirs(tmp_path / 'out'), expected, atol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize('name', FOLDERS)
def test_a_folder_keeps_its_scores_through_both_exports(tmp_path, classifier, name):
  folder = FOLDERS[name](classifier, tmp_path / 'theirs')
  expected = theirs(folder)
  for to in ('huggingface', 'sentence_transformers'):
    if to == 'huggingface' or name in ('old key', 'prompts'):
      conversion.convert(folder, str(tmp_path / to), to)
      np.testing.assert_allclose(theirs(tmp_path / to), expected, atol=2e-5)
      load_lib.load(str(tmp_path / to))
  if 'softsign' in name:
    with pytest.raises(UserError, match='Softsign of this model is unknown: expected one of Id'):
      ours(folder)
    return
  np.testing.assert_allclose(ours(folder), expected, atol=2e-5)
  if name in ('new key', 'old key', 'saved'):
    assert expected.max() > 2  # no sigmoid
  if name == 'prompts':
    assert np.abs(theirs(folder, prompt='') - expected).max() > 1e-3
    np.testing.assert_allclose(ours(folder, ''), theirs(folder, prompt=''), atol=2e-5)
    np.testing.assert_allclose(ours(folder, 'task'), theirs(folder, prompt_name='task'), atol=2e-5)
    kept = json.loads((tmp_path / 'huggingface/config_sentence_transformers.json').read_text())
    assert kept['prompts'] == {'query': 'w7 find: ', 'task': 'w9 '}
    assert load_lib.load(folder).facts['max_len'] == 12


def test_the_bert_jax_format_keeps_the_scores(tmp_path, classifier):
  folder = FOLDERS['prompts'](classifier, tmp_path / 'theirs')
  conversion.convert(folder, str(tmp_path / 'ours'), 'bert_jax')
  conversion.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), theirs(folder), atol=2e-5)


def test_several_outputs_are_logits_with_the_default_prompt(tmp_path):
  torch_bert.make('BertForSequenceClassification', tmp_path / 'a', num_labels=3)
  folder = saved(tmp_path / 'a', tmp_path / 'theirs', prompts={'x': 'w7 '}, default_prompt_name='x')
  expected = theirs(folder)
  bert = bert_jax.from_pretrained(folder)
  np.testing.assert_allclose(sequence_classification.class_logits(bert, PAIRS), expected, atol=2e-5)
  answers = sequence_classification.classify(bert, PAIRS)
  softmax = theirs(folder, apply_softmax=True)
  np.testing.assert_allclose([[*a['probabilities'].values()] for a in answers], softmax, atol=2e-5)
  conversion.convert(folder, str(tmp_path / 'back'), 'sentence_transformers')
  np.testing.assert_allclose(theirs(tmp_path / 'back'), expected, atol=2e-5)


@pytest.mark.parametrize('where', ['config.json', 'config_sentence_transformers.json'])
def test_code_in_a_folder_does_not_run_and_the_default_is_used(tmp_path, classifier, capsys, where):
  folder = saved(classifier, tmp_path / 'a')
  path = pathlib.Path(folder, where)
  change = {'activation_fn': 'os.abort'}
  change = {'sentence_transformers': change} if where == 'config.json' else change
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  if where == 'config.json':  # the other file comes first
    other = pathlib.Path(folder, 'config_sentence_transformers.json')
    settings = json.loads(other.read_text())
    del settings['activation_fn']
    other.write_text(json.dumps(settings))
  console.note.cache_clear()
  np.testing.assert_allclose(ours(folder), theirs(folder), atol=2e-5)
  assert 'the activation_fn os.abort is not a function of torch' in capsys.readouterr().err


def test_an_unknown_function_of_torch_is_refused_before_the_first_line(tmp_path, classifier):
  folder = saved(classifier, tmp_path / 'a')
  path = pathlib.Path(folder, 'config_sentence_transformers.json')
  path.write_text(json.dumps(json.loads(path.read_text()) | {
      'activation_fn': 'torch.nn.modules.activation.Hardshrink'}))
  lines = tmp_path / 'in.jsonl'
  lines.write_text('{"query": "w1", "documents": ["w2"]}\n')
  with pytest.raises(UserError, match='Hardshrink of this model is unknown: expected one of'):
    predictions.run('reranking', folder, str(lines), str(tmp_path / 'out.jsonl'))
  assert not (tmp_path / 'out.jsonl').exists()


def test_a_cross_encoder_without_a_classifier_is_refused(tmp_path, classifier):
  folder = saved(classifier, tmp_path / 'a')
  path = pathlib.Path(folder, 'config.json')
  path.write_text(json.dumps(json.loads(path.read_text()) | {'architectures': ['BertForX']}))
  with pytest.raises(UserError, match='is a cross-encoder, but its encoder has no classifier'):
    load_lib.load(folder)
