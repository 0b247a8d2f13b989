"""Words as vectors: a word in two contexts, and the token table as a vector space."""

from collections.abc import Mapping, Sequence
import re

from matplotlib import figure
import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.inference.bert import Bert
from bert_jax.tasks import answers
from bert_jax.views.attention_page import save_picture


def _find(word: str, text: str) -> tuple[int, int]:
  """The characters [start, end) of the first occurrence of a word.

  Raises:
    UserError: the word does not occur.
  """
  # The whole word first, then the whole word in any case, then a part of a word.
  plain = re.escape(word)
  for pattern in (rf'(?<!\w){plain}(?!\w)', rf'(?<!\w)(?i:{plain})(?!\w)', plain):
    if match := word and re.search(pattern, text):
      return match.span()
  raise UserError(f'the word {word!r} does not occur in {text!r}')


def _in_context(bert: Bert, text: str, word: str) -> np.ndarray:
  """The mean vector of a word's first occurrence in each layer: [N + 1, D] float32."""
  # As `embed` reads it.
  (text,), (word,) = bert.dense.prepared([(text,), (word,)], '')
  (_, spans), = bert.tokenizer.encode_with_spans([text])
  tokens = answers.token_span(spans, *_find(word, text))
  require(bool(tokens), f'the word {word!r} has no token')
  first, last = tokens
  layers = range(bert.config.num_layers + 1)
  hidden = bert.embed([text], 'none', layers=layers)[0]  # [n, D * (N + 1)]
  # `embed` truncates a text that is longer than the model.
  require(last < len(hidden),
          f'the word {word!r} is after the first {len(hidden)} tokens of a text, and the '
          'model reads no more: shorten the text')
  return hidden[first:last + 1].mean(0).reshape(len(layers), -1)


def similarities(bert: Bert, texts: Sequence[str], word: str) -> np.ndarray:
  """The cosine of a word's vectors in two texts: [N + 1] float32, embeddings first.

  Raises:
    UserError: one of the two texts lacks the word.
  """
  a, b = (_in_context(bert, text, word) for text in texts)
  return np.sum(a * b, 1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


class TokenTable:
  """The token embeddings of a model: one unit vector for each entry of the vocabulary."""

  def __init__(self, bert: Bert):
    embeddings = bert.params['params']['bert']['embeddings']
    table = np.asarray(embeddings['token'], np.float32)[:bert.config.vocab_size]
    self._tokenizer = bert.tokenizer
    self.entries = bert.tokenizer.tokens(range(len(table)))
    self.ids = {entry: i for i, entry in enumerate(self.entries)}
    # The bound keeps rows of zeros, such as padding, from a division by zero.
    self.vectors = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)

  def id_of(self, word: str) -> int:
    """The id of the entry for a word in a text, else of the entry with this spelling.

    In byte-level BPE, "Ġking" is the word and "king" is a part of longer words.

    Raises:
      UserError: the word is not one entry of the vocabulary.
    """
    ids = self._tokenizer.encode_batch([f' {word}'])[0]
    if len(ids) == 1 and ids[0] != self._tokenizer.unk_id:
      return ids[0]
    if word not in self.ids:
      pieces = ' '.join(self.entries[i] for i in ids)
      raise UserError(f'{word!r} is not one entry of the vocabulary, but: '
                      f'{pieces or "nothing"}')
    return self.ids[word]

  def _nearest(self, vector: np.ndarray, count: int,
               without: Sequence[int]) -> list[tuple[str, float]]:
    cosines = self.vectors @ (vector / max(float(np.linalg.norm(vector)), 1e-12))
    cosines[list(without)] = -np.inf
    best = np.argsort(-cosines, kind='stable')[:count]
    return [(self.entries[i], float(cosines[i])) for i in best]

  def neighbours(self, word: str, count: int = 10) -> list[tuple[str, float]]:
    """The entries with the largest cosine to a word, except the word itself.

    Raises:
      UserError: the word is not one entry of the vocabulary.
    """
    i = self.id_of(word)
    return self._nearest(self.vectors[i], count, [i])

  def analogy(self, a: str, b: str, c: str, count: int = 10) -> list[tuple[str, float]]:
    """`b` is to `a` as which entry is to `c`? By b - a + c (Mikolov et al. 2013)."""
    i, j, k = map(self.id_of, (a, b, c))
    return self._nearest(self.vectors[j] - self.vectors[i] + self.vectors[k], count,
                         [i, j, k])

  def flat(self, ids: Sequence[int]) -> np.ndarray:
    """The first two principal components of n entries: [n, 2]."""
    x = self.vectors[list(ids)]
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    # Fewer than two words have fewer than two components: the rest is 0.
    return np.pad(u * s, ((0, 0), (0, 2)))[:, :2]

  def write_map(self, names: Mapping[int, str], path: str):
    """Draws entries on their principal plane, where similar entries are near each other.

    Args:
      names: {id of an entry: its label}.
      path: a file, such as map.png.
    """
    points = self.flat(list(names))
    picture = figure.Figure(figsize=(7, 7), layout='constrained')
    axes = picture.subplots()
    axes.scatter(*points.T, s=12, color='tab:blue')
    for name, point in zip(names.values(), points):
      # A word may contain $, which matplotlib would parse as math.
      axes.annotate(name, point, xytext=(4, 3), textcoords='offset points',
                    parse_math=False)
    axes.margins(x=0.2, y=0.08)
    axes.set(xticks=[], yticks=[],
             xlabel='the two principal components of the token embeddings')
    save_picture(picture, path)
