"""Minimal pairs per second: `evaluate --suite=minimal_pairs` against transformers.

  python -m benchmarks.minimal_pairs --model=MODEL --pairs='blimp/*.jsonl.gz'

MODEL is a Hugging Face folder with a masked-LM head. The transformers side runs the
masked copies of one sentence as one batch, as scripts for BLiMP do. Both sides score the
same pairs in turns, and the medians count. Needs torch and transformers.
"""

import time

from absl import app, flags
import numpy as np
import torch
import transformers

import bert_jax
from bert_jax.evaluation import minimal_pairs
from bert_jax.runtime import host

_MODEL = flags.DEFINE_string('model', None, 'Hugging Face folder.', required=True)
_PAIRS = flags.DEFINE_string('pairs', None, "Files in BLiMP's JSON lines.", required=True)
_COUNT = flags.DEFINE_integer('count', 200, 'Pairs, drawn at random.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns of each side.')


class _Torch:
  """The transformers side: a loop over sentences."""

  def __init__(self, folder: str):
    self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    self._model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()

  @torch.inference_mode()
  def score(self, text: str) -> float:
    """Returns the pseudo-log-likelihood of a sentence in nats."""
    ids = self._tokenizer(text, return_tensors='pt').input_ids[0]
    copies = torch.arange(len(ids) - 2)
    masked = ids.repeat(len(copies), 1)
    masked[copies, copies + 1] = self._tokenizer.mask_token_id
    logits = self._model(masked).logits[copies, copies + 1]
    return torch.log_softmax(logits, -1)[copies, ids[1:-1]].sum().item()


def main(_):
  """Prints pairs per second, their ratio, and the largest score difference."""
  host.keep_freed_memory()
  pairs = minimal_pairs.read(_PAIRS.value)
  order = np.random.default_rng(0).permutation(len(pairs))[:_COUNT.value]
  texts = [text for i in order for text in pairs[i][:2]]
  ours, theirs = bert_jax.from_pretrained(_MODEL.value), _Torch(_MODEL.value)
  seconds, scores = {'bert_jax': [], 'PyTorch': []}, {}
  for number in range(-1, _ROUNDS.value):  # the first turn compiles
    for side, score in (
        ('bert_jax', lambda: minimal_pairs.pseudo_log_likelihoods(ours, texts)),
        ('PyTorch', lambda: np.array([theirs.score(text) for text in texts]))):
      began = time.perf_counter()
      scores[side] = score()
      if number >= 0:
        seconds[side].append(time.perf_counter() - began)
  a, b = (len(order) / np.median(seconds[side]) for side in ('bert_jax', 'PyTorch'))
  apart = np.abs(scores['bert_jax'] - scores['PyTorch']).max()
  print(f'{len(order)} pairs: bert_jax {a:.1f}, PyTorch {b:.1f} pairs a second, ratio {a / b:.2f}; '
        f'scores differ by at most {apart:.1e} nat')


if __name__ == '__main__':
  app.run(main)
