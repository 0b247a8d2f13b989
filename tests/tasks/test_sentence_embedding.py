"""Vectors of sentences: the loss by hand, training, mistakes."""

import dataclasses
import json
import pathlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from sentence_transformers.sentence_transformer import losses
import torch

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.interop import layout, pretrained, sentence_layout
from bert_jax.interop import load as load_lib
from bert_jax.labelled.packed_examples import Batch
from bert_jax.model import pooling
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.encoder import take_positions
from bert_jax.model.modern import ModernConfig
from bert_jax.parallel import mesh as mesh_lib
from bert_jax.runs import run
from bert_jax.tasks import finetuning_data
from bert_jax.tasks.sentence_embedding import (
  BertForSentenceEmbedding,
  EmbeddingFiles,
  SentenceEmbedding,
  unit,
)
from tests import made_tasks


def make_config(tmp_path, **overrides):
  c = config_lib.finetuning('sentence_embedding')
  c.update_from_flattened_dict({
      'init_from': made_tasks.model(tmp_path / 'model'), 'batch_size': 16, 'train_epochs': 8.0,
      'optimizer.learning_rate': 3e-3, 'model.scan_unroll': 1, 'eval_every': 1000,
      'data.train': made_tasks.pairs(tmp_path / 'train.jsonl', 150),
      'data.eval': made_tasks.pairs(tmp_path / 'eval.jsonl', 60, seed=1), **overrides})
  return c


def last(workdir):
  lines = [json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return next(line for line in reversed(lines) if 'eval_spearman' in line)


def test_a_new_pooling_needs_only_an_entry_in_poolings(tmp_path, monkeypatch):
  """An added pooling can be trained, saved with a model, loaded and used."""
  def second_token(hidden, texts):
    return take_positions(hidden, texts.starts + 1)

  monkeypatch.setitem(pooling.POOLINGS, 'second_token', second_token)
  c = make_config(tmp_path, **{'data.pooling': 'second_token'})
  EmbeddingFiles.check(c)
  bert = bert_jax.from_pretrained(c.init_from)
  texts = ['w1 good w2', 'bad w3']
  expected = np.stack([hidden[1] for hidden in bert.encode(texts).hidden])
  np.testing.assert_array_equal(bert.embed(texts, 'second_token'), expected)
  files = sentence_layout.SentenceLayout(('second_token',)).files(32)
  assert json.loads(files['1_Pooling/config.json'])['pooling_mode'] == ['second_token']
  (tmp_path / 'config.json').write_bytes(files['1_Pooling/config.json'])
  assert sentence_layout._read_pooling(tmp_path / 'config.json') == (('second_token',), True)
  with pytest.raises(UserError, match='lasttoken, second_token$'):
    EmbeddingFiles.check(make_config(tmp_path, **{'data.pooling': 'none'}))


def test_the_loss_by_hand():
  vectors = np.random.default_rng(0).normal(size=(4, 3, 8))
  vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
  members = np.arange(12).reshape(4, 3)
  members[1, 2] = -1  # no third text
  members[3] = -1  # the last batch of an epoch has fewer examples
  # Each text is compared with the second texts of all three examples and the third of two.
  others = np.concatenate([vectors[:3, 1], vectors[[0, 2], 2]])
  cosines = vectors[:3, 0] @ others.T / 0.05
  expected = -special.log_softmax(cosines, axis=1)[np.arange(3), np.arange(3)]
  task = SentenceEmbedding(None, temperature=0.05)
  metrics = task.metrics(jnp.asarray(vectors, jnp.float32),
                         Batch(None, None, members, None, None, None))
  np.testing.assert_allclose(metrics['loss'][0], expected.sum(), rtol=1e-5)
  assert metrics['loss'][1] == 3
  assert metrics['accuracy'][0] == np.sum(cosines.argmax(1) == np.arange(3))
  alike = jnp.ones((4, 3, 8), jnp.float32)  # collapsed: no text is nearer than the others
  metrics = task.metrics(alike, Batch(None, None, members, None, None, None))
  np.testing.assert_allclose(metrics['loss'][0] / 3, np.log(5), rtol=1e-5)
  assert metrics['accuracy'][0] == 0
  np.testing.assert_allclose(task.reduced(jnp.asarray(vectors))[:, 0],
                             np.sum(vectors[:, 0] * vectors[:, 1], -1), rtol=1e-5)


class _Vectors(torch.nn.Module):
  """Gives a batch of vectors for the features that hold it, as a SentenceTransformer would."""

  def forward(self, features):
    return {'sentence_embedding': features['vectors']}

  def get_embedding_dimension(self):
    return 16


def test_the_matryoshka_loss_and_its_gradient_equal_sentence_transformers():
  vectors = np.random.default_rng(0).normal(size=(5, 4, 16)).astype(np.float32)  # 2 contrary texts
  widths, weights = (16, 8, 3), (1.0, 0.5, 2.0)
  module = _Vectors()
  reference = losses.MatryoshkaLoss(
      module, losses.MultipleNegativesRankingLoss(module, scale=1 / 0.05), widths, weights)
  theirs = [torch.tensor(vectors[:, i], requires_grad=True) for i in range(4)]
  expected = reference([{'vectors': x} for x in theirs], None)
  expected.backward()
  task = SentenceEmbedding(None, temperature=0.05, matryoshka=tuple(zip(widths, weights)))
  batch = Batch(None, None, np.arange(20).reshape(5, 4), None, None, None)
  ours = jax.value_and_grad(lambda x: task.metrics(unit(x), batch)['loss'][0] / 5)(
      jnp.asarray(vectors))
  np.testing.assert_allclose(ours[0], expected.item(), rtol=1e-6)
  np.testing.assert_allclose(ours[1], np.stack([x.grad for x in theirs], 1), atol=1e-5)


@pytest.fixture(scope='module')
def embedder(tmp_path_factory):
  """A task on its parameters, and a batch of 16 examples in rows that 4 divides."""
  folder = tmp_path_factory.mktemp('embedder')
  c = make_config(folder, **{'data.cached_parts': 4, 'data.pooling': 'mean',
                             'data.negative_column': 'contrary,sentence2'})
  lines = [json.loads(x) for x in pathlib.Path(c.data.train).read_text().splitlines()]
  pathlib.Path(c.data.train).write_text(''.join(
      json.dumps({**line, 'sentence2': 'w3 w5'}) + '\n' for line in lines))
  model = load_lib.load(c.init_from)
  for name, value in vars(model.config).items():
    c.model[name] = value
  c.model.dropout = c.model.attention_dropout = 0.0
  data = finetuning_data.read(EmbeddingFiles, c, model.tokenizer, mesh_lib.make_mesh(**c.mesh))
  return data.task, nn.unbox(data.task.init(jax.random.key(0))), data.rows(0)


def test_several_contrary_texts_are_read(embedder):
  _, _, batch = embedder
  assert batch.members.shape == (16, 4)  # a text, its partner, two contrary ones
  assert batch.members.min() >= 0


@pytest.mark.medium
def test_cached_gradients_equal_plain_gradients_in_less_memory(embedder):
  task, params, batch = embedder
  assert task.cached_parts == 4 and len(batch.row) % 4 == 0

  def step(task):
    def loss(params):
      return task.loss(params, {}, batch, jax.random.key(1))['loss'][0] / 16
    return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

  cached, plain = (step(dataclasses.replace(task, cached_parts=n)) for n in (4, 1))
  ours, theirs = cached(params), plain(params)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
  scale = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(theirs[1])))
  for x, y in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1])):
    np.testing.assert_allclose(x, y, atol=1e-5 * scale)
  used = [x.memory_analysis().temp_size_in_bytes for x in (cached, plain)]
  assert used[0] < 0.6 * used[1]


def test_each_part_has_its_own_dropout(embedder):
  task, params, batch = embedder
  config = dataclasses.replace(task.model.config, dropout=0.5)
  # One text in all rows: parts with the same bits would give the same vectors.
  same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), batch.tokens)
  starts = np.broadcast_to(batch.starts[:1], batch.starts.shape)
  batch = batch._replace(tokens=same, starts=starts,
                         members=np.arange(len(starts))[:, None] * starts.shape[1])
  vectors = task.with_config(config)._forward(params, batch, jax.random.key(1))[:, 0]
  assert len(np.unique(np.asarray(vectors).round(5), axis=0)) == len(starts)


@pytest.mark.medium
def test_every_width_is_scored(tmp_path):
  c = make_config(tmp_path, train_epochs=0.0, train_steps=4, **{
      'data.matryoshka': (32, 4), 'data.matryoshka_weights': (1.0, 0.5),
      'keep_best': 'spearman_4'})
  run.run(c, str(tmp_path / 'run'))
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'eval.jsonl').read_text().splitlines()]
  scores = [line['score'] for line in lines]
  for end, dim in (('', None), ('_32', 32), ('_4', 4)):
    a, b = (bert.embed([line[name] for line in lines], normalize=True, dim=dim)
            for name in ('sentence1', 'sentence2'))
    expected = stats.pearsonr(np.sum(a * b, -1), scores).statistic
    assert abs(expected - last(tmp_path / 'run')['eval_pearson' + end]) < 1e-4


@pytest.mark.medium
@pytest.mark.parametrize('negative', ['', pytest.param('contrary', marks=pytest.mark.slow)])
def test_a_run_learns_pairs_and_embed_gives_the_scored_vectors(tmp_path, negative):
  run.run(make_config(tmp_path, **{'data.negative_column': negative}), str(tmp_path / 'run'))
  assert 'eval_loss' not in last(tmp_path / 'run')  # half of the evaluated pairs are far apart
  assert last(tmp_path / 'run')['eval_spearman'] > 0.8
  # predict and Python give the scored vectors.
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'eval.jsonl').read_text().splitlines()]
  a, b = (bert.embed([line[name] for line in lines], 'mean')
          for name in ('sentence1', 'sentence2'))
  cosines = np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
  scores = np.array([line['score'] for line in lines])
  correlation = np.corrcoef(cosines, scores)[0, 1]
  assert abs(correlation - last(tmp_path / 'run')['eval_pearson']) < 1e-4


@pytest.mark.parametrize('config', [BertConfig(num_layers=1), ModernConfig(num_layers=4)])
def test_loaded_parameters_have_the_structure_of_the_task(config):
  groups = pretrained.head_groups(config, 'sentence_embedding')
  loaded = nn.unbox(layout.abstract_params(config, groups))
  task = SentenceEmbedding(BertForSentenceEmbedding(config, 'mean'))
  trained = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  assert jax.tree.structure(loaded) == jax.tree.structure(trained)


@pytest.mark.medium
def test_single_texts_are_their_own_partners(tmp_path):
  c = make_config(tmp_path, train_epochs=0.0, train_steps=3, log_every=1,
                  **{'data.text_pair_column': '', 'model.dropout': 0.1})
  run.run(c, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  # Under another dropout a text is no longer itself, but nearer to itself than to others.
  assert 0 < lines[0]['loss'] < np.log(16) and lines[0]['accuracy'] > 0.5


@pytest.mark.medium
@pytest.mark.parametrize('overrides, message', [
    ({'data.pooling': 'none'}, 'data.pooling='),
    ({'data.temperature': 0.0}, 'must be positive'),
    ({'data.matryoshka': (8, 8)}, 'each once'),
    ({'data.matryoshka': (0,)}, 'whole numbers above 0'),
    ({'data.matryoshka': (64,)}, 'the vectors of this model have 32 entries'),
    ({'data.matryoshka': (8,), 'data.matryoshka_weights': (1, 2)}, 'a weight for each'),
    ({'data.matryoshka': (8,), 'data.matryoshka_weights': ('much',)}, 'numbers above 0'),
    ({'data.cached_parts': 0}, 'must be at least 1'),
    ({'data.text_pair_column': '', 'data.negative_column': 'contrary'}, 'needs data.text_pair'),
    ({'data.text_pair_column': '', 'model.dropout': 0.0}, 'under different dropout'),
    ({'data.eval_columns': ('a', 'b')}, 'two texts and a score'),
    ({'data.eval_columns': ('sentence1', 'sentence2', 'stars')}, "no column 'stars'"),
    ({'data.text_column': 'words'}, "no column 'words'"),
    ({'data.test': 'x.jsonl'}, 'this task predicts no file'),
    ({'keep_best': 'loss'}, "keep_best='loss' is not a score of this task: use pearson, spearman"),
    ({'optimizer.accumulation': 0}, 'optimizer.accumulation=0 must be at least 1'),
    ({'optimizer.accumulation': 16}, 'divided by optimizer.accumulation=16 leaves one text')])
def test_mistakes(tmp_path, overrides, message):
  with pytest.raises(UserError, match=message):
    run.run(make_config(tmp_path, **overrides), str(tmp_path / 'run'))


def test_one_example_is_too_few(tmp_path):
  c = make_config(tmp_path, **{'data.train': made_tasks.pairs(tmp_path / 'one.jsonl', 1)})
  with pytest.raises(UserError, match='nothing to contrast it with'):
    run.run(c, str(tmp_path / 'run'))
