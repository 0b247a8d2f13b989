"""Vectors of sentences: the loss by hand, training, mistakes."""

import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.interop import layout, pretrained
from bert_jax.labelled.packed_examples import Batch
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.modern import ModernConfig
from bert_jax.runs import run
from bert_jax.tasks.sentence_embedding import BertForSentenceEmbedding, SentenceEmbedding
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


def test_the_loss_by_hand():
  vectors = np.random.default_rng(0).normal(size=(4, 3, 8))
  vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
  members = np.arange(12).reshape(4, 3)
  members[1, 2] = -1  # no third text
  members[3] = -1  # the last batch of an epoch has fewer examples
  # Every text against the second texts of all three examples, and the third ones of two.
  others = np.concatenate([vectors[:3, 1], vectors[[0, 2], 2]])
  cosines = vectors[:3, 0] @ others.T / 0.05
  expected = -special.log_softmax(cosines, axis=1)[np.arange(3), np.arange(3)]
  task = SentenceEmbedding(None, temperature=0.05)
  metrics = task.metrics(jnp.asarray(vectors, jnp.float32),
                         Batch(None, None, members, None, None, None))
  np.testing.assert_allclose(metrics['loss'][0], expected.sum(), rtol=1e-5)
  assert metrics['loss'][1] == 3
  assert metrics['accuracy'][0] == np.sum(cosines.argmax(1) == np.arange(3))
  np.testing.assert_allclose(task.reduced(jnp.asarray(vectors)),
                             np.sum(vectors[:, 0] * vectors[:, 1], -1), rtol=1e-5)


@pytest.mark.parametrize('negative', ['', pytest.param('contrary', marks=pytest.mark.slow)])
def test_pairs_are_learned_and_used(tmp_path, negative):
  run.run(make_config(tmp_path, **{'data.negative_column': negative}), str(tmp_path / 'run'))
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


@pytest.mark.parametrize('config', [BertConfig(num_layers=1), ModernConfig(num_layers=1)])
def test_the_parameters_that_are_loaded_are_those_of_the_task(config):
  groups = pretrained.head_groups(config, 'sentence_embedding')
  loaded = nn.unbox(layout.abstract_params(config, groups))
  task = SentenceEmbedding(BertForSentenceEmbedding(config, 'mean'))
  trained = nn.unbox(jax.eval_shape(task.init, jax.random.key(0)))
  assert jax.tree.structure(loaded) == jax.tree.structure(trained)


def test_single_texts_are_their_own_partners(tmp_path):
  c = make_config(tmp_path, train_epochs=0.0, train_steps=3, log_every=1,
                  **{'data.text_pair_column': '', 'model.dropout': 0.1})
  run.run(c, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  # Under another dropout a text is no longer itself, but nearer to itself than to others.
  assert 0 < lines[0]['loss'] < np.log(16) and lines[0]['accuracy'] > 0.5


@pytest.mark.parametrize('overrides, message', [
    ({'data.pooling': 'none'}, 'data.pooling='),
    ({'data.temperature': 0.0}, 'must be positive'),
    ({'data.text_pair_column': '', 'data.negative_column': 'contrary'}, 'needs data.text_pair'),
    ({'data.text_pair_column': '', 'model.dropout': 0.0}, 'under other dropout'),
    ({'data.eval_columns': ('a', 'b')}, 'two texts and a score'),
    ({'data.eval_columns': ('sentence1', 'sentence2', 'stars')}, "no column 'stars'"),
    ({'data.text_column': 'words'}, "no column 'words'"),
    ({'data.test': 'x.jsonl'}, 'this task predicts no file')])
def test_mistakes(tmp_path, overrides, message):
  with pytest.raises(UserError, match=message):
    run.run(make_config(tmp_path, **overrides), str(tmp_path / 'run'))


def test_one_example_is_too_few(tmp_path):
  c = make_config(tmp_path, **{'data.train': made_tasks.pairs(tmp_path / 'one.jsonl', 1)})
  with pytest.raises(UserError, match='nothing to tell it from'):
    run.run(c, str(tmp_path / 'run'))
