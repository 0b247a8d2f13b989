"""Minimal pairs: how often a masked LM prefers the acceptable sentence (BLiMP).

Warstadt et al. 2020, https://arxiv.org/abs/1912.00582. The score of a sentence is its
pseudo-log-likelihood (Salazar et al. 2020, https://arxiv.org/abs/1910.14659): the sum of
log P(token | the others) over its tokens, each masked alone. In a pair of EWoK (Ivanova et
al. 2024, https://arxiv.org/abs/2405.09605), both sentences follow one context, and only
their own tokens count. BabyLM's evaluation pipeline computes the same scores and means,
except that it counts ties as right.
"""

from collections.abc import Sequence
import math
import time
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from bert_jax.data import corpus
from bert_jax.data import inputs as inputs_lib
from bert_jax.errors import require
from bert_jax.evaluation.report import Report
from bert_jax.inference import json_lines
from bert_jax.inference.bert import Bert
from bert_jax.labelled import table

SCORES = '.pairs.jsonl'  # suffix of a file next to the report: scores of all pairs
_BLIMP = ('sentence_good', 'sentence_bad', 'UID', 'linguistics_term')
_EWOK = ('Target1', 'Target2', 'Domain', 'Context1')
_PAIRS_AT_ONCE = 512  # a kill loses the scores of one such window


class Pair(NamedTuple):
  """An acceptable and an unacceptable sentence, which differ in one point."""

  good: str
  bad: str
  paradigm: str
  phenomenon: str
  context: str  # comes before both sentences, and is not scored; '' = none
  where: str  # file and line, for messages

  @property
  def sentences(self) -> list[str]:
    before = f'{self.context} ' if self.context else ''
    return [before + self.good, before + self.bad]


def read(source: str) -> list[Pair]:
  """Reads pairs from the JSON lines of a glob of files, gzipped or not.

  A line has the fields of BLiMP, the fields of EWoK, or only the two sentences of BLiMP,
  as in BabyLM's supplement.

  Raises:
    UserError: a line lacks a field or has an empty one, or the files have no line.
  """
  pairs = []
  for file in corpus.find_files(source):
    for row in table.read_jsonl(file):
      fields = _EWOK if 'Target1' in row.values else _BLIMP
      if not row.values.keys() & set(_BLIMP[2:]) and fields == _BLIMP:
        fields = _BLIMP[:2]
      values = [*map(row.text, fields)]
      require(all(map(str.strip, values)),
              f'{row.where}: one of {", ".join(fields)} is empty')
      if fields == _EWOK:
        good, bad, domain, context = values
        values = [good, bad, domain, 'EWoK', context]
      elif len(fields) == 2:
        values += [epath.Path(file).name.partition('.')[0], 'supplement', '']
      else:
        values.append('')
      pairs.append(Pair(*values, row.where))
  require(bool(pairs), f'--data={source} holds no pair')
  return pairs


def _check_lengths(bert: Bert, pairs: Sequence[Pair]):
  """Raises UserError for an empty sentence, or one that is too long for the model."""
  room = bert.config.max_positions - inputs_lib.count_special(bert.tokenizer, 1)
  sentences = [sentence for pair in pairs for sentence in pair.sentences]
  for i, ids in enumerate(bert.tokenizer.encode_batch(sentences)):
    pair = pairs[i // 2]
    name = f'Context1 and {_EWOK[i % 2]}' if pair.context else _BLIMP[i % 2]
    require(0 < len(ids) <= room,
            f'{pair.where}: {name} has {len(ids)} tokens, '
            f'this model scores sentences of 1 to {room}: leave the pair out')
  # After a context, a target without a token would have the best score, 0.
  after_context = [pair for pair in pairs if pair.context]
  targets = [target for pair in after_context for target in (pair.good, pair.bad)]
  for i, ids in enumerate(bert.tokenizer.encode_batch(targets)):
    require(bool(ids), f'{after_context[i // 2].where}: {_EWOK[i % 2]} has 0 tokens: leave '
                       'the pair out')


def pseudo_log_likelihoods(bert: Bert, texts: Sequence[str],
                           contexts: Sequence[int] | None = None) -> np.ndarray:
  """Computes the pseudo-log-likelihood of each text.

  Args:
    bert: a model with a masked-LM head.
    texts: the texts.
    contexts: how many characters at the start of each text are not scored. A token that
      begins among them and ends after them is scored.

  Returns:
    [texts] float64, in nats.
  """
  scored = bert.score(texts)
  if not any(contexts or ()):
    return -np.array([text['surprisal'] for text in scored])
  totals = []
  for text, context, (_, spans) in zip(scored, contexts,
                                       bert.tokenizer.encode_with_offsets(texts)):
    totals.append(sum(token['surprisal']
                      for token, (_, end) in zip(text['tokens'], spans, strict=True)
                      if end > context))
  return -np.array(totals)


def _score(bert: Bert, pairs: Sequence[Pair], path: epath.Path) -> list[dict[str, Any]]:
  """Writes the scores of all pairs as JSON lines, and returns them."""
  def scores(window):
    sentences = [sentence for pair in window for sentence in pair.sentences]
    contexts = [len(pair.context) for pair in window for _ in pair.sentences]
    likelihoods = pseudo_log_likelihoods(bert, sentences, contexts).tolist()
    return [{'UID': pair.paradigm, 'good': good, 'bad': bad}
            for pair, good, bad in zip(window, likelihoods[::2], likelihoods[1::2])]

  began = time.monotonic()
  job = {'model': json_lines.identity(bert.model), 'pairs': pairs}
  lines, count = json_lines.write_all(path, job, pairs, len(pairs), _PAIRS_AT_ONCE,
                                      scores, unit=' pairs')
  print(f'{count / (time.monotonic() - began):,.0f} pairs a second', flush=True)
  return lines


def _row(name: str, is_right: Sequence[bool]) -> list[Any]:
  accuracy, n = float(np.mean(is_right)), len(is_right)
  # The standard error of a proportion.
  return [name, n, accuracy, math.sqrt(accuracy * (1 - accuracy) / n)]


def evaluate(bert: Bert, source: str, path: epath.Path) -> Report:
  """Returns the accuracy by paradigm, by phenomenon and overall, with standard errors.

  Args:
    bert: a model with a masked-LM head.
    source: a glob of files of pairs.
    path: the path of the report; the scores of all pairs are in PATH.pairs.jsonl.

  Raises:
    UserError: no masked-LM head, a malformed file, or a sentence that the model cannot
      score.
  """
  bert.require_head('mlm', 'masked-LM head')
  pairs = read(source)
  # Before the first score: a bad sentence must not cost hours.
  _check_lengths(bert, pairs)
  lines = _score(bert, pairs, path.with_suffix(SCORES))
  is_right = np.array([line['good'] > line['bad'] for line in lines])
  paradigm_of = np.array([pair.paradigm for pair in pairs])
  phenomenon_of = np.array([pair.phenomenon for pair in pairs])
  rows, all_paradigms = [], []
  for phenomenon in sorted(set(phenomenon_of)):
    member = phenomenon_of == phenomenon
    paradigms = sorted(set(paradigm_of[member]))
    of_paradigms = [
        _row(f'{phenomenon}: {name}', is_right[member & (paradigm_of == name)])
        for name in paradigms]
    rows += of_paradigms
    all_paradigms += of_paradigms
    # With one paradigm, the row of the phenomenon would repeat it.
    if len(paradigms) > 1:
      rows.append(_row(phenomenon, is_right[member]))
  # Paradigms of different sizes count equally, as in published tables of BLiMP.
  accuracies, errors = np.array([row[2:] for row in all_paradigms]).T
  rows += [['mean of the paradigms', len(pairs), float(accuracies.mean()),
            float(np.linalg.norm(errors)) / len(errors)],
           _row('all', is_right)]
  return Report({'accuracy': rows[-1][2], 'mean_of_paradigms': rows[-2][2]},
                ('pairs of', 'pairs', 'accuracy', 'standard error'), rows, 'accuracy')
