"""RoBERTa folders equal transformers' PyTorch classes, and survive round trips."""

import pathlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
import torch
import transformers

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers import training
from bert_jax.errors import UserError
from bert_jax.interop import families, huggingface, layout, verify
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import BertForPreTraining
from bert_jax.tasks import answers, sequence_classification
from tests import conftest

TEXTS = [s for d in conftest.make_documents(30) for s in d]


def make(architecture: str, folder: pathlib.Path, layers=2, width=128, **fields):
  """A random model in evaluation mode, saved with a vocabulary; biases and norms away from 0."""
  tokenizer = training.train('bpe', lambda: TEXTS, 320, False)
  torch.manual_seed(0)
  model = getattr(transformers, architecture)(transformers.RobertaConfig(
      vocab_size=tokenizer.vocab_size, num_hidden_layers=layers, hidden_size=width,
      num_attention_heads=2, intermediate_size=4 * width, max_position_embeddings=66,
      type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0, eos_token_id=2,
      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **fields)).eval()
  with torch.no_grad():
    for name, tensor in model.named_parameters():
      if name.endswith('bias') or 'ayer' in name:
        tensor.add_(0.05 * torch.randn(tensor.shape))
  model.save_pretrained(str(folder))
  tokenizer.save(epath.Path(folder))
  return model


def inputs(batch):
  return {'input_ids': torch.tensor(batch.ids, dtype=torch.long),
          'attention_mask': torch.tensor(batch.text_ids, dtype=torch.long)}


def close(ours, theirs, tolerance=5e-5):
  worst = np.max(np.abs(np.asarray(ours) - theirs.detach().numpy()))
  assert worst <= tolerance, worst


# The head has gelu, whatever hidden_act says.
@pytest.mark.parametrize('layers, width, hidden_act', [(2, 128, 'gelu'), (4, 256, 'relu')])
def test_masked_lm(tmp_path, layers, width, hidden_act):
  theirs = make('RobertaForMaskedLM', tmp_path, layers, width, hidden_act=hidden_act)
  model = huggingface.load(epath.Path(tmp_path))
  c = model.config
  assert c.max_positions == 64 and c.type_vocab_size == 1 and c.layer_norm_eps == 1e-5
  batch = verify.sample(model, 3, 64)  # to the last position
  real = batch.text_ids > 0
  labels = np.where(real & (batch.ids % 3 == 0), batch.ids, -100)

  def loss(params):
    hidden = Encoder(c).apply({'params': params['params']['bert']}, batch, method='encode')
    logits = BertForPreTraining(c).apply(params, hidden, batch.positions, method='mlm_logits')
    logits = logits[..., :c.vocab_size]
    of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(labels, 0)[..., None], -1)
    return -jnp.sum(of_label[..., 0] * (labels >= 0)) / np.sum(labels >= 0), (hidden, logits)

  (ours, (hidden, logits)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
  results = theirs(**inputs(batch), labels=torch.tensor(labels, dtype=torch.long),
                   output_hidden_states=True)
  close(np.asarray(hidden)[real], results.hidden_states[-1][torch.tensor(real)])
  close(np.asarray(logits)[real], results.logits[torch.tensor(real)])
  assert abs(float(ours) - results.loss.item()) < 1e-5
  results.loss.backward()
  expected = {families.ROBERTA.canonical(name): x.grad.numpy()
              for name, x in theirs.named_parameters()}
  position = 'embeddings.position_embeddings.weight'
  expected[position] = expected[position][2:]
  gradients = layout.to_tensors(gradient, c)
  assert gradients.keys() == expected.keys()
  whole = np.sqrt(sum(np.sum(np.square(x)) for x in expected.values()))
  for name, x in expected.items():
    limit = 1e-3 * max(np.linalg.norm(x), whole / 1000)
    assert np.linalg.norm(gradients[name] - x) <= limit, name


def test_the_classifier_equals_transformers(tmp_path):
  theirs = make('RobertaForSequenceClassification', tmp_path, num_labels=3)
  model = huggingface.load(epath.Path(tmp_path))
  assert model.task == 'sequence_classification' and len(model.labels) == 3
  batch = verify.sample(model, 3, 40)
  head = sequence_classification.BertForSequenceClassification(model.config, 3)
  logits = jax.jit(head.apply)(model.params, batch, np.zeros((3, 1), np.int32))
  close(np.asarray(logits)[:, 0], theirs(**inputs(batch)).logits)


@pytest.mark.parametrize('architecture', list(families.ROBERTA.architectures))
def test_every_architecture_survives_a_round_trip(tmp_path, architecture):
  make(architecture, tmp_path / 'a')
  huggingface.save(huggingface.load(epath.Path(tmp_path / 'a')), epath.Path(tmp_path / 'b'))
  a, b = (load_file(str(tmp_path / d / 'model.safetensors')) for d in 'ab')
  for tensors in (a, b):  # the two rows that no position uses
    name = next(name for name in tensors if 'position_embeddings' in name)
    tensors[name] = tensors[name][2:]
  assert a.keys() == b.keys()
  assert all(a[name].tobytes() == b[name].tobytes() for name in a)
  again, loading = getattr(transformers, architecture).from_pretrained(
      str(tmp_path / 'b'), output_loading_info=True)
  assert not loading['missing_keys'] and again.config.max_position_embeddings == 66
  assert transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'b'))('a').input_ids[0] == 0


def test_exports_are_verified(tmp_path):
  make('RobertaForMaskedLM', tmp_path / 'a')
  model = huggingface.load(epath.Path(tmp_path / 'a'))
  huggingface.save(model, epath.Path(tmp_path / 'b'))
  again = huggingface.load(epath.Path(tmp_path / 'b'))
  results = dict(verify.compare(model, again, epath.Path(tmp_path / 'b')))
  assert any('PyTorch' in what + value for what, value in results.items()), results


def test_pairs_have_two_separators(tmp_path):
  make('RobertaModel', tmp_path)
  model = huggingface.load(epath.Path(tmp_path))
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
  first, second = model.tokenizer.encode_batch(['The old king', 'a dog'])
  row = inputs_lib.join(model.tokenizer, first, second)
  assert row.ids == theirs('The old king', 'a dog').input_ids
  assert len(row.ids) - len(first) - len(second) == inputs_lib.count_special(model.tokenizer, 2)
  (context,) = answers.read([('a dog', 'The old king')], model.tokenizer, 32, 8)
  (window,) = context.windows
  assert window.input.ids[window.offset:window.offset + window.count] == first


def test_a_wrong_pad_token_id_is_refused(tmp_path):
  make('RobertaModel', tmp_path)
  path = tmp_path / 'config.json'
  path.write_text(path.read_text().replace('"pad_token_id": 1', '"pad_token_id": null'))
  with pytest.raises(UserError, match='pad_token_id=None'):
    huggingface.load(epath.Path(tmp_path))
