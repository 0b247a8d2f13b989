"""ELECTRA's objective: equal losses in PyTorch, the drawn tokens, the paths of gradients."""

import dataclasses

from etils import epath
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from bert_jax.data.rows import Rows
from bert_jax.errors import UserError
from bert_jax.interop import huggingface
from bert_jax.model.electra import ElectraConfig
from bert_jax.model.heads import BertForPreTraining
from bert_jax.objectives import objectives, replaced_tokens
from bert_jax.objectives.masking import Masked
from bert_jax.objectives.objective import Keys
from bert_jax.objectives.replaced_tokens import ReplacedTokens
from tests.interop import torch_bert

CONFIG = ElectraConfig(vocab_size=300, hidden_size=64, num_layers=2, num_heads=4,
                       intermediate_size=128, max_positions=32, embedding_size=32,
                       generator_size=0.25, dropout=0.0, attention_dropout=0.0)
KEYS = Keys(None, jax.random.key(5))


def make_example(vocab_size=300, rows=4, length=24):
  rng = np.random.default_rng(1)
  batch = torch_bert.make_batch(vocab_size, rows, length, padded=True)
  positions = np.stack([np.sort(rng.permutation(np.arange(1, 10))[:3]) for _ in range(rows)])
  weights = np.ones((rows, 3), np.float32)
  weights[1, 2] = 0
  weights *= np.take_along_axis(batch.text_ids, positions, 1)
  targets = np.take_along_axis(batch.ids, positions, 1)
  ids = batch.ids.copy()
  np.put_along_axis(ids, positions, np.where(weights > 0, 4, targets), 1)
  masked = Masked(ids, positions.astype(np.int32), targets, weights)
  one = np.zeros((rows, 1), np.int32)
  return Rows(batch._replace(ids=ids), one, one, one, np.arange(rows)), masked


def objective(config=CONFIG):
  return ReplacedTokens(BertForPreTraining(config))


def initial(objective):
  return nn.unbox(jax.jit(objective.init)(jax.random.key(0)))


def losses(objective, params, rows, masked):
  metrics = jax.jit(objective.loss)(params, {}, rows, masked, KEYS)
  return {name: float(total / count) for name, (total, count) in metrics.items()}


def test_losses_equal_pytorch(tmp_path, monkeypatch):
  sizes = dict(vocab_size=300, num_hidden_layers=2, embedding_size=32, max_position_embeddings=32,
               hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3)
  torch.manual_seed(0)
  discriminator = transformers.ElectraForPreTraining(transformers.ElectraConfig(
      **sizes, hidden_size=64, num_attention_heads=4, intermediate_size=128)).eval()
  generator = transformers.ElectraForMaskedLM(transformers.ElectraConfig(
      **sizes, hidden_size=16, num_attention_heads=1, intermediate_size=32)).eval()
  generator.electra.embeddings = discriminator.electra.embeddings
  generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
  loaded = []
  for name, model in (('d', discriminator), ('g', generator)):
    model.save_pretrained(str(tmp_path / name))
    torch_bert.write_vocab(tmp_path / name, 300)
    loaded.append(huggingface.load(epath.Path(tmp_path / name)))
  rows, masked = make_example()
  rng = np.random.default_rng(2)
  drawn = np.where(rng.random((4, 3)) < 0.5, masked.targets, rng.integers(5, 300, (4, 3)))
  monkeypatch.setattr(replaced_tokens, 'sample', lambda *_: jnp.asarray(drawn, jnp.int32))
  generators = dict(loaded[1].params['params'])
  generators['bert'] = {n: x for n, x in generators['bert'].items() if n != 'embeddings'}
  params = {'params': {**loaded[0].params['params'], 'generator': generators}}
  config = dataclasses.replace(loaded[0].config, generator_size=0.25)
  metrics = losses(objective(config), params, rows, masked)

  batch = rows.tokens
  labels = np.full(batch.ids.shape, -100)
  ids, replaced = batch.ids.copy(), np.zeros(batch.ids.shape)
  for row, slot in zip(*np.nonzero(masked.weights)):
    at = masked.positions[row, slot]
    labels[row, at], ids[row, at] = masked.targets[row, slot], drawn[row, slot]
    replaced[row, at] = drawn[row, slot] != masked.targets[row, slot]
  tensors = torch_bert.inputs(batch)
  mlm = generator(**tensors, labels=torch.tensor(labels)).loss.item()
  rtd = discriminator(**(tensors | {'input_ids': torch.tensor(ids, dtype=torch.long)}),
                      labels=torch.tensor(replaced, dtype=torch.float)).loss.item()
  assert abs(metrics['mlm_loss'] - mlm) < 2e-5 and abs(metrics['rtd_loss'] - rtd) < 2e-5
  assert abs(metrics['rtd_replaced'] - replaced.sum() / batch.text_ids.sum()) < 1e-6
  assert objective().loss_weights == {'mlm_loss': 1.0, 'rtd_loss': 50.0}


def test_draws_follow_the_generator_and_the_row_numbers():
  logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
  rows = jnp.arange(4000)
  drawn = replaced_tokens.sample(jax.random.key(0), jnp.tile(logits, (4000, 1, 1)), rows)[:, 0]
  share = np.bincount(drawn, minlength=3) / 4000
  expected = np.array([0.1, 0.2, 0.7])
  assert np.all(np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000))
  again = replaced_tokens.sample(jax.random.key(0), jnp.tile(logits, (3, 1, 1)), rows[7:10])
  assert np.array_equal(again[:, 0], drawn[7:10])


def test_a_correct_generator_replaces_nothing(monkeypatch):
  rows, masked = make_example()
  monkeypatch.setattr(replaced_tokens, 'sample', lambda *_: jnp.asarray(masked.targets))
  metrics = losses(objective(), initial(objective()), rows, masked)
  assert metrics['rtd_replaced'] == 0
  assert abs(metrics['rtd_loss'] - np.log(2)) < 0.1  # untrained, its scores are near 0


@pytest.mark.medium
def test_only_the_masked_lm_trains_the_generator():
  params = initial(objective())
  for name, trained in (('rtd_loss', ('bert', 'rtd')), ('mlm_loss', ('generator',))):
    grads = jax.jit(jax.grad(lambda p, name=name: objective().loss(
        p, {}, *make_example(), KEYS)[name][0]))(params)['params']
    norms = {part: sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))
             for part, tree in grads.items()}
    embeddings = sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(grads['bert']['embeddings']))
    assert embeddings > 0  # shared
    assert all(norms[part] > 0 for part in trained)
    if name == 'rtd_loss':
      assert norms['generator'] == 0
    else:
      assert norms['rtd'] == 0 and abs(norms['bert'] - embeddings) < 1e-6 * embeddings


@pytest.mark.parametrize('embedding_size', [32, 64])
def test_parameters_are_counted_without_padding_and_pooler(embedding_size):
  electra = objective(dataclasses.replace(CONFIG, embedding_size=embedding_size))
  params = initial(electra)
  stored = sum(x.size for x in jax.tree.leaves(params))
  stored -= 64 * 64 + 64 if 'pooler' in params['params']['bert'] else 0
  padding = (CONFIG.padded_vocab_size - 300) * (embedding_size + 1)
  assert stored - padding == electra.num_parameters()
  exported = electra.exported(params)['params']
  assert set(exported) == {'bert', 'rtd'}


@pytest.mark.parametrize('arguments, message', [
    (('mlm_nsp', 'full_sentences', 'bert'), 'it needs data.sequences=next_sentence'),
    (('mlm_sop', 'full_sentences', 'bert'), 'it needs data.sequences=sentence_order'),
    (('mlm_sop', 'next_sentence', 'albert'), 'it needs data.sequences=sentence_order'),
    (('replaced_tokens', 'full_sentences', 'bert'), 'not for model.architecture=bert'),
    (('mlm', 'full_sentences', 'electra'), 'not for model.architecture=electra'),
    (('rtd', 'full_sentences', 'electra'), 'unknown: use')])
def test_impossible_objectives_are_refused(arguments, message):
  with pytest.raises(UserError, match=message):
    objectives.name_of(*arguments)


def test_wrong_sizes_of_the_generator_are_refused():
  with pytest.raises(UserError, match='not larger than its discriminator'):
    dataclasses.replace(CONFIG, generator_size=1.5)
  with pytest.raises(UserError, match='is not a whole number of heads'):
    objectives.create('', 'full_sentences', dataclasses.replace(CONFIG, generator_size=0.3))
