"""The same word in two contexts: how much its vectors have in common, layer by layer."""

from collections.abc import Sequence

import numpy as np

from bert_jax.errors import UserError
from bert_jax.inference.bert import Bert


def _word_vectors(bert: Bert, text: str, word: str) -> np.ndarray:
  """[N + 1, D]: the mean over the pieces of a word's first occurrence, in each layer."""
  pieces = bert.tokenizer.encode_batch([word])[0]
  ids = bert.tokenizer.encode_batch([text])[0]
  if not pieces:
    raise UserError(f'the word {word!r} has no token')
  starts = [i for i in range(len(ids)) if ids[i:i + len(pieces)] == pieces]
  if not starts:
    raise UserError(f'the word {word!r} does not occur in {text!r}')
  layers = range(bert.config.num_layers + 1)
  hidden = bert.embed([text], 'none', layers=layers)[0]  # [n, D * (N + 1)]
  found = hidden[starts[0]:starts[0] + len(pieces)].mean(0)
  return found.reshape(len(layers), -1)


def similarities(bert: Bert, texts: Sequence[str], word: str) -> np.ndarray:
  """The cosine of a word's vectors in two texts: [N + 1] float32, the embeddings first.

  Raises:
    UserError: not two texts, or the word is not in both.
  """
  if len(texts) != 2:
    raise UserError(f'a word is compared in two texts, not in {len(texts)}')
  a, b = (_word_vectors(bert, text, word) for text in texts)
  return np.sum(a * b, 1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
