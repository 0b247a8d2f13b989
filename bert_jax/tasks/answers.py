"""Splits the text of a question into windows, and finds the answer in their logits.

As in google-research/bert `run_squad.py`: the windows of a long text overlap. A token
that occurs in several windows counts in the window where it has the most context. The
best spans of all windows compete.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizers.base import Tokenizer
from bert_jax.errors import require

_MOST_RIVALS = 20  # answers in 'n_best'


class Window(NamedTuple):
  """One input: a question and a part of its text."""

  input: inputs_lib.Input
  first: int  # index in the whole text of the first text token of this window
  offset: int  # index in the input of the same token
  count: int  # text tokens in this window


class Context(NamedTuple):
  """A tokenized text, and the windows of one question on it."""

  spans: Sequence[tuple[int, int]]  # the characters [start, end) of each token
  windows: list[Window]


class Span(NamedTuple):
  """A candidate answer."""

  score: float  # logit of its start + logit of its end
  start: int  # characters [start, end) of the text
  end: int


def read(questions: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_len: int,
         doc_stride: int) -> list[Context]:
  """Splits each (question, text) into windows of at most `max_len` tokens.

  The windows of a text begin `doc_stride` tokens apart, or closer if a window holds fewer
  tokens of the text.

  Raises:
    UserError: a question leaves no room for its text.
  """
  # SQuAD asks several questions about each text: tokenize each text once.
  texts = list(dict.fromkeys(text for _, text in questions))
  encoded = dict(zip(texts, tokenizer.encode_with_spans(texts)))
  encoded_questions = tokenizer.encode_batch([question for question, _ in questions])
  contexts = []
  for question_ids, (question, text) in zip(encoded_questions, questions):
    ids, spans = encoded[text]
    room = max_len - len(question_ids) - inputs_lib.count_special(tokenizer, 2)
    require(room >= 1,
            f'the question {question[:60]!r} has {len(question_ids)} tokens, which '
            f'leaves no room for its text in {max_len}: make max_len larger')
    offset = inputs_lib.start_of_second(tokenizer, question_ids)
    # A stride beyond the room would skip tokens.
    stride = min(doc_stride, room)
    windows = []
    for start in range(0, max(len(ids) - room, 0) + stride, stride):
      part = ids[start:start + room]
      joined = inputs_lib.join(tokenizer, question_ids, part)
      windows.append(Window(joined, start, offset, len(part)))
    contexts.append(Context(spans, windows))
  return contexts


def token_span(spans: Sequence[tuple[int, int]], start: int,
               end: int) -> tuple[int, int] | None:
  """Returns the first and last token that overlap characters [start, end), or None."""
  tokens = [i for i, (first, last) in enumerate(spans) if last > start and first < end]
  return (tokens[0], tokens[-1]) if tokens else None


def _most_context(windows: Sequence[Window]) -> np.ndarray:
  """Returns the index of the window with the most context around each token: [tokens]."""
  highest = np.full(windows[-1].first + windows[-1].count, -1.0)
  window_of = np.zeros(highest.shape, np.int64)
  for number, w in enumerate(windows):
    before = np.arange(w.count)
    # The longer window wins a tie, as in run_squad.py.
    context = np.minimum(before, w.count - 1 - before) + 0.01 * w.count
    better = w.first + np.flatnonzero(context > highest[w.first:w.first + w.count])
    highest[better], window_of[better] = context[better - w.first], number
  return window_of


def best_spans(context: Context, logits: Sequence[np.ndarray], *, n_best: int,
               max_answer_len: int) -> tuple[list[Span], float]:
  """Returns (the best spans of a text, best first; the score of no answer).

  Args:
    context: the text in windows.
    logits: for each window [tokens, 2], the scores of a start and of an end.
    n_best: the most spans to return, and the most starts and ends to try in each window.
    max_answer_len: the most tokens in an answer.
  """
  candidates, null = {}, np.inf
  most_context = _most_context(context.windows)
  for number, (window, scores) in enumerate(zip(context.windows, logits)):
    scores = np.asarray(scores, np.float64)
    # [CLS] scores "no answer". One window with an answer is enough: take the minimum.
    null = min(null, float(scores[0].sum()))
    shown = scores[window.offset:window.offset + window.count]
    starts, ends = np.argsort(-shown, axis=0, kind='stable')[:n_best].T
    for i in starts[most_context[window.first + starts] == number]:
      for j in ends:
        if 0 <= j - i < max_answer_len:
          start, _ = context.spans[window.first + i]
          _, end = context.spans[window.first + j]
          # Two pairs of tokens can cover the same characters.
          score = max(float(shown[i, 0] + shown[j, 1]),
                      candidates.get((start, end), -np.inf))
          candidates[start, end] = score
  spans = sorted((Span(score, *place) for place, score in candidates.items()),
                 reverse=True)
  return spans[:n_best], null


def answer(text: str, spans: Sequence[Span], null: float,
           null_threshold: float | None) -> dict[str, Any]:
  """Returns the answer and its rivals, with probabilities among all of them.

  Args:
    text: the context of the question.
    spans: best first.
    null: the score of no answer.
    null_threshold: the answer is '' if `null` exceeds the score of the best span by more
      than this; None = a span always wins.

  Returns:
    {'answer', 'start', 'end', 'probability', 'n_best'}. 'n_best' is a list of dicts with
    the first four keys, best first. "No answer" is '' with start and end 0.
  """
  no_answer = Span(null, 0, 0)
  is_silent = not spans or (null_threshold is not None
                            and null - spans[0].score > null_threshold)
  chosen, ranked = no_answer if is_silent else spans[0], list(spans)
  # A SQuAD 1.1 model never learned to score "no answer", so this answer does not compete.
  if null_threshold is not None or not spans:
    ranked = sorted([*spans, no_answer], key=lambda span: -span.score)
  probabilities = special.softmax([span.score for span in ranked])
  results = [{'answer': text[s.start:s.end], 'start': s.start, 'end': s.end,
              'probability': float(p)} for s, p in zip(ranked, probabilities)]
  return {**results[ranked.index(chosen)], 'n_best': results[:_MOST_RIVALS]}
