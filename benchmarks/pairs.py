"""Rows of a corpus: fill, labeled pairs, and how well a rule guesses the labels.

  python -m benchmarks.pairs --records=DIR

Two rules that know no language guess the label of each labeled pair. One sees sentence
bounds, lengths, and the first and last characters of A and B. The other sees style: the
counts of punctuation marks, capitals and digits in A and in B. Each rule (boosted trees)
is fitted to half of an epoch's pairs (at most 40,000) and scored on the other half. A
score of 0.5 means that these features leak nothing. Capitals need a cased vocabulary.
"""

from collections.abc import Sequence

from absl import app, flags
from etils import epath
import numpy as np
from sklearn import ensemble

from bert_jax.data import dataset, negatives, rows
from bert_jax.data import pairs as pairs_lib
from bert_jax.data.records import Records

RECORDS = flags.DEFINE_string('records', None, 'Folder of bert_jax.prepare.', required=True)
_ENDS = '.!?;:,\'")]。！？；：，」』）》”'
_FITTED = 40_000  # pairs at most


def character(c: str) -> int:
  """Returns the class of a character: capital, other letter, digit, end mark, other."""
  tests = c.isupper(), c.isalpha(), c.isdigit(), c in _ENDS, True
  return tests.index(True)


def features(records: Records, pairs: pairs_lib.Pairs, classes: np.ndarray) -> np.ndarray:
  """Returns the features of each labeled pair that the rule of bounds and lengths sees.

  Args:
    records: the corpus.
    pairs: the pairs of some windows.
    classes: [V, 2], the classes of the first and the last character of each token.

  Returns:
    [N, 12]: four character classes and four sentence bounds, then lengths.
  """
  a, a_length, b, b_length = (
      x[pairs.has_b] for x in (pairs.a_start, pairs.a_length, pairs.b_start, pairs.b_length))
  sentences = [records.block(i)[0] for i in range(records.num_blocks)]
  starts = np.zeros(records.num_tokens + 1, bool)
  starts[0] = True
  starts[np.cumsum(np.concatenate(sentences).astype(np.int64))] = True
  begin = lambda at: classes[records.tokens(at), 0]
  end = lambda at: classes[records.tokens(at - 1), 1]
  return np.stack([begin(a), end(a + a_length), begin(b), end(b + b_length), starts[a],
                   starts[a + a_length], starts[b], starts[b + b_length], a_length, b_length,
                   a_length + b_length, a_length - b_length], 1)


def style_features(records: Records, pairs: pairs_lib.Pairs, classes: np.ndarray) -> np.ndarray:
  """Returns the style features of each labeled pair.

  Args:
    records: the corpus.
    pairs: the pairs of some windows.
    classes: [V], see `negatives.token_classes`.

  Returns:
    [N, 11]: three counts in A and in B, their lengths, and the differences of the three
      shares.
  """
  pairs = pairs.take(pairs.has_b)
  a, b = (negatives.styles(records, classes, start, length) for start, length in (
      (pairs.a_start, pairs.a_length), (pairs.b_start, pairs.b_length)))
  lengths = np.stack([pairs.a_length, pairs.b_length], 1)
  return np.concatenate([a, b, lengths, a / lengths[:, :1] - b / lengths[:, 1:]], 1)


def accuracy_of_rule(x: np.ndarray, label: np.ndarray,
                     categorical: Sequence[int] = range(4)) -> float:
  """Returns the accuracy of the best rule on pairs that it was not fitted to.

  Args:
    x: [N, features], from `features` or `style_features`.
    label: [N].
    categorical: the indices of the categorical features.
  """
  order = np.random.default_rng(0).permutation(len(label))
  fitted, scored = np.array_split(order, 2)
  fitted = fitted[:_FITTED]
  rule = ensemble.HistGradientBoostingClassifier(categorical_features=categorical, random_state=0)
  return rule.fit(x[fitted], label[fitted]).score(x[scored], label[scored])


def epoch(source: rows.RowSource, max_windows: int) -> tuple[pairs_lib.Pairs, int]:
  """Returns the pairs of the first windows of an epoch, and the number of their rows."""
  count = min(max_windows, len(source._first_block) - 1)
  by_window = [source._window(0, window) for window in range(count)]
  pairs = pairs_lib.Pairs(*map(np.concatenate, zip(*by_window)))
  return pairs.take(pairs.a_length > 0), len(pairs.label)


def main(_):
  """Prints one line for each row length and kind of pairs."""
  corpus = dataset.open_records(epath.Path(RECORDS.value))
  entries = corpus.tokenizer.tokens(range(corpus.tokenizer.vocab_size))
  entries = [entry.removeprefix('##') or '#' for entry in entries]
  classes = np.array([(character(entry[0]), character(entry[-1])) for entry in entries])
  styles = negatives.token_classes(corpus.tokenizer)
  for sequences, kind in (*(('next_sentence', kind) for kind in negatives.NEGATIVES),
                          ('sentence_order', 'other_document')):
    for max_len in (128, 512):
      layout = pairs_lib.RowLayout.create(max_len, True, sequences, kind)
      source = rows.RowSource(corpus.train, layout, 0, corpus.tokenizer)
      pairs, row_count = epoch(source, max_windows=10**9)
      asked = pairs.has_b
      text = pairs.a_length + pairs.b_length
      label = pairs.label[asked]
      rule = accuracy_of_rule(features(corpus.train, pairs, classes), label)
      style = accuracy_of_rule(style_features(corpus.train, pairs, styles), label, categorical=())
      name = f'{sequences}, {kind}' if sequences == 'next_sentence' else sequences
      print(f'{name}, rows of {max_len}: '
            f'{pairs.size.sum() / row_count / max_len:.1%} full, '
            f'{asked.sum() / row_count:.2f} asked pairs of {text[asked].mean():.0f} tokens in a '
            f'row, {text[asked].sum() / text.sum():.0%} of the text; label 1: '
            f'{label.mean():.3f}, guessed by bounds and lengths: {rule:.4f}, by style: '
            f'{style:.4f}', flush=True)


if __name__ == '__main__':
  app.run(main)
