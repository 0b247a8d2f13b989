"""Words as vectors: one word in two contexts, and the token table as a space of words."""

from collections.abc import Sequence

from matplotlib import figure
import numpy as np

from bert_jax.errors import UserError
from bert_jax.inference.bert import Bert
from bert_jax.views.attention_page import save_picture


def _in_context(bert: Bert, text: str, word: str) -> np.ndarray:
  """[N + 1, D]: the mean over the pieces of a word's first occurrence, in each layer."""
  pieces, ids = (bert.tokenizer.encode_batch([x])[0] for x in (word, text))
  if not pieces:
    raise UserError(f'the word {word!r} has no token')
  starts = [i for i in range(len(ids)) if ids[i:i + len(pieces)] == pieces]
  if not starts:
    raise UserError(f'the word {word!r} does not occur in {text!r}')
  layers = range(bert.config.num_layers + 1)
  hidden = bert.embed([text], 'none', layers=layers)[0]  # [n, D * (N + 1)]
  return hidden[starts[0]:starts[0] + len(pieces)].mean(0).reshape(len(layers), -1)


def similarities(bert: Bert, texts: Sequence[str], word: str) -> np.ndarray:
  """The cosine of a word's vectors in two texts: [N + 1] float32, the embeddings first.

  Raises:
    UserError: not two texts, or the word is not in both.
  """
  if len(texts) != 2:
    raise UserError(f'a word is compared in two texts, not in {len(texts)}')
  a, b = (_in_context(bert, text, word) for text in texts)
  return np.sum(a * b, 1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


class TokenTable:
  """The token embeddings of a model: one unit vector for each entry of the vocabulary."""

  def __init__(self, bert: Bert):
    table = np.asarray(bert.params['params']['bert']['embeddings']['token'], np.float32)
    table = table[:bert.config.vocab_size]
    self._tokenizer = bert.tokenizer
    self.entries = bert.tokenizer.tokens(range(len(table)))
    self._ids = {entry: i for i, entry in enumerate(self.entries)}
    self.vectors = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)

  def _id_of(self, word: str) -> int:
    ids = [self._ids[word]] if word in self._ids else self._tokenizer.encode_batch([word])[0]
    if len(ids) != 1 or self.entries[ids[0]] == '[UNK]':
      pieces = ' '.join(self.entries[i] for i in ids)
      raise UserError(f'{word!r} is not one entry of the vocabulary but: {pieces or "nothing"}')
    return ids[0]

  def _nearest(self, vector: np.ndarray, count: int,
               without: Sequence[int]) -> list[tuple[str, float]]:
    cosines = self.vectors @ (vector / max(float(np.linalg.norm(vector)), 1e-12))
    cosines[list(without)] = -np.inf
    best = np.argsort(-cosines, kind='stable')[:count]
    return [(self.entries[i], float(cosines[i])) for i in best]

  def neighbours(self, word: str, count: int = 10) -> list[tuple[str, float]]:
    """The entries with the largest cosine to a word, without the word itself.

    Raises:
      UserError: the word is not one entry of the vocabulary.
    """
    i = self._id_of(word)
    return self._nearest(self.vectors[i], count, [i])

  def analogy(self, a: str, b: str, c: str, count: int = 10) -> list[tuple[str, float]]:
    """`b` is to `a` as which entry is to `c`? Those nearest to b - a + c (Mikolov et al. 2013)."""
    i, j, k = map(self._id_of, (a, b, c))
    return self._nearest(self.vectors[j] - self.vectors[i] + self.vectors[k], count, [i, j, k])

  def flat(self, words: Sequence[str]) -> np.ndarray:
    """Two coordinates of each word, the first principal components: [n, 2]."""
    x = self.vectors[[self._id_of(word) for word in words]]
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    return np.pad(u * s, ((0, 0), (0, 2)))[:, :2]

  def write_map(self, words: Sequence[str], path: str):
    """Draws words on a plane, similar ones near each other as far as a plane can show it."""
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
    save_picture(picture, path)
