"""Windows over a long text, and the answer from their logits, by hand."""

import numpy as np
import pytest

from bert_jax.data.tokenizers import older
from bert_jax.errors import UserError
from bert_jax.labelled import packed_examples
from bert_jax.labelled.squad import Question
from bert_jax.tasks import answers, question_answering

WORDS = [f'w{i}' for i in range(10)]
TOKENIZER = older.wordpiece(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'who', *WORDS])
TEXT = ' '.join(WORDS)  # w0 at 0..2, w1 at 3..5, ...


def read(max_len=9, doc_stride=2, question='who'):
  return answers.read([(question, TEXT)], TOKENIZER, max_len, doc_stride)[0]


def test_windows():
  context = read()  # room for 9 - 1 - 3 = 5 tokens
  assert [(w.first, w.count) for w in context.windows] == [(0, 5), (2, 5), (4, 5), (6, 4)]
  first = context.windows[1].input
  assert TOKENIZER.tokens(first.ids) == ['[CLS]', 'who', '[SEP]', 'w2', 'w3', 'w4', 'w5', 'w6',
                                         '[SEP]']
  assert list(first.type_ids) == [0, 0, 0, 1, 1, 1, 1, 1, 1]
  assert [(w.first, w.count) for w in read(64).windows] == [(0, 10)]
  # A stride beyond the window would leave tokens out.
  assert [(w.first, w.count) for w in read(9, 50).windows] == [(0, 5), (5, 5)]


def test_a_question_that_fills_the_window_is_refused():
  with pytest.raises(UserError, match='has 6 tokens, which leaves no room for its text in 9'):
    read(question='who ' * 6)


def test_token_spans():
  spans = read().spans
  assert answers.token_span(spans, 3, 5) == (1, 1)
  assert answers.token_span(spans, 3, 11) == (1, 3)
  assert answers.token_span(spans, 4, 5) == (1, 1)  # a part of a token
  assert answers.token_span(spans, 2, 3) is None  # a space


def test_targets_point_at_the_answer_or_at_cls():
  context = read()
  question = Question('1', 'who', TEXT, ('w5 w6',), (15,))
  f = question_answering.features([question], [context], by_window=True)
  targets = [np.argwhere(x).tolist() for x in f.token_targets]
  assert targets == [[[0, 0], [0, 1]],  # w0..w4: without the answer
                     [[6, 0], [7, 1]],  # w2..w6
                     [[4, 0], [5, 1]],  # w4..w8
                     [[0, 0], [0, 1]]]  # w6..w9: only its end
  assert f.count == 4
  whole = question_answering.features([question], [context], by_window=False)
  assert whole.count == 1 and len(whole.inputs) == 4


def logits(context, *scores):
  """Logits of each window, from {(token of the text, 0 start or 1 end): logit}; -5 elsewhere."""
  rows = []
  for window, chosen in zip(context.windows, scores):
    values = np.full((len(window.input.ids), 2), -5.0)
    for (token, end), value in chosen.items():
      values[window.offset + token - window.first if token is not None else 0, end] = value
    rows.append(values)
  return rows


def test_an_answer_at_a_wrong_place_gives_no_target_and_no_loss():
  context = read()
  question = Question('1', 'who', TEXT, ('w5 w6',), (3,))
  f = question_answering.features([question], [context], by_window=True)
  assert not any(x.any() for x in f.token_targets)
  batch = next(packed_examples.Batches(f, batch_size=4, pad_id=0).in_order()).batch
  task = question_answering.QuestionAnswering(None)
  metrics = task.metrics(np.zeros((*batch.tokens.ids.shape, 2), np.float32), batch)
  assert [float(x) for x in metrics['loss']] == [0, 0]


def test_best_spans():
  context = read(64)
  spans, null = answers.best_spans(
      context, logits(context, {(None, 0): 1.0, (None, 1): 2.0, (2, 0): 4.0, (3, 1): 3.0,
                                (1, 1): 9.0, (8, 1): 3.5}), n_best=3, max_answer_len=4)
  assert null == 3.0
  assert spans[0] == (7.0, 6, 11)  # w2 w3: the end at 1 is before the start, 8 is too far
  assert all(a.score >= b.score for a, b in zip(spans, spans[1:]))
  given = answers.answer(TEXT, spans, null, None)
  assert (given['answer'], given['start'], given['end']) == ('w2 w3', 6, 11)
  weights = np.exp([s.score for s in spans])
  assert given['probability'] == pytest.approx(weights[0] / weights.sum())
  assert [c['answer'] for c in given['n_best']] == [TEXT[s.start:s.end] for s in spans]


def test_no_answer():
  context = read(64)
  spans, null = answers.best_spans(
      context, logits(context, {(None, 0): 4.0, (None, 1): 4.0, (2, 0): 4.0, (3, 1): 3.0}),
      n_best=3, max_answer_len=4)
  assert null - spans[0].score == 1.0
  assert answers.answer(TEXT, spans, null, None)['answer'] == 'w2 w3'
  assert answers.answer(TEXT, spans, null, 1.5)['answer'] == 'w2 w3'
  none = answers.answer(TEXT, spans, null, 0.5)
  assert (none['answer'], none['start'], none['end']) == ('', 0, 0)
  assert none['n_best'][0]['answer'] == ''
  assert sum(c['probability'] for c in none['n_best']) == pytest.approx(1)


def test_a_token_counts_where_it_has_most_context():
  context = read()  # windows 0-4, 2-6, 4-8, 6-9
  # w4 stands at the end of the first window, in the middle of the second.
  spans, _ = answers.best_spans(
      context, logits(context, {(4, 0): 9.0}, {(4, 0): 1.0, (4, 1): 1.0}, {}, {}),
      n_best=3, max_answer_len=4)
  assert spans[0] == (2.0, 12, 14)


def test_the_null_score_is_the_lowest_of_all_windows():
  context = read()
  every = [{(None, 0): x, (None, 1): 0.0} for x in (3.0, -1.0, 2.0, 5.0)]
  assert answers.best_spans(context, logits(context, *every), n_best=3, max_answer_len=4)[1] == -1.0
