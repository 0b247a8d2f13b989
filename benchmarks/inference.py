"""Texts per second: `embed` against PyTorch transformers on the same machine.

  python -m benchmarks.inference --model=MODEL --text='corpus/*.txt.gz' [--stsb=dev.tsv]

MODEL is a Hugging Face folder. Both sides embed the same sentences of mixed length with
mean pooling, in turns, and the medians count. PyTorch sorts by length and uses the
fastest of the given batch sizes. With --stsb (GLUE's file) both sides also score its
pairs. Needs torch, transformers and scipy.
"""

import csv
import functools
import glob
import gzip
import time

from absl import app, flags
import numpy as np
from scipy import stats
import torch
import transformers

import bert_jax
from bert_jax.data import corpus

_MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder.', required=True)
_TEXT = flags.DEFINE_string('text', None, 'Glob of text files.', required=True)
_STSB = flags.DEFINE_string('stsb', None, 'dev.tsv of STS-B.')
_COUNT = flags.DEFINE_integer('count', 10_000, 'Sentences.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each side.')
_BATCHES = flags.DEFINE_multi_integer('batch', [16, 32, 64, 128], 'Batch sizes for PyTorch.')


def _sentences() -> list[str]:
  found = []
  for path in sorted(glob.glob(_TEXT.value)):
    with (gzip.open if path.endswith('.gz') else open)(path, 'rt', encoding='utf-8') as file:
      for line in file:
        found += corpus.Settings('').sentences(line) if line.strip() else []
        if len(found) > 20 * _COUNT.value:
          break
  return [found[i] for i in np.random.default_rng(0).permutation(len(found))[:_COUNT.value]]


class _Torch:
  """Mean-pooled embeddings with transformers, as in sentence-transformers."""

  def __init__(self, folder: str):
    self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    self._model = transformers.AutoModel.from_pretrained(folder).eval()

  def embed(self, texts: list[str], batch: int) -> np.ndarray:
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    found = [None] * len(texts)
    with torch.inference_mode():
      for start in range(0, len(order), batch):
        part = order[start:start + batch]
        inputs = self._tokenizer([texts[i] for i in part], padding=True, truncation=True,
                                 max_length=512, return_tensors='pt')
        hidden = self._model(**inputs).last_hidden_state
        mask = inputs['attention_mask'][..., None].to(hidden.dtype)
        for i, vector in zip(part, ((hidden * mask).sum(1) / mask.sum(1)).numpy()):
          found[i] = vector
    return np.stack(found)


def _seconds(function) -> float:
  began = time.perf_counter()
  function()
  return time.perf_counter() - began


def _spearman(embed) -> float:
  with open(_STSB.value, encoding='utf-8') as file:
    rows = list(csv.DictReader(file, delimiter='\t', quoting=csv.QUOTE_NONE))
  a, b = (embed([row[name] for row in rows]) for name in ('sentence1', 'sentence2'))
  cosines = np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
  return stats.spearmanr(cosines, [float(row['score']) for row in rows]).statistic


def main(_):
  """Prints texts per second, their ratio, and the largest vector difference."""
  texts = _sentences()
  ours, theirs = bert_jax.from_pretrained(_MODEL.value), _Torch(_MODEL.value)
  embed = functools.partial(ours.embed, normalize=False, max_len=512)  # as in `_Torch`
  apart = np.abs(embed(texts) - theirs.embed(texts, 32)).max()  # this also warms up both sides
  best = min(_BATCHES.value, key=lambda b: _seconds(lambda: theirs.embed(texts[:2000], b)))
  a, b = [], []
  for _ in range(_ROUNDS.value):
    a.append(len(texts) / _seconds(lambda: embed(texts)))
    b.append(len(texts) / _seconds(lambda: theirs.embed(texts, best)))
    print(f'bert_jax {a[-1]:.1f}, PyTorch {b[-1]:.1f} texts/s', flush=True)
  lengths = [len(ids) for ids in ours.tokenizer.encode_batch(texts)]
  print(f'{len(texts):,} sentences of {np.mean(lengths):.1f} tokens ({min(lengths)} to '
        f'{max(lengths)}): bert_jax {np.median(a):.1f}, PyTorch {np.median(b):.1f} texts/s '
        f'(batches of {best}), ratio {np.median(np.divide(a, b)):.2f}; vectors differ by at most '
        f'{apart:.1e}')
  if _STSB.value:
    print(f'STS-B, Spearman: bert_jax {_spearman(embed):.4f}, PyTorch '
          f'{_spearman(lambda texts: theirs.embed(texts, best)):.4f}')


if __name__ == '__main__':
  app.run(main)
