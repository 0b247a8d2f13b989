"""A question on a text as windows, and the answer from the logits of its windows.

As google-research/bert `run_squad.py` does it: windows on a long text overlap, a token that stands
in several counts where it has most context, and the best spans of all windows compete.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from bert_jax.data import inputs as inputs_lib
from bert_jax.data.tokenizer import Tokenizer
from bert_jax.errors import UserError

_MOST_RIVALS = 20


class Window(NamedTuple):
  """A question and a stretch of its text: one input."""

  input: inputs_lib.Input
  first: int  # the token of the text that stands at `offset` of the input
  offset: int
  count: int  # tokens of the text


class Context(NamedTuple):
  """A text in tokens, and the windows that one question reads it in."""

  spans: Sequence[tuple[int, int]]  # the characters [start, end) of each token
  windows: list[Window]


class Span(NamedTuple):
  """A candidate for an answer."""

  score: float  # logit of its start + logit of its end
  start: int  # characters [start, end) of the text
  end: int


def read(questions: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_len: int,
         doc_stride: int) -> list[Context]:
  """The windows of each (question, text), `max_len` tokens long, `doc_stride` tokens apart.

  Raises:
    UserError: a question that leaves no room for its text.
  """
  question_ids = tokenizer.encode_batch([question for question, _ in questions])
  distinct = {text: i for i, text in enumerate(dict.fromkeys(text for _, text in questions))}
  encoded = tokenizer.encode_with_offsets(list(distinct))
  contexts = []
  for question, (shown, text) in zip(question_ids, questions):
    ids, spans = encoded[distinct[text]]
    room = max_len - len(question) - inputs_lib.special_tokens(tokenizer, 2)
    if room < 1:
      raise UserError(f'the question {shown[:60]!r} has {len(question)} tokens, which leaves no '
                      f'room for its text in {max_len}: make max_len larger')
    offset = len(question) + 1 + tokenizer.separators
    windows, start, end = [], 0, 0
    while not windows or end < len(ids):
      start = start + min(doc_stride, room) if windows else 0
      end = min(start + room, len(ids))
      window = inputs_lib.join(tokenizer, question, ids[start:end])
      windows.append(Window(window, start, offset, end - start))
    contexts.append(Context(spans, windows))
  return contexts


def token_span(spans: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
  """The first and last token of the characters [start, end); None if no token is in them."""
  tokens = [i for i, (first, last) in enumerate(spans) if last > start and first < end]
  return (tokens[0], tokens[-1]) if tokens else None


def _most_context(windows: Sequence[Window], number: int) -> np.ndarray:
  """[tokens of the window] bool: no other window shows the token more context."""
  def context(w, positions):
    left, right = positions - w.first, w.first + w.count - 1 - positions
    inside = (left >= 0) & (right >= 0)
    return np.where(inside, np.minimum(left, right) + 0.01 * w.count, -1.0)

  own = windows[number]
  positions = own.first + np.arange(own.count)
  every = np.stack([context(w, positions) for w in windows])
  return every.argmax(0) == number  # of equals the first


def best_spans(context: Context, logits: Sequence[np.ndarray], *, n_best: int,
               max_answer_len: int) -> tuple[list[Span], float]:
  """(the best spans of a text, best first; the score of no answer).

  Args:
    context: with W windows.
    logits: of each window [tokens, 2] of starts and ends.
    n_best: upper bound on the spans, and on the starts and ends of each window that are tried.
    max_answer_len: upper bound on the tokens of an answer.
  """
  candidates, null = {}, np.inf
  for number, (window, scores) in enumerate(zip(context.windows, logits)):
    scores = np.asarray(scores, np.float64)
    null = min(null, float(scores[0].sum()))
    shown = scores[window.offset:window.offset + window.count]
    if not len(shown):
      continue
    allowed = _most_context(context.windows, number)
    starts = [i for i in np.argsort(-shown[:, 0], kind='stable')[:n_best] if allowed[i]]
    ends = np.argsort(-shown[:, 1], kind='stable')[:n_best]
    for i in starts:
      for j in ends:
        if 0 <= j - i < max_answer_len:
          characters = (context.spans[window.first + i][0], context.spans[window.first + j][1])
          score = float(shown[i, 0] + shown[j, 1])
          candidates[characters] = max(score, candidates.get(characters, -np.inf))
  spans = sorted((Span(score, *place) for place, score in candidates.items()), reverse=True)
  return spans[:n_best], null


def answer(text: str, spans: Sequence[Span], null: float,
           null_threshold: float | None) -> dict[str, Any]:
  """The answer and its rivals, with probabilities among them all.

  Args:
    text: the context of the question.
    spans: best first.
    null: the score of no answer.
    null_threshold: '' is the answer if `null` is above the best span by more; None = never.

  Returns:
    {'answer', 'start', 'end', 'probability', 'n_best': [the same of each]}; without an answer ''
    at 0, 0.
  """
  candidates = [{'answer': text[s.start:s.end], 'start': s.start, 'end': s.end, 'score': s.score}
                for s in spans]
  none = {'answer': '', 'start': 0, 'end': 0, 'score': null}
  if null_threshold is not None or not candidates:
    candidates.append(none)
    candidates.sort(key=lambda c: -c['score'])
  scores = np.array([c.pop('score') for c in candidates])
  for candidate, probability in zip(candidates, special.softmax(scores)):
    candidate['probability'] = float(probability)
  given = next((c for c in candidates if c is not none), none)
  if null_threshold is not None and (not spans or null - spans[0].score > null_threshold):
    given = none
  return {**given, 'n_best': [dict(c) for c in candidates[:_MOST_RIVALS]]}
