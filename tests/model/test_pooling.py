"""Vectors of long texts, by hand."""

import numpy as np
import pytest

from bert_jax.model import pooling


@pytest.mark.parametrize('how', ['chunks_mean', 'chunks_max', 'chunks_attention'])
def test_chunks_are_combined_by_the_formulas(how):
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(3, 4, 5)).astype(np.float32)
  exists = np.array([[True, True, True, False], [True, False, False, False], [True] * 4])
  results = np.asarray(pooling.combine_chunks(vectors, exists, how))
  for text, real, combined in zip(vectors, exists, results):
    part = text[real]
    scores = np.exp(part @ part.T / np.sqrt(5))
    expected = {'chunks_mean': part.mean(0), 'chunks_max': part.max(0),
                'chunks_attention': (scores / scores.sum(1, keepdims=True) @ part).mean(0)}[how]
    np.testing.assert_allclose(combined, expected, rtol=1e-5)


@pytest.mark.parametrize('how', ['chunks_mean', 'chunks_max', 'chunks_attention'])
def test_texts_of_many_lengths_are_combined_separately(how):
  counts = [3, 1, 40, 4, 1, 2]
  vectors = np.random.default_rng(0).normal(size=(sum(counts), 5)).astype(np.float32)
  combined = pooling.combine_chunks_on_host(vectors, np.repeat(np.arange(6), counts), how)
  assert combined.shape == (6, 5) and combined.dtype == np.float32
  for row, text in zip(combined, np.split(vectors, np.cumsum(counts)[:-1])):
    alone = pooling.combine_chunks(text[None], np.ones((1, len(text)), bool), how)[0]
    np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-6)


def test_a_single_chunk_stays_unchanged():
  vectors = np.ones((2, 1, 3), np.float32)
  assert (pooling.combine_chunks(vectors, np.ones((2, 1), bool), 'head') == vectors[:, 0]).all()
