"""XLM-R, CamemBERT and MPNet equal transformers' PyTorch classes, and survive round trips."""

import dataclasses
import json
import pathlib

from etils import epath
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
import torch
import transformers

import bert_jax
from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import base as tokenizer_base
from bert_jax.data.tokenizers import reader as tokenizer_reader
from bert_jax.errors import UserError
from bert_jax.interop import conversion, families, huggingface, layout, verify
from bert_jax.interop import load as load_lib
from bert_jax.model import attention_kernels, mpnet
from bert_jax.tasks import sequence_classification
from tests.data import test_fairseq
from tests.interop import torch_bert
from tests.interop.test_family import close, cross_entropy, outputs
from tests.interop.test_huggingface import assert_same
from tests.interop.test_roberta import inputs

MODELS = {'XLMRoberta': 'xlm-roberta', 'Camembert': 'camembert', 'MPNet': 'mpnet'}
# The others differ from these only in names, which the tests of RoBERTa check.
_QUICK = ('MPNetForMaskedLM', 'MPNetForSequenceClassification', 'CamembertForMaskedLM')
_MPNET_FIRST = ['<s>', '<pad>', '</s>', '<unk>', '[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']


def write_tokenizer(title: str, folder: pathlib.Path):
  if title != 'MPNet':
    test_fairseq.train(folder, f'{title}Tokenizer')
    return
  letters = [*'abcdefghijklmnopqrstuvwxyz0123456789.,!<>/[]', '##a', '##b', '猫', 'мир', 'cafe']
  words = [f'w{i}' for i in range(150)]
  (folder / 'vocab.txt').write_text('\n'.join([*_MPNET_FIRST, *letters, *words, '<mask>']) + '\n')


def make(architecture: str, folder: pathlib.Path, layers=2, width=64, unused=0, **fields):
  """A random model in evaluation mode, saved with its tokenizer; biases and norms away from 0."""
  title = next(name for name in MODELS if architecture.startswith(name))
  folder.mkdir(exist_ok=True)
  write_tokenizer(title, folder)
  config = getattr(transformers, f'{title}Config')(
      vocab_size=tokenizer_reader.load(folder).vocab_size + unused, num_hidden_layers=layers,
      hidden_size=width, num_attention_heads=4, intermediate_size=3 * width,
      max_position_embeddings=164, layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
      attention_probs_dropout_prob=0.0,
      **({} if title == 'MPNet' else {'type_vocab_size': 1}), **fields)
  torch.manual_seed(0)
  model = getattr(transformers, architecture)(config).eval()
  with torch.no_grad():
    for name, tensor in model.named_parameters():
      if name.endswith('bias') or 'norm' in name.lower():
        tensor.add_(0.05 * torch.randn(tensor.shape))
      if 'relative_attention_bias' in name:
        tensor.normal_(0, 0.5)
  model.save_pretrained(str(folder))
  return model


@pytest.mark.parametrize('title', MODELS)
@pytest.mark.parametrize('layers, width', [
    (2, 64), pytest.param(4, 128, marks=pytest.mark.slow)])
def test_hidden_states_logits_losses_and_gradients(tmp_path, title, layers, width):
  theirs = make(f'{title}ForMaskedLM', tmp_path, layers, width)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.config.architecture == MODELS[title] and model.config.max_positions == 162
  batch = verify.sample(model, 3, 162)  # to the last position, and beyond the farthest bucket
  real = batch.text_ids > 0
  labels = np.where(real & (batch.ids % 3 == 0), batch.ids, -100)

  def loss(params):
    hidden, logits = outputs(params, model.config, batch)
    predicted = labels >= 0
    return cross_entropy(logits['mlm'][predicted], labels[predicted]), (hidden, logits['mlm'])

  (ours, (hidden, logits)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
  results = theirs(**inputs(batch), labels=torch.tensor(labels, dtype=torch.long),
                   output_hidden_states=True)
  close(np.asarray(hidden)[real], results.hidden_states[-1][torch.tensor(real)])
  close(np.asarray(logits)[real], results.logits[torch.tensor(real)])
  assert abs(float(ours) - results.loss.item()) < 2e-5
  results.loss.backward()
  family = families.ALL[MODELS[title]]
  expected = {family.canonical(name): x.grad.numpy() for name, x in theirs.named_parameters()
              if x.grad is not None}
  if title != 'MPNet':  # PyTorch names a tied tensor by the module that it meets first
    expected['embeddings.word_embeddings.weight'] = expected.pop('cls.predictions.decoder.weight')
  position = 'embeddings.position_embeddings.weight'
  expected[position] = expected[position][2:]
  gradients = layout.to_tensors(gradient, model.config)
  assert gradients.keys() == expected.keys()
  whole = np.sqrt(sum(np.sum(np.square(x)) for x in expected.values()))
  for name, x in expected.items():
    limit = 1e-3 * max(np.linalg.norm(x), whole / 1000)
    assert np.linalg.norm(gradients[name] - x) <= limit, name


@pytest.mark.parametrize('title', MODELS)
def test_classifiers(tmp_path, title):
  theirs = make(f'{title}ForSequenceClassification', tmp_path, num_labels=3)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.task == 'sequence_classification' and len(model.labels) == 3
  batch = verify.sample(model, 3, 40)
  head = sequence_classification.BertForSequenceClassification(model.config, 3)
  logits = jax.jit(head.apply)(model.params, batch, np.zeros((3, 1), np.int32))
  close(np.asarray(logits)[:, 0], theirs(**inputs(batch)).logits)


@pytest.mark.parametrize('architecture', [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
    for model_type in MODELS.values() for name in families.ALL[model_type].architectures])
def test_every_architecture_survives_a_round_trip(tmp_path, architecture):
  make(architecture, tmp_path / 'a')
  conversion.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'huggingface')  # compares with torch
  a, b = (load_file(str(tmp_path / d / 'model.safetensors')) for d in 'ab')
  for tensors in (a, b):  # the two rows that no position uses
    name = next(name for name in tensors if 'position_embeddings' in name)
    tensors[name] = tensors[name][2:]
  assert a.keys() == b.keys()
  assert all(a[name].tobytes() == b[name].tobytes() for name in a)
  again, loading = getattr(transformers, architecture).from_pretrained(
      str(tmp_path / 'b'), output_loading_info=True)
  assert not loading['missing_keys'] and not loading['unexpected_keys']
  assert again.config.max_position_embeddings == 164
  # The exported tokenizer and model fit: no token type that the model lacks.
  tokens = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'b'))
  if not architecture.endswith('MultipleChoice'):
    again(**tokens('the quick', 'brown fox', return_tensors='pt'))


def test_a_table_with_more_rows_than_the_vocabulary(tmp_path):
  theirs = make('XLMRobertaForMaskedLM', tmp_path / 'a', unused=35)  # as multilingual E5 has
  bert = bert_jax.from_pretrained(tmp_path / 'a')
  plain = json.loads((tmp_path / 'a/config.json').read_text())['vocab_size'] - 35
  assert bert.tokenizer.vocab[plain:] == [f'[unused{i}]' for i in range(plain, plain + 35)]
  text = f'one [unused{plain}] two'  # an entry that a user wrote is text
  assert max(bert.row(text).ids) < plain
  tokens = torch.tensor([bert.row(text).ids])
  with torch.no_grad():
    hidden = theirs(tokens, output_hidden_states=True).hidden_states[-1].numpy()
  np.testing.assert_allclose(bert.encode([text]).hidden, hidden, atol=1e-5)
  huggingface.save(bert.model, epath.Path(tmp_path / 'b'))
  again = huggingface.load(epath.Path(tmp_path / 'b'))
  assert_same(again, bert.model)
  assert again.tokenizer.vocab == bert.tokenizer.vocab
  exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'b'))
  assert len(exported) == plain == bert.tokenizer.entries  # the entries that were read


@pytest.mark.parametrize('title', MODELS)
def test_a_pickle_gives_the_same_model(tmp_path, title):
  theirs = make(f'{title}ForMaskedLM', tmp_path)
  expected = load_lib.load(str(tmp_path))
  (tmp_path / 'model.safetensors').unlink()
  torch.save(theirs.state_dict(), tmp_path / 'pytorch_model.bin')
  assert_same(load_lib.load(str(tmp_path)), expected)


def test_ids_of_mpnet(tmp_path):
  write_tokenizer('MPNet', tmp_path)
  theirs = transformers.MPNetTokenizer.from_pretrained(str(tmp_path))
  ours = tokenizer_reader.load(tmp_path)
  assert (ours.cls_id, ours.pad_id, ours.sep_id, ours.unk_id, ours.mask_id) == (
      0, 1, 2, 5, ours.vocab_size - 1)
  for text in test_fairseq.HOSTILE:
    if '[UNK]' not in text:
      assert ours.encode_batch([text])[0] == theirs(text, add_special_tokens=False).input_ids, text
  special = set(tokenizer_base.special_ids(ours)) - {ours.unk_id}
  assert not special & set(ours.encode_batch(['</s><s> a <mask>'])[0])
  assert ours.encode_with_masks('a [MASK] b') == theirs(
      'a <mask> b', add_special_tokens=False).input_ids
  ours.save(epath.Path(tmp_path / 'again'))
  saved = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'again'))
  assert type(saved).__name__ == 'MPNetTokenizer'
  first, second = ours.encode_batch(['w1 w2', 'a b'])
  assert (inputs_lib.join(ours, first, second).ids == theirs('w1 w2', 'a b').input_ids
          == saved('w1 w2', 'a b').input_ids)


def test_position_buckets_equal_transformers():
  at = torch.arange(1100)
  theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(
      at[None, :] - at[:, None])
  behind = at[:, None] - at[None, :]
  np.testing.assert_array_equal(mpnet.buckets(1100)[behind + 1099], theirs.numpy())
  # By hand: 8 single distances, then ranges up to 128; keys after the query are in the second half.
  rows = mpnet.buckets(200)
  assert [rows[199 - i] for i in (0, 1, 7, 8, 16, 128, 199)] == [0, 17, 23, 24, 26, 31, 31]
  assert [rows[199 + i] for i in (1, 8, 199)] == [1, 8, 15]


def test_mpnet_gives_packed_texts_the_vectors_of_single_texts(tmp_path):
  make('MPNetModel', tmp_path)
  bert = bert_jax.from_pretrained(str(tmp_path))
  texts = ['w1 w2 w3', 'w4', 'w5 a b c d e f w6 w7']
  together = bert.embed(texts, 'mean')
  alone = np.concatenate([bert.embed([text], 'mean') for text in texts])
  np.testing.assert_allclose(together, alone, atol=2e-6)
  theirs = transformers.MPNetModel.from_pretrained(str(tmp_path))
  tokens = transformers.MPNetTokenizer.from_pretrained(str(tmp_path))(texts[2], return_tensors='pt')
  with torch.no_grad():
    hidden = theirs(**tokens).last_hidden_state[0].mean(0).numpy()
  np.testing.assert_allclose(together[2], hidden, atol=5e-6)


def test_mpnet_uses_no_attention_kernel():
  config = mpnet.MPNetConfig(attention_dropout=0.0, dtype='bfloat16')
  for platform in ('tpu', 'gpu', 'cpu'):
    path, reason = attention_kernels.choose_path(config, 512, platform)
    assert path == 'xla'
    assert reason == ('no kernel supports cpu' if platform == 'cpu' else
                      'no kernel adds the biases of mpnet')
  with pytest.raises(
      UserError, match='attention=fused is not available: no kernel adds the biases'):
    attention_kernels.choose_path(mpnet.MPNetConfig(attention='fused'), 512, 'tpu')


def test_mpnets_that_transformers_cannot_hold_are_refused(tmp_path):
  make('MPNetModel', tmp_path)
  model = huggingface.load(epath.Path(tmp_path))
  (tmp_path / 'bert').mkdir()
  torch_bert.write_vocab(tmp_path / 'bert', model.config.vocab_size)  # its [PAD] has id 0
  other = dataclasses.replace(model, tokenizer=tokenizer_reader.load(tmp_path / 'bert'))
  with pytest.raises(UserError, match='pad_token_id=0: transformers. MPNet counts positions from'):
    huggingface.save(other, epath.Path(tmp_path / 'out'))
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'relative_attention_num_buckets': 16}))
  with pytest.raises(UserError, match='relative_attention_num_buckets=16 is not what MPNet has'):
    huggingface.load(epath.Path(tmp_path))
