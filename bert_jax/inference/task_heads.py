"""What fine-tuned models say: labels, entities, answers, choices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from bert_jax.data import long_inputs
from bert_jax.data.inputs import Input
from bert_jax.errors import UserError
from bert_jax.inference.bert import Bert
from bert_jax.labelled import conll
from bert_jax.labelled.choices import ChoiceExample
from bert_jax.labelled.texts import TextExample
from bert_jax.model import chunks
from bert_jax.model import task_heads
from bert_jax.tasks import answers
from bert_jax.tasks import multiple_choice
from bert_jax.tasks import sequence_classification
from bert_jax.tasks import token_classification

Answer = dict[str, Any]


class Predictor:
  """A Bert with the head of one task.

  Args of the constructor:
    bert: with parameters and tokeniser.
    task: one of HEAD_TASKS.

  Raises:
    UserError: the model is for another task.
  """

  def __init__(self, bert: Bert, task: str):
    model = bert.model
    if model.task != task:
      raise UserError(f'this model is for {model.task or "no task: it has not been fine-tuned"}, '
                      f'not for {task}')
    self.bert, self.model = bert, model
    self._max_len = model.facts.get('max_len') or model.config.max_positions
    config, labels = model.config, len(model.labels)
    self._head = {
        'sequence_classification': task_heads.BertForSequenceClassification(config, labels),
        'token_classification': task_heads.BertForTokenClassification(config, labels),
        'question_answering': task_heads.BertForQuestionAnswering(config),
        'multiple_choice': task_heads.BertForMultipleChoice(config)}[task]
    head = self._head
    self._pooled = jax.jit(
        lambda params, batch, starts: head.apply(params, batch, starts, method='pooled'))
    self._tokens = jax.jit(lambda params, batch, starts: head.apply(params, batch))

  def _token_logits(self, inputs: Sequence[Input]) -> list[np.ndarray]:
    """[tokens, ...] of each input."""
    found = [None] * len(inputs)
    for packed, logits in self.bert.run_packed(inputs, self._tokens):
      for row, slot in zip(*np.nonzero(packed.index >= 0)):
        number, start = packed.index[row, slot], packed.starts[row, slot]
        found[number] = logits[row, start:start + len(inputs[number].ids)]
    return found

  def class_logits(self, texts: Sequence[str | tuple[str, str]]) -> np.ndarray:
    """[texts, labels] of sequence classification."""
    pairs = [tuple(text) if isinstance(text, tuple | list) else (text, None) for text in texts]
    long = self.model.facts.get('long') or 'head'
    f = sequence_classification.features(
        [TextExample('', *pair, None) for pair in pairs], self.bert.tokenizer, self._max_len, long)
    pooled = self.bert.per_text(f.inputs, self._pooled)
    vectors = chunks.combine(*map(jnp.asarray, long_inputs.by_text(pooled, f.owners)), long)
    return np.asarray(self._head.apply(self.bert.params, vectors, method='classify'))

  def classify(self, texts: Sequence[str | tuple[str, str]]) -> list[Answer]:
    """For each text or pair {'label', 'probabilities'}, or {'value'} of a regression.

    With several labels at once {'labels', 'probabilities'}: those above one half.
    """
    if not texts:
      return []
    logits, labels = self.class_logits(texts).astype(np.float64), self.model.labels
    if self.model.problem == 'regression':
      return [{'value': float(row[0])} for row in logits]
    if self.model.problem == 'multi_label':
      return [{'labels': [name for name, p in zip(labels, row) if p > 0.5],
               'probabilities': dict(zip(labels, row.tolist()))} for row in special.expit(logits)]
    return [{'label': labels[row.argmax()], 'probabilities': dict(zip(labels, row.tolist()))}
            for row in special.softmax(logits, -1)]

  def word_tags(self, sentences: Sequence[Sequence[Sequence[int]]]) -> list[np.ndarray]:
    """The probabilities of each word's tags, [words, tags], of sentences in pieces of words."""
    f = token_classification.features(sentences, self.bert.tokenizer, self._max_len)
    logits = token_classification.tags_of(f, self._token_logits(f.inputs))
    return [special.softmax(x.astype(np.float64), -1) for x in logits]

  def tag(self, texts: Sequence[str]) -> list[Answer]:
    """For each text {'entities': [{'start', 'end', 'text', 'label', 'probability'}]}.

    Start and end count characters; the probability is the mean of that of the entity's tags.
    """
    spans = [token_classification.find_words(text) for text in texts]
    sentences = token_classification.word_pieces(
        [[text[start:end] for start, end in places] for text, places in zip(texts, spans)],
        self.bert.tokenizer)
    found = []
    for text, places, probabilities in zip(texts, spans, self.word_tags(sentences)):
      tags = [self.model.labels[i] for i in probabilities.argmax(-1)]
      found.append({'entities': [
          {'start': places[e.first][0], 'end': places[e.last][1],
           'text': text[places[e.first][0]:places[e.last][1]], 'label': e.label,
           'probability': float(probabilities[e.first:e.last + 1].max(-1).mean())}
          for e in conll.entities(tags)]})
    return found

  def answer(self, questions: Sequence[tuple[str, str]],
             null_threshold: float | None = None) -> list[Answer]:
    """For each (question, text) {'answer', 'start', 'end', 'probability', 'n_best'}.

    Args:
      questions: what is asked, and of what.
      null_threshold: no answer ('') is given if it scores above the best by more; None = never.
    """
    facts = self.model.facts
    max_len = self._max_len if 'doc_stride' in facts else min(384, self._max_len)
    contexts = answers.read(questions, self.bert.tokenizer, max_len, facts.get('doc_stride', 128))
    logits = iter(self._token_logits([w.input for c in contexts for w in c.windows]))
    found = []
    for (_, text), context in zip(questions, contexts):
      spans, null = answers.best_spans(context, [next(logits) for _ in context.windows], n_best=20,
                                       max_answer_len=facts.get('max_answer_len', 30))
      found.append(answers.answer(text, spans, null, null_threshold))
    return found

  def choose(self, examples: Sequence[tuple[str, Sequence[str]]]) -> list[Answer]:
    """For each (text, choices) {'choice', 'probabilities'}: the number of the best, from 0."""
    f = multiple_choice.features(
        [ChoiceExample('', text, tuple(choices), -1) for text, choices in examples],
        self.bert.tokenizer, self._max_len)
    pooled = self.bert.per_text(f.inputs, self._pooled)
    scores = np.asarray(self._head.apply(self.bert.params, pooled, method='classify'))[:, 0]
    parts = (special.softmax(part.astype(np.float64)) for part in np.split(scores, f.first[1:-1]))
    return [{'choice': int(p.argmax()), 'probabilities': p.tolist()} for p in parts]
