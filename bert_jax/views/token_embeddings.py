"""The token table as a space of words: nearest neighbours, analogies, a map."""

from collections.abc import Sequence

import matplotlib
from matplotlib import figure
import numpy as np

from bert_jax.errors import UserError
from bert_jax.inference.bert import Bert
from bert_jax.views.attention_page import fonts


class TokenTable:
  """The token embeddings of a model: one unit vector for each entry of the vocabulary."""

  def __init__(self, bert: Bert):
    table = np.asarray(bert.params['params']['bert']['embeddings']['token'], np.float32)
    table = table[:bert.config.vocab_size]
    self._tokenizer = bert.tokenizer
    self.entries = bert.tokenizer.tokens(range(len(table)))
    self._ids = {entry: i for i, entry in enumerate(self.entries)}
    self.vectors = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)

  def id_of(self, word: str) -> int:
    """The entry of a word.

    Raises:
      UserError: the word is not one entry of the vocabulary.
    """
    ids = [self._ids[word]] if word in self._ids else self._tokenizer.encode_batch([word])[0]
    if len(ids) != 1 or self.entries[ids[0]] == '[UNK]':
      pieces = ' '.join(self.entries[i] for i in ids)
      raise UserError(f'{word!r} is not one entry of the vocabulary but: {pieces or "nothing"}')
    return ids[0]

  def nearest(self, vector: np.ndarray, count: int,
              without: Sequence[int] = ()) -> list[tuple[str, float]]:
    """The entries with the largest cosine to a vector, and it."""
    cosines = self.vectors @ (vector / max(float(np.linalg.norm(vector)), 1e-12))
    cosines[list(without)] = -np.inf
    best = np.argsort(-cosines, kind='stable')[:count]
    return [(self.entries[i], float(cosines[i])) for i in best]

  def neighbours(self, word: str, count: int = 10) -> list[tuple[str, float]]:
    """The entries nearest to a word, without itself."""
    i = self.id_of(word)
    return self.nearest(self.vectors[i], count, [i])

  def analogy(self, a: str, b: str, c: str, count: int = 10) -> list[tuple[str, float]]:
    """What is to `c` as `b` is to `a`: the entries nearest to b - a + c (Mikolov et al. 2013)."""
    i, j, k = map(self.id_of, (a, b, c))
    return self.nearest(self.vectors[j] - self.vectors[i] + self.vectors[k], count, [i, j, k])

  def flat(self, words: Sequence[str]) -> np.ndarray:
    """Two coordinates of each word, the first principal components: [n, 2]."""
    x = self.vectors[[self.id_of(word) for word in words]]
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    return np.pad(u * s, ((0, 0), (0, 2)))[:, :2]

  def write_map(self, words: Sequence[str], path: str):
    """A picture of words: what is near each other there is alike, as far as a plane can show it."""
    points = self.flat(words)
    picture = figure.Figure(figsize=(7, 7), layout='constrained')
    axes = picture.subplots()
    axes.scatter(*points.T, s=12, color='tab:blue')
    for word, point in zip(words, points):
      axes.annotate(word, point, xytext=(4, 3), textcoords='offset points')
    axes.margins(x=0.2, y=0.08)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel('the two principal components of the token embeddings')
    with matplotlib.rc_context({'font.family': fonts()}):
      picture.savefig(path, dpi=120)
