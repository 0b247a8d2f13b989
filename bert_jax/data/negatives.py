"""Makes false next sentences: pairs of a window exchange their B.

An exchange gives each of two pairs the B of the other. The two B are about equally long,
so length does not leak the label. `data.negatives` says what else they have in common:

  other_document  nothing: the two B come from different documents
  similar_style   similar counts of punctuation, capitals and digits
  same_document   the document, if it has another B of about the same length; otherwise
                  similar style
"""

from collections.abc import Callable

import numpy as np
from tokenizers import decoders

from bert_jax.data.records import Records
from bert_jax.data.tokenizers.base import Tokenizer

NEGATIVES = ('other_document', 'similar_style', 'same_document')
_ROUNDS = 4  # attempts to find a partner from another document
_STYLES = 3  # token classes that make a style: punctuation, capitals, digits
_GROUP = 40  # the fewest pairs of one style: in smaller groups, lengths differ too much
_NEAR = 1 / 8  # share of a row by which the lengths of two B of one document may differ


def token_classes(tokenizer: Tokenizer) -> np.ndarray:
  """The class of each entry by its first character: [V] uint8.

  0 = punctuation or symbol, 1 = capital letter, 2 = digit, 3 = other letter. The prefixes
  of WordPiece, BPE and SentencePiece do not count.
  """
  def class_of(entry):
    text = entry.removeprefix('##').lstrip('\u2581\u0120')
    if tokenizer.is_bytewise and text:
      text = decoders.ByteLevel().decode([text])
    first = (text or 'a')[0]
    if not first.isalnum():
      return 0
    return 1 if first.isupper() else 2 if first.isdigit() else 3

  entries = tokenizer.tokens(range(tokenizer.vocab_size))
  return np.array([class_of(entry) for entry in entries], np.uint8)


def styles(records: Records, classes: np.ndarray, start: np.ndarray,
           length: np.ndarray) -> np.ndarray:
  """Counts punctuation, capitals and digits in spans of text.

  Args:
    records: of the corpus.
    classes: [V] uint8, from `token_classes`.
    start: [C] int64, the first token of each span in the corpus.
    length: [C] int64, the tokens of each span.

  Returns:
    [C, 3] int64.
  """
  stretch = np.repeat(np.arange(len(start)), length)
  position = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
  token_class = classes[records.tokens(start[stretch] + position)]
  # One bincount over (span, class) counts all spans at once.
  counts = np.bincount(stretch * (_STYLES + 1) + token_class,
                       minlength=len(start) * (_STYLES + 1))
  return counts.reshape(-1, _STYLES + 1)[:, :_STYLES]


def _style_groups(style: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Groups similar styles: [C, 3] -> [C] int64.

  Each of the three counts splits every group into the same number of groups, 1 to 4.
  """
  count = len(style)
  ways = int(np.clip((count / _GROUP)**(1 / _STYLES), 1, 4))
  group = np.zeros(count, np.int64)
  for values in style.T:
    # Quantiles make groups of equal size. Equal counts are ordered at random.
    order = np.lexsort((rng.random(count), values, group))
    size = np.bincount(group)
    first = np.cumsum(size) - size
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count) - first[group[order]]
    group = group * ways + rank * ways // size[group]
  return np.unique(group, return_inverse=True)[1]


def _couples_of_one_document(b_length: np.ndarray, document: np.ndarray, near: float,
                             fits: Callable[..., np.ndarray]) -> np.ndarray:
  """Couples of one document with B of about the same length: [N, 2] int64."""
  order = np.lexsort((b_length, document))
  left, right = order[:-1], order[1:]
  linked = ((document[left] == document[right])
            & (b_length[right] - b_length[left] <= near) & fits(left, right))
  # Uses every second link in a run of links, so that no pair is in two couples.
  number = np.arange(len(linked))
  begins = np.maximum.accumulate(np.where(linked, -1, number)) + 1
  taken = linked & ((number - begins) % 2 == 0)
  return np.stack([left[taken], right[taken]], 1)


def exchange(a_length: np.ndarray, b_length: np.ndarray, document: np.ndarray,
             longest: int, rng: np.random.Generator, negatives: str = NEGATIVES[0],
             style: np.ndarray | None = None) -> np.ndarray:
  """For each pair, the index of the pair whose B it gets (may be its own): [C] int64.

  Pairs are sorted by the length of B. Neighbors of different documents become couples.
  Random couples exchange their B until half of all pairs have another B. Label and length
  are independent, except for the few couples that would not fit into a row.

  Args:
    a_length: [C] int64 tokens of A.
    b_length: [C] int64 tokens of B.
    document: [C] int64 number of the document.
    longest: the most ordinary tokens of A and B together.
    rng: chooses the couples.
    negatives: one of `NEGATIVES`.
    style: [C, 3] of B; None with 'other_document'.
  """
  count = len(b_length)

  def fits(left, right):
    return ((a_length[left] + b_length[right] <= longest)
            & (a_length[right] + b_length[left] <= longest))

  couples, single = [], np.arange(count)
  anyone = np.zeros(count, np.int64)
  groups = [anyone] * _ROUNDS
  if negatives != 'other_document':
    groups = [_style_groups(style, rng)] * _ROUNDS + groups
  if negatives == 'same_document':
    couples.append(
        _couples_of_one_document(b_length, document, _NEAR * longest, fits))
    single = np.setdiff1d(single, couples[0])
  # Each round couples neighbors. Pairs without a fitting neighbor try again in the next
  # round, in another random order.
  for group in groups:
    order = single[
        np.lexsort((rng.random(len(single)), b_length[single], group[single]))]
    left, right = order[0:len(order) - 1:2], order[1::2]
    agree = ((document[left] != document[right]) & (group[left] == group[right])
             & fits(left, right))
    couples.append(np.stack([left[agree], right[agree]], 1))
    single = np.concatenate([left[~agree], right[~agree], order[2 * len(left):]])
  couples = np.concatenate(couples)
  # count / 4 couples are half of the pairs. Random rounding keeps small windows fair on
  # average.
  swaps = min(int(count / 4 + rng.random()), len(couples))
  left, right = rng.permutation(couples)[:swaps].T
  source = np.arange(count)
  source[left] = right
  source[right] = left
  return source
