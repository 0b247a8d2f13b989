"""SPLADE: vectors, loss and gradient equal sentence-transformers'; a run learns and exports."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses, modules
import torch
import transformers

import bert_jax
from bert_jax import config as config_lib
from bert_jax.errors import UserError
from bert_jax.inference.predictions import Options
from bert_jax.interop import conversion
from bert_jax.labelled.packed_examples import Batch
from bert_jax.model.bert_config import BertConfig
from bert_jax.runs import run
from bert_jax.tasks import sparse_embedding
from bert_jax.tasks.sparse_embedding import SparseEmbedding, SparseKind
from tests import made_tasks
from tests.interop import torch_bert

TEXTS = ['w1 w2 w3', 'w7', 'w9 w8 w7 w6 w5 w4 w3 w2', 'w11 w12'] * 5


def torch_vectors(theirs, bert, texts):
  """[texts, V] by transformers' masked LM and sentence-transformers' pooling."""
  pool, rows = modules.SpladePooling(pooling_strategy='max'), [bert.row(text).ids for text in texts]
  length = max(map(len, rows))
  mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
  ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
  logits = theirs(input_ids=ids, attention_mask=mask).logits
  return pool({'token_embeddings': logits, 'attention_mask': mask})['sentence_embedding']


def test_vectors_equal_sentence_transformers(tmp_path):
  theirs = torch_bert.make('BertForMaskedLM', tmp_path, max_position_embeddings=64)
  bert = bert_jax.from_pretrained(str(tmp_path))
  expected = torch_vectors(theirs, bert, TEXTS).detach().numpy()
  vectors = sparse_embedding.vectors(bert, TEXTS)
  assert vectors.shape == expected.shape and 0 < np.count_nonzero(vectors) < vectors.size
  np.testing.assert_allclose(vectors, expected, atol=1e-5)
  answer, = SparseKind.answer(bert, [{'text': TEXTS[0]}], Options())
  weights = list(answer['entries'].values())
  assert len(weights) == np.count_nonzero(vectors[0]) and weights == sorted(weights)[::-1]
  token = next(iter(answer['entries']))
  assert bert.tokenizer.tokens([vectors[0].argmax()]) == [token]


def test_the_loss_and_its_gradient_equal_sentence_transformers():
  rng = np.random.default_rng(0)
  vectors = np.maximum(rng.normal(size=(5, 3, 40)), 0).astype(np.float32)
  parts = [torch.tensor(vectors[:, i], requires_grad=True) for i in range(3)]
  loss = losses.SpladeLoss(None, losses.SparseMultipleNegativesRankingLoss(None, scale=0.5),
                           document_regularizer_weight=0.3, query_regularizer_weight=0.2)
  base = loss.loss.compute_loss_from_embeddings(parts, None)
  query = 0.2 * loss.query_regularizer.compute_loss_from_embeddings(parts[0])
  document = 0.3 * loss.document_regularizer.compute_loss_from_embeddings(torch.cat(parts[1:]))
  (base + query + document).backward()
  task = SparseEmbedding(None, temperature=2.0, query_flops=0.2, document_flops=0.3)
  batch = Batch(None, None, np.arange(15).reshape(5, 3), None, None, None)

  def total(vectors):
    metrics = task.metrics(vectors, batch)
    return sum(weight * metrics[name][0] / metrics[name][1]
               for name, weight in task.loss_weights.items()), metrics

  (ours, metrics), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(vectors))
  np.testing.assert_allclose(ours, (base + query + document).item(), rtol=1e-6)
  np.testing.assert_allclose(gradient, np.stack([x.grad for x in parts], 1), atol=1e-6)
  assert metrics['entries'][0] == np.count_nonzero(vectors) and metrics['entries'][1] == 15


def test_the_flops_of_microbatches_are_averaged():
  rng = np.random.default_rng(0)
  vectors = np.maximum(rng.normal(size=(4, 2, 40)), 0).astype(np.float32)
  task = SparseEmbedding(None)
  halves = [task.metrics(jnp.asarray(part), Batch(
      None, None, np.arange(4).reshape(2, 2), None, None, None)) for part in np.split(vectors, 2)]
  for i, name in enumerate(('query_flops', 'document_flops')):
    total, count = (sum(float(half[name][j]) for half in halves) for j in (0, 1))
    flops = [np.sum(part[:, i].mean(0) ** 2) for part in np.split(vectors, 2)]
    np.testing.assert_allclose(total / count, np.mean(flops), rtol=1e-6)


def test_texts_that_are_padding_do_not_count():
  vectors = jnp.asarray([[1.0, 2.0], [3.0, 0.0], [9.0, 9.0]])
  exists = jnp.asarray([True, True, False])
  assert sparse_embedding.flops(vectors, exists) == 2.0**2 + 1.0**2


@pytest.mark.slow
def test_a_run_learns_sparse_vectors_and_exports_a_masked_lm(tmp_path):
  torch_bert.make('BertForMaskedLM', tmp_path / 'model', max_position_embeddings=64)
  config = config_lib.finetuning('sparse_embedding')
  config.update_from_flattened_dict({
      'init_from': str(tmp_path / 'model'), 'max_len': 16, 'train_epochs': 6.0, 'log_every': 1,
      'optimizer.learning_rate': 3e-3, 'model.scan_unroll': 1, 'eval_every': 1000,
      'data.negative_column': 'contrary', 'data.document_flops': 0.05, 'data.query_flops': 0.05,
      'data.train': made_tasks.pairs(tmp_path / 'train.jsonl', 128),
      'data.eval': made_tasks.pairs(tmp_path / 'eval.jsonl', 40, seed=1)})
  run.run(config, str(tmp_path / 'run'))
  lines = [json.loads(x) for x in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  steps = [line for line in lines if 'entries' in line]
  assert steps[-1]['accuracy'] > 0.9
  assert steps[-1]['entries'] < 0.5 * steps[0]['entries']  # the FLOPS loss makes the vectors sparse
  assert lines[-1]['eval_spearman'] > 0.7
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'hf'), 'huggingface')
  theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / 'hf').eval()
  bert = bert_jax.from_pretrained(str(tmp_path / 'run'))
  np.testing.assert_allclose(sparse_embedding.vectors(bert, TEXTS),
                             torch_vectors(theirs, bert, TEXTS).detach().numpy(), atol=1e-5)
  conversion.convert(str(tmp_path / 'run'), str(tmp_path / 'st'), 'sentence_transformers')
  folder = SparseEncoder(str(tmp_path / 'st'), device='cpu')
  texts = [*TEXTS[:4], ' '.join(TEXTS)]  # the last is longer than the run's max_len
  np.testing.assert_allclose(sparse_embedding.vectors(bert, texts),
                             folder.encode(texts, convert_to_sparse_tensor=False), atol=1e-5)
  assert sparse_embedding.vectors(bert, []).shape == (0, bert.config.vocab_size)


def test_flops_count_the_head_at_every_token():
  config = BertConfig(num_layers=2, hidden_size=8, num_heads=2, intermediate_size=16, vocab_size=50)
  task = sparse_embedding.SparseEmbedding(sparse_embedding.BertForSparseEmbedding(config))
  head = 6 * (8 * 8 + 8 * 50)
  assert task.flops_per_token(16) == config.flops_per_token(16, 0) + head


def test_mistakes(tmp_path):
  config = config_lib.finetuning('sparse_embedding')
  config.update_from_flattened_dict({
      'init_from': made_tasks.model(tmp_path / 'model'), 'max_len': 16,
      'data.train': made_tasks.pairs(tmp_path / 'train.jsonl', 8)})
  with pytest.raises(UserError, match="has no head 'mlm': task=sparse_embedding starts from a m"):
    run.run(config, str(tmp_path / 'run'))
  config.data.document_flops = -1.0
  with pytest.raises(UserError, match='data.document_flops=-1.0 must not be negative'):
    run.run(config, str(tmp_path / 'run'))
